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
    PrefixAsked,
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
        # The first counts: a prompt that is preempted opens its lease again.
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

    @property
    def halves(self) -> list[Half]:
        """Those that were recorded."""
        return [half for half in (self.prefill, self.decode) if half is not None]

    def get(self, kind: type[EventT]) -> EventT | None:
        """The event of a type, which only one half can have; None if it was not recorded."""
        for half in self.halves:
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
        for event in (
            self.get(ParamsGiven),
            self.get(PrefillArrived),
            self.get(DecodeArrived),
        ):
            if event is not None:
                return event.tokens
        return 0

    def has_id(self, part: str) -> bool:
        """Whether the producer's id, the consumer's, the trace's or the lease's contains this."""
        # A part is enough: both engines' ids contain the `X-Request-Id` that the router sent them.
        ids = [self.producer_request, self.consumer_request, self.traceparent]
        if self.lease is not None:
            # As Perfetto shows it in a request's details.
            ids.append(f"{self.lease.boot}/{self.lease.epoch}")
        return any(part in known for known in ids)


_BEGINS_DECODE = (DecodeArrived, Recomputed, LoadOrdered)
_OF_DECODE = (*_BEGINS_DECODE, PrefixAsked, LoadReported, DecodeScheduled, Finished)
_Key = tuple[str, str]
"""An engine's id and a request's id in it. vLLM ends each id with random digits, so it is of one request for ever."""


def match(processes: Iterable[Process]) -> list[Handover]:
    """One handover for every lease and for every request that read it, in no order."""
    records = _Records()
    for process in processes:
        for event in process.events:
            records.add(process.started, event)
    return [*records.handovers()]


class _Records:
    """The events of all processes, by request and by lease."""

    def __init__(self) -> None:
        self._arrived: dict[_Key, Half] = {}  # prompts that have no lease yet
        self._prefills: dict[TracedLease, Half] = {}
        self._steps: defaultdict[TracedLease, list[PrefillStep]] = defaultdict(list)
        self._decodes: dict[_Key, Half] = {}
        self._loads: defaultdict[_Key, list[LoadTrace]] = defaultdict(list)

    def add(self, process: ProcessStarted, event: AnyEvent) -> None:
        if isinstance(event, PrefillStep):
            self._steps[event.lease].append(event)
            return
        if not isinstance(event, RequestEvent):
            return
        key = (process.engine_id, event.request)
        if isinstance(event, LoadEnded):
            self._loads[key].append(LoadTrace(process, event))
        elif isinstance(event, PrefillArrived):
            half = Half(process, event.request)
            half.add(event)
            self._arrived[key] = half
        elif isinstance(event, PrefillScheduled | ParamsGiven | LeaseOver):
            # By lease and no longer by request: a consumer knows nothing else of the producer's half.
            if event.lease not in self._prefills:
                arrived = self._arrived.pop(key, None)
                self._prefills[event.lease] = arrived or Half(process, event.request)
            self._prefills[event.lease].add(event)
        elif isinstance(event, _OF_DECODE):
            self._decodes.setdefault(key, Half(process, event.request)).add(event)

    def handovers(self) -> Iterable[Handover]:
        fetched: set[TracedLease] = set()
        for key, decode in self._decodes.items():
            # Taken out: what is left in the end has no scheduler's half.
            loads = self._loads.pop(key, [])
            has_begun = any(kind in decode.events for kind in _BEGINS_DECODE)
            if not loads and not has_begun:
                continue  # only the end of this request was recorded
            lease = _lease_of(decode)
            if lease is None:
                yield Handover(None, None, decode, tuple(loads))
                continue
            fetched.add(lease)
            prefill = self._prefills.get(lease)
            steps = tuple(self._steps.get(lease, ()))
            yield Handover(lease, prefill, decode, tuple(loads), steps)
        # What nobody fetched is shown as well: it is what an operator looks for.
        for lease, prefill in self._prefills.items():
            if lease not in fetched:
                yield Handover(lease, prefill, steps=tuple(self._steps.get(lease, ())))
        for arrived in self._arrived.values():
            yield Handover(None, arrived)
        # Loads of a consumer whose scheduler has recorded nothing.
        for (_, request), loads in self._loads.items():
            yield Handover(None, None, Half(loads[0].process, request), tuple(loads))


def _lease_of(decode: Half) -> TracedLease | None:
    event = decode.get(DecodeArrived) or decode.get(Recomputed)
    if event is None:
        return None
    return event.lease
