"""A handover as phases on one clock, the reference of `clocks.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.trace.clocks import Clock, Clocks, clock_of, moment, reference_of
from kvferry.trace.events import (
    DecodeArrived,
    DecodeScheduled,
    Finished,
    LeaseOver,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Phase,
    PrefillArrived,
    PrefillScheduled,
    ProcessStarted,
    Recomputed,
    RequestEvent,
)
from kvferry.trace.handover import Handover, LoadTrace

LOADED = "loaded"
NOTHING_TO_LOAD = "nothing to load"
_FETCHED = frozenset({"done", "release"})
"""`LeaseOver.how` of leases that a consumer ended."""


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
        """The parts of spans from the zero on, where the consumer had the params before it."""
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
        return self.outcome in (LOADED, NOTHING_TO_LOAD)

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
        if not self.bytes or not reads or self.early_bytes:
            return None
        begun_ns = min(span.begun_ns for span in reads)
        ended_ns = max(span.ended_ns for span in reads)
        if ended_ns == begun_ns:
            return None
        seconds = (ended_ns - begun_ns) / 1e9
        return self.bytes / seconds / 1e9


_READS = (Phase.POSTING, Phase.READING)


def make_timeline(handover: Handover, clocks: Clocks) -> Timeline:
    """The timeline of a handover, its times shifted to its reference clock."""
    reference = reference_of(handover)

    def shift_of(clock: Clock) -> int:
        return -clocks.ahead_ns.get((clock, reference), 0)

    def at(kind: type[RequestEvent]) -> int | None:
        recorded = moment(handover, kind)
        if recorded is None:
            return None
        return recorded.at_ns + shift_of(recorded.clock)

    queued = at(PrefillArrived)
    scheduled = at(PrefillScheduled)
    given = at(ParamsGiven)
    over = at(LeaseOver)
    arrived = at(DecodeArrived)
    ordered = at(LoadOrdered)
    reported = at(LoadReported)
    recomputed = at(Recomputed)
    stepped = at(DecodeScheduled)

    by_place = sorted(handover.loads, key=lambda load: _by_place(load.process))
    workers = tuple(
        _worker(load, shift_of(clock_of(load.process))) for load in by_place
    )
    first_begun = None
    last_begun = None
    read_until = None
    last = _last_of(workers)
    if last is not None:
        first_begun = workers[0].spans[0].begun_ns
        last_begun = last.spans[0].begun_ns
        read_until = last.ended_ns

    if arrived is None and ordered is None:
        # Unusable params are found at the arrival, which is not recorded then.
        arrived = recomputed
    ended = _first_known(reported, recomputed)
    if ended is None and ordered is None:
        # The consumer has all blocks already: it goes on with its first step.
        ended = stepped
        stepped = None
    # Where the prompt's end was not recorded, the earliest that is known of the consumer; then anything else.
    zero = _first_known(
        given,
        arrived,
        ordered,
        recomputed,
        first_begun,
        reported,
        queued,
        scheduled,
        over,
    )
    return Timeline(
        handover=handover,
        steps=_steps(handover, shift_of, given),
        before=_spans(
            (Phase.PREFILL_QUEUE, queued, scheduled), (Phase.PREFILL, scheduled, given)
        ),
        to_load=_spans(
            (Phase.ROUTER, given, arrived),
            (Phase.DECODE_QUEUE, arrived, _first_known(ordered, ended)),
            (Phase.ORDER, ordered, last_begun),
            # Only where no worker has recorded its stages.
            (Phase.LOAD, ordered if last is None else None, ended),
        ),
        workers=workers,
        from_load=_spans(
            (Phase.REPORT, read_until, ended), (Phase.FIRST_STEP, ended, stepped)
        ),
        held=next(
            iter(_spans((Phase.HELD, _first_known(given, read_until), over))), None
        ),
        zero_ns=zero or 0,
        ended_ns=ended,
        outcome=_outcome(handover),
        missing=_missing(handover),
    )


def _first_known(*times_ns: int | None) -> int | None:
    """The first of these times that was recorded."""
    for time_ns in times_ns:
        if time_ns is not None:
            return time_ns
    return None


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


def _steps(
    handover: Handover, shift_of: Callable[[Clock], int], given: int | None
) -> tuple[Span, ...]:
    """A step ends where the next one begins, the last one with the prompt."""
    if handover.prefill is None or not handover.steps:
        return ()
    shift_ns = shift_of(clock_of(handover.prefill.process))
    begins = [step.at_ns + shift_ns for step in handover.steps]
    # Where the prompt's end was not recorded, the last step has no length.
    ends = [*begins[1:], begins[-1]]
    if given is not None:
        ends[-1] = given
    spans = []
    for step, begun_ns, ended_ns in zip(handover.steps, begins, ends, strict=True):
        spans.append(_span(Phase.PREFILL_STEP, begun_ns, ended_ns, 0, step.tokens))
    return tuple(spans)


def _worker(load: LoadTrace, shift_ns: int) -> WorkerSpans:
    spans = []
    for stage in load.ended.stages:
        spans.append(_span(stage.stage, stage.begun_ns, stage.ended_ns, shift_ns))
    if not spans:
        spans.append(
            Span(Phase.LOAD, load.begun_ns + shift_ns, load.ended_ns + shift_ns)
        )
    chunks = []
    for chunk in load.ended.chunks:
        read = (chunk.begun_ns, chunk.ended_ns, shift_ns, chunk.stop_token)
        chunks.append(_span(Phase.CHUNK_READ, *read))
    return WorkerSpans(load, tuple(spans), tuple(chunks))


def _by_place(process: ProcessStarted) -> tuple[object, ...]:
    # By length first, so that tp10 comes after tp9.
    return (len(process.place), process.place, process.host, process.pid)


def _outcome(handover: Handover) -> str:
    if handover.decode is not None:
        return _consumer_outcome(handover)
    if not handover.get(ParamsGiven):
        return "not prefilled"
    over = handover.get(LeaseOver)
    if over is None:
        return "not fetched so far"
    if over.how in _FETCHED:
        return f"fetched: {over.how}"
    return f"not fetched: {over.how}"


def _consumer_outcome(handover: Handover) -> str:
    reasons = sorted(
        {load.ended.reason for load in handover.loads if load.ended.reason}
    )
    why = f" ({', '.join(reasons)})" if reasons else ""
    recomputed = handover.get(Recomputed)
    if recomputed is not None:
        # The scheduler's reason is often that of the workers: then it is said once.
        if reasons == [recomputed.reason]:
            why = ""
        return f"recomputed: {recomputed.reason}{why}"
    reported = handover.get(LoadReported)
    if reported is not None:
        return LOADED if reported.good else f"load failed{why}"
    if handover.get(DecodeScheduled) and not handover.get(LoadOrdered):
        return NOTHING_TO_LOAD
    if handover.get(Finished):
        return f"ended before it was loaded{why}"
    return f"under way{why}"


def _missing(handover: Handover) -> tuple[str, ...]:
    missing = []
    if handover.prefill is None:
        missing.append("producer")
    if handover.decode is None:
        # A lease that a consumer has ended shows that there was one.
        over = handover.get(LeaseOver)
        if over is not None and over.how in _FETCHED:
            missing.append("consumer")
        return tuple(missing)
    if not any(handover.get(kind) for kind in (DecodeArrived, LoadOrdered, Recomputed)):
        missing.append("consumer's scheduler")
    if handover.get(LoadReported) and not handover.loads:
        missing.append("consumer's workers")
    return tuple(missing)
