"""A handover: what all processes recorded of it, and its phases on one clock.

Times are milliseconds after the handover's zero, the end of the prompt, by the clock of its reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec

from kvferry.trace.events import (
    DecodeArrived,
    DecodeScheduled,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Phase,
    PrefillArrived,
    PrefillScheduled,
    PrefillStep,
    PrefixAsked,
    ProcessStarted,
    Recomputed,
    RequestEvent,
    TracedLease,
)

EventT = TypeVar("EventT", bound=RequestEvent)
Events = dict[type[RequestEvent], tuple[ProcessStarted, RequestEvent]]
"""Of one request in one scheduler: the first event of each type."""

_PREFILL = (Phase.PREFILL_QUEUE, Phase.PREFILL)
# Posting counts: the first reads are under way while the others are posted.
_READS = (Phase.POSTING, Phase.READING)


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phase.

    Attributes:
        stop_token: the token up to which a step of a prefill computed, or a read of it read; None of other phases.
    """

    phase: Phase
    begun_ms: float
    ended_ms: float
    stop_token: int | None = None

    @property
    def lasted_ms(self) -> float:
        """Its length, to the nanosecond."""
        return round(self.ended_ms - self.begun_ms, 6)


class RequestKey(NamedTuple):
    """A request in one engine; empty texts where it is unknown."""

    engine_id: str
    request: str


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of one worker: its stages, at least one, and its reads if it followed the prefill."""

    process: ProcessStarted
    ended: LoadEnded
    stages: tuple[Span, ...]
    chunks: tuple[Span, ...]

    @property
    def place(self) -> str:
        """The worker's name in its engine."""
        return self.process.place or f"pid {self.process.pid}"

    @property
    def figures(self) -> dict[str, int | float | str]:
        """What became of it, as plain values for JSON."""
        return {
            "bytes": self.ended.bytes,
            "staged_bytes": self.ended.staged_bytes,
            "mapped_bytes": self.ended.mapped_bytes,
            "descriptors": self.ended.descriptors,
            "relayout_ms": self.ended.relayout_ns / 1e6,
            "early_bytes": self.ended.early_bytes,
            "restarts": self.ended.restarts,
            "reason": self.ended.reason,
        }


@dataclass(eq=False)
class Handover:
    """One handover. A part is empty, and a phase left out, that was not recorded or did not happen.

    Attributes:
        lease: joins both engines' parts; None where neither names one.
        prefill: of the producer's scheduler.
        decode: of the consumer's scheduler.
        loads: of each worker of the consumer.
        prefill_steps: from the one on in which the consumer could begin to read; in order, each once.
        shift_ns: what the times of a process need to be ones by the clock of the reference. Phases are kept once they
            were asked for, so `align` writes it before.
    """

    lease: TracedLease | None = None
    prefill: Events = field(default_factory=dict)
    decode: Events = field(default_factory=dict)
    loads: dict[ProcessStarted, LoadEnded] = field(default_factory=dict)
    prefill_steps: dict[tuple[ProcessStarted, PrefillStep], None] = field(
        default_factory=dict
    )
    shift_ns: dict[ProcessStarted, int] = field(default_factory=dict)

    # What was recorded.

    def get(self, kind: type[EventT]) -> EventT | None:
        """The event of a type, which only one scheduler can have; None if it was not recorded."""
        _, event = self.prefill.get(kind) or self.decode.get(kind) or (None, None)
        return event if isinstance(event, kind) else None

    @property
    def producer(self) -> RequestKey:
        """The request in the producer."""
        for process, event in self.prefill.values():
            return RequestKey(process.engine_id, event.request)
        arrived = self.get(DecodeArrived)
        if arrived is None:
            return RequestKey("", "")
        return RequestKey(arrived.producer, arrived.remote_request)

    @property
    def consumer(self) -> RequestKey:
        """The request in the consumer."""
        for process, event in (*self.decode.values(), *self.loads.items()):
            return RequestKey(process.engine_id, event.request)
        return RequestKey("", "")

    @property
    def processes(self) -> list[ProcessStarted]:
        """Those that recorded it, of the consumer's first."""
        of_decode = [process for process, _ in self.decode.values()]
        of_prefill = [process for process, _ in self.prefill.values()]
        return [*of_decode, *self.loads, *of_prefill]

    @property
    def reference(self) -> ProcessStarted:
        """The one by whose clock it is shown: the consumer's scheduler, or the first below that recorded it."""
        return self.processes[0]

    @property
    def traceparent(self) -> str:
        """The W3C trace parent of the request; empty where it is unknown."""
        for arrived in (self.get(DecodeArrived), self.get(PrefillArrived)):
            if arrived is not None and arrived.traceparent:
                return arrived.traceparent
        return ""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, 0 where unknown."""
        given = self.get(ParamsGiven)
        arrived = self.get(PrefillArrived)
        for event in (given, arrived, self.get(DecodeArrived)):
            if event is not None:
                return event.tokens
        return 0

    @property
    def is_early(self) -> bool:
        """Whether the consumer had the params before the prompt was computed."""
        arrived = self.get(DecodeArrived)
        return arrived is not None and arrived.is_early

    def has_id(self, part: str) -> bool:
        """Whether the producer's id, the consumer's, the trace's or the lease's contains this."""
        # A part is enough: both engines' ids contain the `X-Request-Id` that the router sent them.
        names = (self.producer.request, self.consumer.request, self.traceparent)
        return any(part in name for name in (*names, str(self.lease or "")))

    # Its phases.

    @cached_property
    def zero_ns(self) -> int:
        """When the prompt was computed; where that was not recorded, when the consumer had the request."""
        # No prompt ends for a prefix: it begins when engines are asked for it.
        usual = (PrefixAsked, ParamsGiven, DecodeArrived, LoadOrdered, Recomputed)
        for kind in usual:
            at_ns = self._at_ns(kind)
            if at_ns is not None:
                return at_ns
        others_ns = [event.at_ns for _, event in self.prefill.values()]
        for process, load in self.loads.items():
            others_ns.append(load.begun_ns + self.shift_ns.get(process, 0))
        return min(others_ns)

    @cached_property
    def workers(self) -> tuple[WorkerLoad, ...]:
        """Every worker's load, in the order of their places."""
        workers = []
        for process, load in sorted(self.loads.items(), key=_by_place):
            stages = []
            for stage in load.stages:
                times = (stage.begun_ns, stage.ended_ns)
                stages.append(self._span(process, stage.stage, *times))
            if not stages:
                times = (load.begun_ns, load.ended_ns)
                stages.append(self._span(process, Phase.LOAD, *times))
            chunks = []
            for chunk in load.chunks:
                times = (chunk.begun_ns, chunk.ended_ns)
                read = self._span(process, Phase.CHUNK_READ, *times, chunk.stop_token)
                chunks.append(read)
            workers.append(WorkerLoad(process, load, tuple(stages), tuple(chunks)))
        return tuple(workers)

    @property
    def last(self) -> WorkerLoad | None:
        """The worker whose load ended last; None where no load was recorded."""
        ended = {worker.stages[-1].ended_ms: worker for worker in self.workers[::-1]}
        return ended[max(ended)] if ended else None

    @property
    def steps(self) -> tuple[Span, ...]:
        """Of the prefill: a step ends where the next one begins, the last one with the prompt."""
        given = self.get(ParamsGiven)
        steps = [*self.prefill_steps] if self.prefill else []
        ends_ns = [step.at_ns for _, step in steps[1:]]
        # Where the prompt's end was not recorded, the last step has no length.
        ends_ns += [given.at_ns] if given else [step.at_ns for _, step in steps[-1:]]
        spans = []
        for (process, step), ended_ns in zip(steps, ends_ns, strict=False):
            times = (step.at_ns, ended_ns)
            spans.append(self._span(process, Phase.PREFILL_STEP, *times, step.tokens))
        return tuple(spans)

    @property
    def resumed_ms(self) -> float | None:
        """When the consumer could go on, with or without a load; None where it never did."""
        resumed = _first_known(self._at(LoadReported), self._at(Recomputed))
        if resumed is None and self._at(LoadOrdered) is None:
            # The consumer has all blocks already: it goes on with its first step.
            return self._at(DecodeScheduled)
        return resumed

    @property
    def handover_ms(self) -> float | None:
        """From the zero until then."""
        resumed = self.resumed_ms
        return None if resumed is None else max(0.0, resumed)

    @cached_property
    def phases(self) -> tuple[Span, ...]:
        """Of the prefill and then of the consumer; while workers load, the stages of the last one."""
        given = self._at(ParamsGiven)
        asked = self._at(PrefixAsked)
        arrived = self._at(DecodeArrived)
        ordered = self._at(LoadOrdered)
        resumed = self.resumed_ms
        if arrived is None and ordered is None:
            # Unusable params are found at the arrival, which is not recorded then.
            arrived = self._at(Recomputed)
        scheduled = self._at(PrefillScheduled)
        before = _spans(
            (Phase.PREFILL_QUEUE, self._at(PrefillArrived), scheduled),
            (Phase.PREFILL, scheduled, given),
            (Phase.ROUTER, given if asked is None else None, arrived),
            (Phase.PREFIX_QUERY, asked, arrived),
            (Phase.DECODE_QUEUE, arrived, _first_known(ordered, resumed)),
        )
        last = self.last
        if last is None:
            # No worker has recorded its stages: the load is one phase.
            load = _spans((Phase.LOAD, ordered, resumed))
        else:
            order = _spans((Phase.ORDER, ordered, last.stages[0].begun_ms))
            report = _spans((Phase.REPORT, last.stages[-1].ended_ms, resumed))
            load = (*order, *last.stages, *report)
        known = _first_known(self._at(LoadReported), self._at(Recomputed))
        first_step = _spans((Phase.FIRST_STEP, known, self._at(DecodeScheduled)))
        return (*before, *load, *first_step)

    @property
    def before(self) -> tuple[Span, ...]:
        """The phases until the prompt was computed."""
        return tuple(span for span in self.phases if span.phase in _PREFILL)

    @property
    def path(self) -> tuple[Span, ...]:
        """The critical path after that."""
        return self.after_prefill(
            span for span in self.phases if span.phase not in _PREFILL
        )

    def after_prefill(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """These spans; of a consumer that had the params before the prompt's end, only their parts after the zero."""
        if not self.is_early:
            return tuple(spans)
        # What overlaps with the prefill delays nobody, so it is no part of the handover.
        parts = []
        for span in spans:
            if span.begun_ms >= 0 or span.ended_ms > 0:
                parts.append(Span(span.phase, max(0.0, span.begun_ms), span.ended_ms))
        return tuple(parts)

    @property
    def cause(self) -> Span | None:
        """What made the handover as slow as it was: the longest phase of its critical path."""
        return max(self.path, key=lambda span: span.lasted_ms, default=None)

    @property
    def held(self) -> Span | None:
        """While the producer kept the prompt's blocks for the consumer."""
        kept_from = self._at(ParamsGiven)
        if kept_from is None and self.last is not None:
            kept_from = self.last.stages[-1].ended_ms
        return next(iter(_spans((Phase.HELD, kept_from, self._at(LeaseOver)))), None)

    @property
    def bytes(self) -> int:
        """Bytes that all workers loaded."""
        return sum(load.bytes for load in self.loads.values())

    @property
    def early_bytes(self) -> int:
        """The part of these that was read before the prefill had ended."""
        return min(self.bytes, sum(load.early_bytes for load in self.loads.values()))

    @property
    def gb_s(self) -> float | None:
        """Bytes over the time in which any worker read; None where nothing was loaded, or reads waited for steps."""
        stages = [span for worker in self.workers for span in worker.stages]
        reads = [span for span in stages if span.phase in _READS]
        # While a prompt is computed, reads wait for its steps: it would be the prefill's speed, not the link's.
        if not self.bytes or not reads or self.early_bytes:
            return None
        begun_ms = min(span.begun_ms for span in reads)
        ended_ms = max(span.ended_ms for span in reads)
        if ended_ms == begun_ms:
            return None
        return self.bytes / (ended_ms - begun_ms) / 1e6

    def _at_ns(self, kind: type[RequestEvent]) -> int | None:
        record = self.prefill.get(kind) or self.decode.get(kind)
        if record is None:
            return None
        process, event = record
        return event.at_ns + self.shift_ns.get(process, 0)

    def _at(self, kind: type[RequestEvent]) -> float | None:
        """When the event of a type happened; None if it was not recorded."""
        at_ns = self._at_ns(kind)
        return None if at_ns is None else (at_ns - self.zero_ns) / 1e6

    def _span(
        self,
        process: ProcessStarted,
        phase: Phase,
        begun_ns: int,
        ended_ns: int,
        stop_token: int | None = None,
    ) -> Span:
        """A phase that a process timed."""
        zero_ns = self.zero_ns - self.shift_ns.get(process, 0)
        # The clock may have been set back between the two.
        ended_ns = max(begun_ns, ended_ns)
        begun_ms = (begun_ns - zero_ns) / 1e6
        return Span(phase, begun_ms, (ended_ns - zero_ns) / 1e6, stop_token)


def _by_place(load: tuple[ProcessStarted, LoadEnded]) -> tuple[object, ...]:
    process, _ = load
    # By length first, so that tp10 comes after tp9.
    return (len(process.place), process.place, process.host, process.pid)


def _first_known(*times: float | None) -> float | None:
    """The first of these times that was recorded."""
    return next((time for time in times if time is not None), None)


def _spans(*phases: tuple[Phase, float | None, float | None]) -> tuple[Span, ...]:
    """Spans of the phases with both ends known."""
    spans = []
    for phase, begun_ms, ended_ms in phases:
        if begun_ms is not None and ended_ms is not None:
            # A clock may have been set back between the two.
            spans.append(Span(phase, begun_ms, max(begun_ms, ended_ms)))
    return tuple(spans)
