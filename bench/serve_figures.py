"""Measured values of each setup, added during a run, and their percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.serve_cpu import Cores
from bench.serve_load import Timing
from bench.serve_setups import Setup

NAN = float("nan")
BATCHES = ("direct", "routed", "direct_crowd", "routed_crowd", "cached", "cached_crowd")


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is no smaller than this share of all; not a number when there are none.

    Example: of 1, 2, 3, 4 the percentile 0.5 is 2, and 0.99 is 4.
    """
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else NAN


def median(values: Iterable[float]) -> float:
    """The percentile 0.5."""
    return percentile(values, 0.5)


@dataclass(frozen=True, slots=True)
class Contact:
    """Handovers between two engines without an earlier contact; the first one beside those that follow."""

    first_s: float
    warm_s: tuple[float, ...]

    @property
    def extra_s(self) -> float:
        """Time of the first, less the median of the others."""
        return self.first_s - median(self.warm_s)


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

    def raw(self) -> dict[str, Any]:
        """As plain values, in milliseconds."""
        columns = ("prompt_tokens", "prefill_ms", "first_ms", "gap_ms")
        rows = [
            [
                one.prompt_tokens,
                round(1e3 * one.prefill_s, 2) if one.prefill_s is not None else None,
                round(1e3 * one.first_s, 2),
                round(1e3 * median(one.gaps_s), 2),
            ]
            for one in self.good
        ]
        errors = [one.error for one in self.timings if one.error]
        return {
            "at_once": self.at_once,
            "asked": self.asked,
            "seconds": self.seconds if math.isfinite(self.seconds) else None,
            "columns": columns,
            "rows": rows,
            "errors": errors,
        }


@dataclass(slots=True)
class SetupFigures:
    """One setup's figures; what was not reached before an error is empty.

    Attributes:
        idle: cores by engine and process, with nothing asked.
        leased: the producer's, with one lease that no consumer reads.
        contact: of the freshly started pair.
        direct: driven as the router does, so that the producer's answer is seen.
        routed: through the router, or to the single engine.
        cached: of a single engine, the same prompt again.
        notes: what else went wrong.
        error: why it ended early.
    """

    setup: Setup
    start_s: float = NAN
    idle: dict[str, Cores] = field(default_factory=dict)
    leased: Cores | None = None
    contact: Contact | None = None
    direct: Batch = field(default_factory=Batch)
    routed: Batch = field(default_factory=Batch)
    direct_crowd: Batch = field(default_factory=Batch)
    routed_crowd: Batch = field(default_factory=Batch)
    cached: Batch = field(default_factory=Batch)
    cached_crowd: Batch = field(default_factory=Batch)
    notes: list[str] = field(default_factory=list)
    error: str = ""

    def raw(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "start_s": self.start_s if math.isfinite(self.start_s) else None,
            "idle_cores": {engine: dict(cores) for engine, cores in self.idle.items()},
            "leased_cores": dict(self.leased) if self.leased else None,
            "first_contact_ms": _raw_contact(self.contact) if self.contact else None,
            **{name: getattr(self, name).raw() for name in BATCHES},
            "notes": self.notes,
            "error": self.error,
        }


@dataclass(slots=True)
class ContactFigures:
    """First contacts of engines with many blocks.

    Attributes:
        contacts: one for each consumer.
        said: what the consumers' logs say of the first one.
    """

    setup: Setup
    blocks: int = 0
    layers: int = 0
    contacts: list[Contact] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def extra_s(self) -> float:
        """The median of all."""
        return median(one.extra_s for one in self.contacts)

    def raw(self) -> dict[str, Any]:
        """As plain values."""
        contacts = [_raw_contact(one) for one in self.contacts]
        return {
            "blocks": self.blocks,
            "layers": self.layers,
            "contacts_ms": contacts,
            "log": self.said,
            "error": self.error,
        }


def by_length(batch: Batch) -> Sequence[int]:
    """The prompt lengths that a batch has answers of."""
    return sorted({one.prompt_tokens for one in batch.good})


def _raw_contact(contact: Contact) -> dict[str, Any]:
    return {"first": round(1e3 * contact.first_s, 2), "warm": [round(1e3 * one, 2) for one in contact.warm_s]}
