"""What a recording says: its handovers, the slowest first, and the durations of each phase over all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.trace.clocks import align
from kvferry.trace.events import Phase
from kvferry.trace.handover import Handover, Span
from kvferry.trace.joining import join
from kvferry.trace.outcome import outcome_of
from kvferry.trace.reading import Recording

_MAX_NOTES = 8
"""Of one kind."""


class Durations(msgspec.Struct, frozen=True):
    """Durations of one phase.

    Attributes:
        count: times recorded; a load's stages count once for every worker.
    """

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The selected handovers of a recording.

    Attributes:
        handovers: the slowest first; then those that never ended, the longest held first.
        durations: of every recorded phase, in the order of a handover.
        outcomes: number of handovers by outcome, the most frequent first.
        num_processes: processes whose files were read.
        notes: about clocks and damaged files, one line each.
    """

    handovers: tuple[Handover, ...]
    durations: dict[Phase, Durations]
    outcomes: dict[str, int]
    num_processes: int
    notes: tuple[str, ...]


def summarize(recording: Recording, request: str = "") -> Summary:
    """Join all processes' events, align their clocks and make the timeline of every handover.

    Args:
        request: a part of any id of the handovers that are selected; all have the empty one.
    """
    handovers = join(recording.processes)
    clocks = align(handovers)
    selected = [handover for handover in handovers if handover.has_id(request)]
    selected.sort(key=_slowness, reverse=True)
    outcomes = Counter(map(outcome_of, selected))
    return Summary(
        handovers=tuple(selected),
        durations=_durations(selected),
        outcomes=dict(outcomes.most_common()),
        num_processes=len(recording.processes),
        notes=(
            *_first(clocks, "more pairs of clocks"),
            *_first(recording.problems, "more problems with files"),
        ),
    )


def _slowness(handover: Handover) -> tuple[float, float]:
    # Those that never ended come last, whatever they took.
    lasted_ms = -1.0
    if handover.handover_ms is not None:
        lasted_ms = handover.handover_ms
    held_ms = 0.0
    if handover.held is not None:
        held_ms = handover.held.lasted_ms
    return (lasted_ms, held_ms)


def _durations(handovers: Iterable[Handover]) -> dict[Phase, Durations]:
    lasted_ms: defaultdict[Phase, list[float]] = defaultdict(list)
    for handover in handovers:
        if handover.handover_ms is not None:
            lasted_ms[Phase.HANDOVER].append(handover.handover_ms)
        for span in _counted_spans(handover):
            lasted_ms[span.phase].append(span.lasted_ms)
    durations = {}
    for phase in Phase:
        if phase in lasted_ms:
            values = sorted(lasted_ms[phase])
            p50_ms = _percentile(values, 50)
            p99_ms = _percentile(values, 99)
            durations[phase] = Durations(len(values), p50_ms, p99_ms, values[-1])
    return durations


def _counted_spans(handover: Handover) -> Iterator[Span]:
    yield from handover.steps
    load_phases = set()
    # Of every worker: one that is slow, but not the last, is in no critical path.
    for worker in handover.workers:
        yield from handover.after_prefill(worker.stages)
        yield from worker.chunks
        load_phases |= {span.phase for span in worker.stages}
    for span in handover.phases:
        if span.phase not in load_phases:
            yield span
    if handover.held is not None:
        yield handover.held


def _percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank: the least of the sorted values that `percent` of all do not exceed."""
    rank = -(-percent * len(values) // 100)
    return values[max(0, rank - 1)]


def _first(notes: Sequence[str], more: str) -> list[str]:
    """The first notes, and the number of all others."""
    shown = [*notes[:_MAX_NOTES]]
    num_left = len(notes) - _MAX_NOTES
    if num_left > 0:
        shown.append(f"and {num_left} {more}")
    return shown
