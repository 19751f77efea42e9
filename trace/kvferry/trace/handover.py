"""Handovers: the events that all processes recorded of each, joined. Times are by the clock of each process.

Events of a producer are joined by the lease, arrivals by the request's id. A consumer's requests are joined to leases
by the params that arrived with them, and a worker's loads to requests by engine and request id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.trace.events import (
    AnyEvent,
    DecodeArrived,
    DecodeScheduled,
    Finished,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillArrived,
    PrefillScheduled,
    PrefillStep,
    ProcessRole,
    ProcessStarted,
    Recomputed,
    RequestEvent,
    TracedLease,
)
from kvferry.trace.reading import Process

EventT = TypeVar("EventT", bound=RequestEvent)


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The events of one request in the scheduler of one engine.

    Attributes:
        request: its id in this engine.
        events: the first event of each type.
    """

    process: ProcessStarted
    request: str
    events: dict[type[RequestEvent], RequestEvent] = field(default_factory=dict)

    def add(self, event: RequestEvent) -> None:
        """Keep an event, unless there is one of its type."""
        self.events.setdefault(type(event), event)

    def get(self, kind: type[EventT]) -> EventT | None:
        """The event of a type; None if it was not recorded."""
        event = self.events.get(kind)
        if isinstance(event, kind):
            return event
        return None


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """The events of one worker of the consumer."""

    process: ProcessStarted
    ended: LoadEnded

    @property
    def begun_ns(self) -> int:
        """When the worker received the order."""
        if not self.ended.stages:
            return self.ended.at_ns
        return self.ended.stages[0].begun_ns

    @property
    def ended_ns(self) -> int:
        """When the load ended."""
        if not self.ended.stages:
            return self.ended.at_ns
        return self.ended.stages[-1].ended_ns

    @property
    def figures(self) -> dict[str, int | float | str]:
        """What became of it, as plain values for JSON."""
        ended = self.ended
        return {
            "bytes": ended.bytes,
            "staged_bytes": ended.staged_bytes,
            "mapped_bytes": ended.mapped_bytes,
            "descriptors": ended.descriptors,
            "relayout_ms": ended.relayout_ns / 1e6,
            "early_bytes": ended.early_bytes,
            "restarts": ended.restarts,
            "reason": ended.reason,
        }


@dataclass(frozen=True, slots=True)
class Handover:
    """Both halves; one of them may not have been recorded, or not have happened.

    Attributes:
        lease: the lease that joins them; None where neither half had one.
        loads: loads of all workers of the consumer.
        steps: of the prefill, from the one on in which the consumer could begin to read; in order.

    Texts are empty where they are unknown.
    """

    lease: TracedLease | None
    prefill: Half | None = None
    decode: Half | None = None
    loads: tuple[LoadTrace, ...] = ()
    steps: tuple[PrefillStep, ...] = ()

    def get(self, kind: type[EventT]) -> EventT | None:
        """The event of a type, which only one half can have; None if it was not recorded."""
        for half in (self.prefill, self.decode):
            if half is None:
                continue
            event = half.get(kind)
            if event is not None:
                return event
        return None

    @property
    def producer_request(self) -> str:
        """The request's id in the producer."""
        if self.prefill:
            return self.prefill.request
        arrived = self.get(DecodeArrived)
        return arrived.remote_request if arrived else ""

    @property
    def producer(self) -> str:
        """The producer's engine id."""
        if self.prefill:
            return self.prefill.process.engine_id
        arrived = self.get(DecodeArrived)
        return arrived.producer if arrived else ""

    @property
    def consumer_request(self) -> str:
        """The request's id in the consumer."""
        if self.decode is None:
            return ""
        return self.decode.request

    @property
    def consumer(self) -> str:
        """The consumer's engine id."""
        if self.decode is None:
            return ""
        return self.decode.process.engine_id

    @property
    def traceparent(self) -> str:
        """The W3C trace parent of the request."""
        for arrived in (self.get(DecodeArrived), self.get(PrefillArrived)):
            if arrived is not None and arrived.traceparent:
                return arrived.traceparent
        return ""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, 0 where unknown."""
        for event in (self.get(ParamsGiven), self.get(PrefillArrived), self.get(DecodeArrived)):
            if event is not None:
                return event.tokens
        return 0


_BEGINS_DECODE = (DecodeArrived, Recomputed, LoadOrdered)
_OF_DECODE = (*_BEGINS_DECODE, LoadReported, DecodeScheduled, Finished)


def match(processes: Iterable[Process]) -> list[Handover]:
    """One handover for every lease and for every request that read it, in no order."""
    schedulers = _Schedulers()
    loads: defaultdict[tuple[str, str], list[LoadTrace]] = defaultdict(list)
    for process in processes:
        started = process.started
        if started.part is ProcessRole.SCHEDULER:
            schedulers.take(started, process.events)
        else:
            for event in process.events:
                if isinstance(event, LoadEnded):
                    loads[started.engine_id, event.request].append(LoadTrace(started, event))
    return [*schedulers.handovers(loads)]


class _Schedulers:
    """The schedulers' records so far."""

    def __init__(self) -> None:
        self._prefills: dict[TracedLease, Half] = {}
        self._unscheduled: list[Half] = []
        self._steps: defaultdict[TracedLease, list[PrefillStep]] = defaultdict(list)
        self._decodes: defaultdict[tuple[str, str], list[Half]] = defaultdict(list)

    def take(self, process: ProcessStarted, events: Iterable[AnyEvent]) -> None:
        arrived: dict[str, PrefillArrived] = {}
        for event in events:
            if isinstance(event, PrefillArrived):
                arrived[event.request] = event
            elif isinstance(event, PrefillScheduled | ParamsGiven | LeaseOver):
                prefill = self._prefills.setdefault(event.lease, Half(process, event.request))
                prefill.add(event)
                if event.request in arrived and PrefillArrived not in prefill.events:
                    prefill.add(arrived.pop(event.request))
            elif isinstance(event, PrefillStep):
                self._steps[event.lease].append(event)
            elif isinstance(event, _OF_DECODE):
                self._decode(process, event).add(event)
        for event in arrived.values():
            self._unscheduled.append(Half(process, event.request, {PrefillArrived: event}))

    def _decode(self, process: ProcessStarted, event: RequestEvent) -> Half:
        """The request that a consumer's event is about; a new one if the event cannot be of the last one."""
        lives = self._decodes[process.engine_id, event.request]
        # An id may recur, also after a restart of the engine.
        last = None
        for life in lives:
            if life.process.boot == process.boot:
                last = life
        if last is None or _begins_another(last, event):
            last = Half(process, event.request)
            lives.append(last)
        return last

    def handovers(self, loads: dict[tuple[str, str], list[LoadTrace]]) -> Iterable[Handover]:
        fetched: set[TracedLease] = set()
        for (engine, request), lives in self._decodes.items():
            shared = _share_out(lives, loads.pop((engine, request), []))
            for decode, own_loads in zip(lives, shared, strict=True):
                has_begun = any(kind in decode.events for kind in _BEGINS_DECODE)
                if not own_loads and not has_begun:
                    continue  # only the end of this request was recorded
                lease = _lease_of(decode)
                if lease is not None:
                    fetched.add(lease)
                yield self._handover(lease, decode, tuple(own_loads))
        for lease in self._prefills:
            if lease not in fetched:
                yield self._handover(lease)
        for prefill in self._unscheduled:
            yield Handover(None, prefill)
        # Loads of a consumer whose scheduler has recorded nothing.
        for (_, request), left in loads.items():
            yield Handover(None, None, Half(left[0].process, request), tuple(left))

    def _handover(
        self,
        lease: TracedLease | None,
        decode: Half | None = None,
        loads: tuple[LoadTrace, ...] = (),
    ) -> Handover:
        if lease is None:
            return Handover(None, None, decode, loads)
        return Handover(
            lease=lease,
            prefill=self._prefills.get(lease),
            decode=decode,
            loads=loads,
            steps=tuple(self._steps.get(lease, ())),
        )


def _begins_another(last: Half, event: RequestEvent) -> bool:
    """Whether an event belongs to a request after `last`, of the same id."""
    if isinstance(event, DecodeArrived) and DecodeArrived in last.events:
        return True
    return Finished in last.events and isinstance(event, _BEGINS_DECODE)


def _lease_of(decode: Half) -> TracedLease | None:
    event = decode.get(DecodeArrived) or decode.get(Recomputed)
    if event is None:
        return None
    return event.lease


def _share_out(lives: list[Half], loads: list[LoadTrace]) -> list[list[LoadTrace]]:
    """Assign each load to the last request of its id that was ordered before the load began."""
    if len(lives) == 1:
        return [loads]
    shared: list[list[LoadTrace]] = [[] for _ in lives]
    orders: list[tuple[int, int]] = []  # when a request was ordered, and its index
    for index, life in enumerate(lives):
        order = life.get(LoadOrdered)
        if order is not None:
            orders.append((order.at_ns, index))
    orders.sort()
    for load in loads:
        shared[_request_of(load, lives, orders)].append(load)
    return shared


def _request_of(load: LoadTrace, lives: list[Half], orders: list[tuple[int, int]]) -> int:
    boot = load.process.boot
    # Workers record no boot, since they do not know it.
    possible = [order for order in orders if boot in ("", lives[order[1]].process.boot)]
    if not possible:
        return 0
    # If all were ordered later, the clocks differ: then it is the first.
    _, chosen = possible[0]
    for at_ns, index in possible:
        if at_ns <= load.begun_ns:
            chosen = index
    return chosen
