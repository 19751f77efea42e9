"""How long each phase took over many handovers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.trace.phases import Phase
from kvferry.trace.timeline import Timeline

HANDOVER = "handover"
_FIRST = (Phase.PREFILL_QUEUE.value, Phase.PREFILL.value, HANDOVER)


@dataclass(frozen=True, slots=True)
class Durations:
    """Of one phase.

    Attributes:
        phase: the value of a `Phase`, or `handover` for the whole.
        count: how often it was recorded; a load's stages once for every worker.
    """

    phase: str
    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


def durations(timelines: Iterable[Timeline]) -> tuple[Durations, ...]:
    """Of every phase that was recorded, in the order of a handover."""
    found: dict[str, list[int]] = {name: [] for name in (*_FIRST, *(phase.value for phase in Phase))}
    for one in timelines:
        if one.lasted_ns is not None:
            found[HANDOVER].append(one.lasted_ns)
        stages = (span for worker in one.workers for span in worker.spans)
        for span in (*one.before, *one.to_load, *stages, *one.from_load, *((one.held,) if one.held else ())):
            found.setdefault(span.phase, []).append(span.lasted_ns)
    return tuple(_of(phase, sorted(lasted)) for phase, lasted in found.items() if lasted)


def outcomes(timelines: Iterable[Timeline]) -> dict[str, int]:
    """How many handovers ended how, the most frequent first."""
    return dict(Counter(one.outcome for one in timelines).most_common())


def _of(phase: str, lasted: Sequence[int]) -> Durations:
    return Durations(phase, len(lasted), _rank(lasted, 50), _rank(lasted, 99), lasted[-1])


def _rank(lasted: Sequence[int], percent: int) -> int:
    """The nearest rank: the least value that so many per cent do not exceed."""
    return lasted[max(0, -(-percent * len(lasted) // 100) - 1)]
