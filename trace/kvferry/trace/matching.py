"""Joins the events of processes to handovers.

Events of a producer are joined by the lease, arrivals by the request's id. A consumer's requests are joined to leases
by the params that arrived with them, and a worker's loads to requests by engine and request id. An id may recur, also
after a restart of the engine: then the times decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvferry.trace.events import (
    AnyEvent,
    DecodeArrived,
    DecodeScheduled,
    Finished,
    LeaseName,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Part,
    PrefillArrived,
    PrefillScheduled,
    ProcessStarted,
    Recomputed,
    RequestEvent,
)
from kvferry.trace.handover import Half, Handover, Load
from kvferry.trace.reading import Process

_BEGINS_DECODE = (DecodeArrived, Recomputed, LoadOrdered)
_OF_DECODE = (*_BEGINS_DECODE, LoadReported, DecodeScheduled, Finished)


def match(processes: Iterable[Process]) -> list[Handover]:
    """One handover for every lease and for every request that read it, in no order."""
    schedulers = _Schedulers()
    loads: defaultdict[tuple[str, str], list[Load]] = defaultdict(list)
    for process in processes:
        started = process.started
        if started.part is Part.SCHEDULER:
            schedulers.take(started, process.events)
        else:
            for event in process.events:
                if isinstance(event, LoadEnded):
                    loads[started.engine_id, event.request].append(Load(started, event))
    return [*schedulers.handovers(loads)]


class _Schedulers:
    """The schedulers' records so far."""

    def __init__(self) -> None:
        self._prefills: dict[LeaseName, Half] = {}
        self._unscheduled: list[Half] = []
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
            elif isinstance(event, _OF_DECODE):
                self._decode(process, event).add(event)
        for event in arrived.values():
            self._unscheduled.append(Half(process, event.request, {PrefillArrived: event}))

    def _decode(self, process: ProcessStarted, event: RequestEvent) -> Half:
        """The request that a consumer's event is about; a new one if the event cannot be of the last one."""
        known = self._decodes[process.engine_id, event.request]
        last = next((one for one in reversed(known) if one.process.boot == process.boot), None)
        over = last is None or Finished in last.events
        again = last is not None and isinstance(event, DecodeArrived) and DecodeArrived in last.events
        if last is None or again or (over and isinstance(event, _BEGINS_DECODE)):
            last = Half(process, event.request)
            known.append(last)
        return last

    def handovers(self, loads: dict[tuple[str, str], list[Load]]) -> Iterable[Handover]:
        fetched: set[LeaseName] = set()
        for (engine, request), lives in self._decodes.items():
            shared = _share_out(lives, loads.pop((engine, request), []))
            for decode, mine in zip(lives, shared, strict=True):
                if not mine and not any(kind in decode.events for kind in _BEGINS_DECODE):
                    continue  # only the end of this request was recorded
                lease = _lease_of(decode)
                if lease:
                    fetched.add(lease)
                yield Handover(lease, self._prefills.get(lease) if lease else None, decode, tuple(mine))
        for lease, prefill in self._prefills.items():
            if lease not in fetched:
                yield Handover(lease, prefill)
        yield from (Handover(None, prefill) for prefill in self._unscheduled)
        for (_, request), left in loads.items():  # of a consumer whose scheduler recorded nothing
            yield Handover(None, None, Half(left[0].process, request), tuple(left))


def _lease_of(decode: Half) -> LeaseName | None:
    named = decode.get(DecodeArrived) or decode.get(Recomputed)
    return named.lease if named else None


def _share_out(lives: list[Half], loads: list[Load]) -> list[list[Load]]:
    """Assign each load to the last request of its id that was ordered before the load began."""
    if len(lives) == 1:
        return [loads]
    shared: list[list[Load]] = [[] for _ in lives]
    orders = ((one.get(LoadOrdered), index) for index, one in enumerate(lives))
    ordered = sorted((order.at_ns, index) for order, index in orders if order)
    for load in loads:
        mine = [(at_ns, index) for at_ns, index in ordered if load.process.boot in ("", lives[index].process.boot)]
        before = [index for at_ns, index in mine if at_ns <= load.begun_ns]
        shared[before[-1] if before else mine[0][1] if mine else 0].append(load)
    return shared
