"""A handover as phases on one clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.trace.clocks import Clocks, moment
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

LOADED, NOTHING_TO_LOAD = "loaded", "nothing to load"
_FETCHED = frozenset({"done", "release"})
"""`LeaseOver.how` of leases that a consumer ended."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in nanoseconds on the common clock."""

    phase: Phase
    begun_ns: int
    ended_ns: int

    @property
    def lasted_ns(self) -> int:
        """Its length."""
        return self.ended_ns - self.begun_ns


@dataclass(frozen=True, slots=True)
class Chunk:
    """A step of a prefill that was read meanwhile, or one such read.

    Attributes:
        stop_token: the token up to which it computed, or read.
    """

    span: Span
    stop_token: int


@dataclass(frozen=True, slots=True)
class WorkerSpans:
    """The stages of one worker's load, and its reads if it followed the prefill."""

    load: LoadTrace
    spans: tuple[Span, ...]
    chunks: tuple[Chunk, ...] = ()

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
    steps: tuple[Chunk, ...]
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
        return self.after_prefill(
            (*self.to_load, *(self.last.spans if self.last else ()), *self.from_load)
        )

    def after_prefill(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """The parts of spans from the zero on, where the consumer had the params before it."""
        arrived = self.handover.get(DecodeArrived)
        if arrived is None or not arrived.is_early:
            return spans
        return tuple(
            Span(span.phase, max(span.begun_ns, self.zero_ns), span.ended_ns)
            for span in spans
            if span.begun_ns >= self.zero_ns or span.ended_ns > self.zero_ns
        )

    @property
    def spans(self) -> tuple[Span, ...]:
        """All phases: those before, the critical path, and the time for which the producer held the blocks."""
        return (*self.before, *self.path, *((self.held,) if self.held else ()))

    @property
    def lasted_ns(self) -> int | None:
        """Duration of the handover: from the prompt's end until the consumer could go on."""
        return None if self.ended_ns is None else max(0, self.ended_ns - self.zero_ns)

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
        return min(self.bytes, sum(load.ended.early_bytes for load in self.handover.loads))

    @property
    def gb_s(self) -> float | None:
        """Bytes over the time in which any worker read; None where nothing was loaded, or reads waited for steps."""
        reads = [span for worker in self.workers for span in worker.spans if span.phase in _READS]
        if not self.bytes or not reads or self.early_bytes:
            return None
        seconds = (
            max(span.ended_ns for span in reads) - min(span.begun_ns for span in reads)
        ) / 1e9
        return self.bytes / seconds / 1e9 if seconds else None


_READS = (Phase.POSTING, Phase.READING)


def timeline(handover: Handover, clocks: Clocks) -> Timeline:
    """The timeline of a handover, its times shifted to the common clock."""

    def at(kind: type[RequestEvent]) -> int | None:
        found = moment(handover, kind)
        return found.at_ns + clocks.shift_ns.get(found.clock, 0) if found else None

    queued, scheduled, given, over = (
        at(PrefillArrived),
        at(PrefillScheduled),
        at(ParamsGiven),
        at(LeaseOver),
    )
    arrived, ordered, reported = at(DecodeArrived), at(LoadOrdered), at(LoadReported)
    recomputed, stepped = at(Recomputed), at(DecodeScheduled)
    workers = _workers(handover.loads, clocks)
    if arrived is None and ordered is None:
        arrived = recomputed  # unusable params are found at the arrival
    last = _last_of(workers)
    ended = recomputed if reported is None else reported
    if ended is None and ordered is None:
        ended, stepped = stepped, None  # the consumer has all blocks already
    known = (
        given,
        arrived,
        ordered,
        recomputed,
        workers[0].spans[0].begun_ns if workers else None,
        reported,
    )
    zero = next((one for one in (*known, queued, scheduled, over) if one is not None), 0)
    read_until = last.ended_ns if last else None
    held_from = given if given is not None else read_until
    return Timeline(
        handover=handover,
        steps=_steps(handover, clocks, given),
        before=_spans((Phase.PREFILL_QUEUE, queued, scheduled), (Phase.PREFILL, scheduled, given)),
        to_load=_spans(
            (Phase.ROUTER, given, arrived),
            (Phase.DECODE_QUEUE, arrived, ended if ordered is None else ordered),
            (Phase.ORDER, ordered, last.spans[0].begun_ns if last else None),
            (Phase.LOAD, None if last else ordered, ended),
        ),
        workers=workers,
        from_load=_spans((Phase.REPORT, read_until, ended), (Phase.FIRST_STEP, ended, stepped)),
        held=next(iter(_spans((Phase.HELD, held_from, over))), None),
        zero_ns=zero,
        ended_ns=ended,
        outcome=_outcome(handover),
        missing=_missing(handover),
    )


def _last_of(workers: Iterable[WorkerSpans]) -> WorkerSpans | None:
    return max(workers, key=lambda one: one.ended_ns, default=None)


def _spans(*phases: tuple[Phase, int | None, int | None]) -> tuple[Span, ...]:
    """Spans of the phases with both ends known; an end before the begin is moved to it."""
    return tuple(
        Span(phase, begun, max(begun, ended))
        for phase, begun, ended in phases
        if begun is not None and ended is not None
    )


def _steps(handover: Handover, clocks: Clocks, given: int | None) -> tuple[Chunk, ...]:
    """A step ends where the next one begins, the last one with the prompt."""
    if handover.prefill is None:
        return ()
    shift_ns = clocks.shift(handover.prefill.process)
    begins = [step.at_ns + shift_ns for step in handover.steps]
    ends = [*begins[1:], given if given is not None else begins[-1]] if begins else []
    return tuple(
        Chunk(Span(Phase.PREFILL_STEP, begun, max(begun, ended)), step.tokens)
        for step, begun, ended in zip(handover.steps, begins, ends, strict=True)
    )


def _workers(loads: Iterable[LoadTrace], clocks: Clocks) -> tuple[WorkerSpans, ...]:
    found = []
    for load in sorted(loads, key=lambda one: _by_number(one.process)):
        shift_ns = clocks.shift(load.process)
        spans = tuple(
            Span(
                stage.stage,
                stage.begun_ns + shift_ns,
                max(stage.begun_ns, stage.ended_ns) + shift_ns,
            )
            for stage in load.ended.stages
        )
        whole = Span(Phase.LOAD, load.begun_ns + shift_ns, load.ended_ns + shift_ns)
        chunks = tuple(
            Chunk(
                Span(
                    Phase.CHUNK_READ,
                    chunk.begun_ns + shift_ns,
                    max(chunk.begun_ns, chunk.ended_ns) + shift_ns,
                ),
                chunk.stop_token,
            )
            for chunk in load.ended.chunks
        )
        found.append(WorkerSpans(load, spans or (whole,), chunks))
    return tuple(found)


def _by_number(process: ProcessStarted) -> tuple[object, ...]:
    return (len(process.place), process.place, process.host, process.pid)


def _outcome(handover: Handover) -> str:
    failed = sorted({load.ended.reason for load in handover.loads if load.ended.reason})
    why = f" ({', '.join(failed)})" if failed else ""
    if handover.decode is not None:
        if recomputed := handover.get(Recomputed):
            return f"recomputed: {recomputed.reason}{'' if failed == [recomputed.reason] else why}"
        if reported := handover.get(LoadReported):
            return LOADED if reported.good else f"load failed{why}"
        if handover.get(DecodeScheduled) and not handover.get(LoadOrdered):
            return NOTHING_TO_LOAD
        return f"ended before it was loaded{why}" if handover.get(Finished) else f"under way{why}"
    if not handover.get(ParamsGiven):
        return "not prefilled"
    over = handover.get(LeaseOver)
    if over is None:
        return "not fetched so far"
    return f"{'fetched' if over.how in _FETCHED else 'not fetched'}: {over.how}"


def _missing(handover: Handover) -> tuple[str, ...]:
    prefill, decode = handover.prefill, handover.decode
    over = handover.get(LeaseOver)
    begun = any(handover.get(kind) for kind in (DecodeArrived, LoadOrdered, Recomputed))
    halves = (
        ("producer", prefill is None),
        ("consumer", decode is None and over is not None and over.how in _FETCHED),
        ("consumer's scheduler", decode is not None and not begun),
        (
            "consumer's workers",
            decode is not None and bool(handover.get(LoadReported)) and not handover.loads,
        ),
    )
    return tuple(name for name, is_missing in halves if is_missing)
