"""Measured values of each setup, added during a run, and their percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.serve_load import Timing
from bench.serve_setups import Setup

NAN = float("nan")
CROWD, SATURATING = 8, 16
"""Requests at once: some, and as many as an engine takes (`max_num_seqs`)."""


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
    """Requests of one kind.

    Attributes:
        timings: of all requests, well or badly ended.
        rates: answers per second, of each turn.
    """

    timings: list[Timing] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, timings: Sequence[Timing], seconds: float) -> None:
        """Add a turn."""
        self.timings += timings
        self.rates.append(sum(1 for one in timings if not one.error) / seconds)

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

    def of(self, prompt_tokens: int) -> Batch:
        """Those of one length."""
        return Batch(
            timings=[one for one in self.timings if one.prompt_tokens == prompt_tokens]
        )

    def handover_s(self, share: float = 0.5) -> float:
        """A percentile of the handover."""
        return percentile((one.handover_s for one in self.good), share)

    def first_s(self, share: float = 0.5) -> float:
        """A percentile of the time to the first token."""
        return percentile((one.first_s for one in self.good), share)

    def above_step_s(self, share: float = 0.5) -> float:
        """A percentile of the handover without the decode step that every first token takes."""
        return self.handover_s(share) - self.decode_step_s


@dataclass(slots=True)
class SetupFigures:
    """One setup's figures; what was not reached before an error is empty.

    Attributes:
        idle: cores that each engine takes while it has no request.
        leased: cores of a producer with one lease that no consumer reads.
        batches: requests through the router, or to the single engine, by how many are under way at once.
        error: why it ended early.
    """

    setup: Setup
    idle: list[float] = field(default_factory=list)
    leased: float = NAN
    batches: dict[int, Batch] = field(
        default_factory=lambda: {count: Batch() for count in (1, CROWD, SATURATING)}
    )
    error: str = ""


def by_length(batch: Batch) -> Sequence[int]:
    """The prompt lengths that a batch has answers of."""
    return sorted({one.prompt_tokens for one in batch.good})
