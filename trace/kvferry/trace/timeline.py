"""A handover as phases on one clock, the reference of `clocks.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.trace.clocks import Clocks
from kvferry.trace.events import (
    DecodeArrived,
    DecodeScheduled,
    LeaseOver,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Phase,
    PrefillArrived,
    PrefillScheduled,
    PrefixAsked,
    ProcessStarted,
    Recomputed,
    RequestEvent,
)
from kvferry.trace.handover import Handover, LoadTrace
from kvferry.trace.outcome import GOOD, missing_parts, outcome_of


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in nanoseconds on the reference clock.

    Attributes:
        stop_token: the token up to which a step of a prefill computed, or a read of it read; None of other phases.
    """

    phase: Phase
    begun_ns: int
    ended_ns: int
    stop_token: int | None = None

    @property
    def lasted_ns(self) -> int:
        """Its length."""
        return self.ended_ns - self.begun_ns


@dataclass(frozen=True, slots=True)
class WorkerSpans:
    """The stages of one worker's load, and its reads if it followed the prefill."""

    load: LoadTrace
    spans: tuple[Span, ...]
    chunks: tuple[Span, ...] = ()

    @property
    def place(self) -> str:
        """The worker's name in its engine."""
        process = self.load.process
        return process.place or f"pid {process.pid}"

    @property
    def begun_ns(self) -> int:
        """When it had its order."""
        return self.spans[0].begun_ns

    @property
    def ended_ns(self) -> int:
        """When its load ended."""
        return self.spans[-1].ended_ns


@dataclass(frozen=True, slots=True)
class Timeline:
    """One handover, phase by phase. Phases without records are left out.

    Attributes:
        before: phases until the prompt was computed.
        steps: of the prefill, from the one on in which the consumer could begin to read.
        to_load: from then until the last worker had the order to load, or until the consumer went on without a load.
        workers: every worker's load, in the order of their places.
        from_load: from the end of the last worker's load on.
        held: from the prompt's end until the producer had freed its blocks.
        zero_ns: when the prompt was computed; where that was not recorded, when the consumer had the request.
        ended_ns: when the consumer could go on, with or without a load; None where it never did.
        outcome: `loaded`, `recomputed: …`, or another text for the handover's end.
        missing: names of the parts that were not recorded.
    """

    handover: Handover
    before: tuple[Span, ...]
    steps: tuple[Span, ...]
    to_load: tuple[Span, ...]
    workers: tuple[WorkerSpans, ...]
    from_load: tuple[Span, ...]
    held: Span | None
    zero_ns: int
    ended_ns: int | None
    outcome: str
    missing: tuple[str, ...]

    @property
    def last(self) -> WorkerSpans | None:
        """The worker whose load ended last; None where no load was recorded."""
        return _last_of(self.workers)

    @property
    def path(self) -> tuple[Span, ...]:
        """The critical path of the handover: while workers load, the stages of the last one."""
        load_spans: tuple[Span, ...] = ()
        if self.last is not None:
            load_spans = self.last.spans
        return self.after_prefill((*self.to_load, *load_spans, *self.from_load))

    def after_prefill(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """These spans; of a consumer that had the params before the prompt's end, only their parts after the zero."""
        # What overlaps with the prefill delays nobody, so it is no part of the handover.
        arrived = self.handover.get(DecodeArrived)
        if arrived is None or not arrived.is_early:
            return spans
        parts = []
        for span in spans:
            begun_ns = max(span.begun_ns, self.zero_ns)
            if span.begun_ns >= self.zero_ns or span.ended_ns > self.zero_ns:
                parts.append(Span(span.phase, begun_ns, span.ended_ns))
        return tuple(parts)

    @property
    def cause(self) -> Span | None:
        """What made the handover as slow as it was: the longest phase of its critical path."""
        return max(self.path, key=lambda span: span.lasted_ns, default=None)

    @property
    def lasted_ns(self) -> int | None:
        """Duration of the handover: from the prompt's end until the consumer could go on."""
        if self.ended_ns is None:
            return None
        return max(0, self.ended_ns - self.zero_ns)

    @property
    def is_good(self) -> bool:
        """Whether the consumer had the prompt without computing it."""
        return self.outcome in GOOD

    @property
    def bytes(self) -> int:
        """Bytes that all workers loaded."""
        return sum(load.ended.bytes for load in self.handover.loads)

    @property
    def early_bytes(self) -> int:
        """The part of these that was read before the prefill had ended."""
        return min(
            self.bytes, sum(load.ended.early_bytes for load in self.handover.loads)
        )

    @property
    def gb_s(self) -> float | None:
        """Bytes over the time in which any worker read; None where nothing was loaded, or reads waited for steps."""
        reads = [
            span
            for worker in self.workers
            for span in worker.spans
            if span.phase in _READS
        ]
        # While a prompt is computed, reads wait for its steps: the figure would be the prefill's speed, not the link's.
        if not self.bytes or not reads or self.early_bytes:
            return None
        begun_ns = min(span.begun_ns for span in reads)
        ended_ns = max(span.ended_ns for span in reads)
        if ended_ns == begun_ns:
            return None
        seconds = (ended_ns - begun_ns) / 1e9
        return self.bytes / seconds / 1e9


# Posting counts: the first reads are under way while the others are posted.
_READS = (Phase.POSTING, Phase.READING)


# The time of the first event of each kind on the reference clock; nothing of a kind that was not recorded.
_Times = dict[type[RequestEvent], int]


def make_timeline(handover: Handover, clocks: Clocks) -> Timeline:
    """The timeline of a handover, its times shifted to its reference clock."""
    times = _times_of(handover, clocks)
    given = times.get(ParamsGiven)
    asked = times.get(PrefixAsked)
    arrived = times.get(DecodeArrived)
    ordered = times.get(LoadOrdered)
    resumed = _first_known(times.get(LoadReported), times.get(Recomputed))
    stepped = times.get(DecodeScheduled)
    if resumed is None and ordered is None:
        # The consumer has all blocks already: it goes on with its first step.
        resumed = stepped
        stepped = None
    workers = _workers(handover, clocks)
    last = _last_of(workers)
    if last is None:
        # No worker has recorded its stages: the load is one phase.
        of_load = _spans((Phase.LOAD, ordered, resumed))
        loaded = None
    else:
        of_load = _spans((Phase.ORDER, ordered, last.begun_ns))
        loaded = last.ended_ns
    # While the producer kept the prompt's blocks for the consumer.
    kept_from = _first_known(given, loaded)
    over = times.get(LeaseOver)
    held = None
    if kept_from is not None and over is not None:
        held = _span(Phase.HELD, kept_from, over)
    zero_ns = _first_known(
        # No prompt ends for a prefix: it begins when engines are asked for it.
        asked,
        given,
        # Where the prompt's end was not recorded, the earliest that is known of the consumer, then anything else.
        arrived,
        ordered,
        times.get(Recomputed),
        *(worker.begun_ns for worker in workers),
        *times.values(),
    )
    return Timeline(
        handover=handover,
        before=_spans(
            (
                Phase.PREFILL_QUEUE,
                times.get(PrefillArrived),
                times.get(PrefillScheduled),
            ),
            (Phase.PREFILL, times.get(PrefillScheduled), given),
        ),
        steps=_steps(handover, clocks, given),
        to_load=(
            *_spans(
                (Phase.ROUTER, given if asked is None else None, arrived),
                (Phase.PREFIX_QUERY, asked, arrived),
                (Phase.DECODE_QUEUE, arrived, _first_known(ordered, resumed)),
            ),
            *of_load,
        ),
        workers=workers,
        from_load=_spans(
            (Phase.REPORT, loaded, resumed), (Phase.FIRST_STEP, resumed, stepped)
        ),
        held=held,
        zero_ns=zero_ns or 0,
        ended_ns=resumed,
        outcome=outcome_of(handover),
        missing=missing_parts(handover),
    )


def _times_of(handover: Handover, clocks: Clocks) -> _Times:
    times: _Times = {}
    for half in handover.halves:
        shift_ns = clocks.shift_ns(half.process, handover)
        for kind, event in half.events.items():
            times[kind] = event.at_ns + shift_ns
    is_unusable = DecodeArrived not in times and LoadOrdered not in times
    if is_unusable and Recomputed in times:
        # Unusable params are found at the arrival, which is not recorded then.
        times[DecodeArrived] = times[Recomputed]
    return times


def _first_known(*times_ns: int | None) -> int | None:
    """The first of these times that was recorded."""
    return next((time_ns for time_ns in times_ns if time_ns is not None), None)


def _steps(handover: Handover, clocks: Clocks, given: int | None) -> tuple[Span, ...]:
    """A step ends where the next one begins, the last one with the prompt."""
    if handover.prefill is None or not handover.steps:
        return ()
    shift_ns = clocks.shift_ns(handover.prefill.process, handover)
    begins = [step.at_ns + shift_ns for step in handover.steps]
    # Where the prompt's end was not recorded, the last step has no length.
    ends = [*begins[1:], begins[-1]]
    if given is not None:
        ends[-1] = given
    spans = []
    for step, begun_ns, ended_ns in zip(handover.steps, begins, ends, strict=True):
        spans.append(_span(Phase.PREFILL_STEP, begun_ns, ended_ns, 0, step.tokens))
    return tuple(spans)


def _workers(handover: Handover, clocks: Clocks) -> tuple[WorkerSpans, ...]:
    """The loads of all workers, in the order of their places."""
    workers = []
    for load in sorted(handover.loads, key=lambda load: _by_place(load.process)):
        shift_ns = clocks.shift_ns(load.process, handover)
        stages = []
        for stage in load.ended.stages:
            stages.append(_span(stage.stage, stage.begun_ns, stage.ended_ns, shift_ns))
        if not stages:
            stages.append(_span(Phase.LOAD, load.begun_ns, load.ended_ns, shift_ns))
        chunks = []
        for chunk in load.ended.chunks:
            read = (chunk.begun_ns, chunk.ended_ns, shift_ns, chunk.stop_token)
            chunks.append(_span(Phase.CHUNK_READ, *read))
        workers.append(WorkerSpans(load, tuple(stages), tuple(chunks)))
    return tuple(workers)


def _by_place(process: ProcessStarted) -> tuple[object, ...]:
    # By length first, so that tp10 comes after tp9.
    return (len(process.place), process.place, process.host, process.pid)


def _last_of(workers: Iterable[WorkerSpans]) -> WorkerSpans | None:
    return max(workers, key=lambda worker: worker.ended_ns, default=None)


def _span(
    phase: Phase,
    begun_ns: int,
    ended_ns: int,
    shift_ns: int = 0,
    stop_token: int | None = None,
) -> Span:
    """A span; an end before the begin is moved to it."""
    # The clock may have been set back between the two.
    return Span(
        phase, begun_ns + shift_ns, max(begun_ns, ended_ns) + shift_ns, stop_token
    )


def _spans(*phases: tuple[Phase, int | None, int | None]) -> tuple[Span, ...]:
    """Spans of the phases with both ends known."""
    spans = []
    for phase, begun_ns, ended_ns in phases:
        if begun_ns is not None and ended_ns is not None:
            spans.append(_span(phase, begun_ns, ended_ns))
    return tuple(spans)
