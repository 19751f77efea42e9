"""Measured values of each setup, added during a run, and their percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.serve_load import Timing
from bench.serve_setups import Setup

Cores = Mapping[str, float]
"""Processor seconds per second, by process; `all` is their sum."""
NAN = float("nan")
BATCHES = {
    "direct": "handovers",
    "routed": "requests",
    "direct_crowd": "handovers, 8 at once",
    "routed_crowd": "requests, 8 at once",
    "cached": "prompts in its own cache",
    "cached_crowd": "prompts in its own cache, 8 at once",
}
"""Batches of a setup, in words."""


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is no smaller than this share of all; not a number when there are none.

    Example: of 1, 2, 3, 4 the percentile 0.5 is 2, and 0.99 is 4.
    """
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else NAN


def median(values: Iterable[float]) -> float:
    """The percentile 0.5."""
    return percentile(values, 0.5)


@dataclass(slots=True)
class Batch:
    """Requests of one kind, so many at once.

    Attributes:
        timings: those that ended, well or badly.
        asked: how many there were to be; fewer timings mean that the time for them was up.
    """

    at_once: int = 1
    asked: int = 0
    seconds: float = NAN
    timings: list[Timing] = field(default_factory=list)

    @property
    def good(self) -> list[Timing]:
        """Those that were answered."""
        return [one for one in self.timings if not one.error]

    @property
    def failed(self) -> int:
        """Those that were not."""
        return len(self.timings) - len(self.good)

    @property
    def decode_step_s(self) -> float:
        """The usual time from one token to the next."""
        return median(gap for one in self.good for gap in one.gaps_s)

    def handover_s(self, share: float) -> float:
        """A percentile of the handover."""
        return percentile((one.handover_s for one in self.good), share)

    def first_s(self, share: float, prompt_tokens: int | None = None) -> float:
        """A percentile of the time to the first token, of all prompts or those of one length."""
        return percentile((one.first_s for one in self.good if prompt_tokens in (None, one.prompt_tokens)), share)


@dataclass(slots=True)
class SetupFigures:
    """One setup's figures; what was not reached before an error is empty.

    Attributes:
        idle: cores by engine and process, with nothing asked.
        leased: the producer's, with one lease that no consumer reads.
        direct: driven as the router does, so that the producer's answer is seen.
        routed: through the router, or to the single engine.
        cached: of a single engine, the same prompt again.
        error: why it ended early.
    """

    setup: Setup
    idle: dict[str, Cores] = field(default_factory=dict)
    leased: Cores | None = None
    direct: Batch = field(default_factory=Batch)
    routed: Batch = field(default_factory=Batch)
    direct_crowd: Batch = field(default_factory=Batch)
    routed_crowd: Batch = field(default_factory=Batch)
    cached: Batch = field(default_factory=Batch)
    cached_crowd: Batch = field(default_factory=Batch)
    error: str = ""


def by_length(batch: Batch) -> Sequence[int]:
    """The prompt lengths that a batch has answers of."""
    return sorted({one.prompt_tokens for one in batch.good})
