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
)
from kvferry.trace.handover import Decode, Handover, Load, Prefill
from kvferry.trace.reading import Process

_Lease = tuple[str, str]


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
        self._prefills: dict[_Lease, Prefill] = {}
        self._unscheduled: list[Prefill] = []
        self._decodes: defaultdict[tuple[str, str], list[Decode]] = defaultdict(list)

    def take(self, process: ProcessStarted, events: Iterable[AnyEvent]) -> None:
        arrived: dict[str, PrefillArrived] = {}
        for event in events:
            if isinstance(event, PrefillArrived):
                arrived[event.request] = event
            elif isinstance(event, PrefillScheduled | ParamsGiven | LeaseOver):
                prefill = self._prefill(process, event)
                if prefill.arrived is None and (arrival := arrived.pop(event.request, None)) is not None:
                    prefill.arrived = arrival
            elif isinstance(
                event, DecodeArrived | Recomputed | LoadOrdered | LoadReported | DecodeScheduled | Finished
            ):
                self._take_decode(process, event)
        self._unscheduled += (Prefill(process, request, event) for request, event in arrived.items())

    def _prefill(self, process: ProcessStarted, event: PrefillScheduled | ParamsGiven | LeaseOver) -> Prefill:
        lease = (event.lease.boot, event.lease.epoch)
        prefill = self._prefills.get(lease)
        if prefill is None:
            prefill = self._prefills[lease] = Prefill(process, event.request)
        if isinstance(event, PrefillScheduled):
            prefill.scheduled = prefill.scheduled or event
        elif isinstance(event, ParamsGiven):
            prefill.given = prefill.given or event
        else:
            prefill.over = prefill.over or event
        return prefill

    def _take_decode(
        self,
        process: ProcessStarted,
        event: DecodeArrived | Recomputed | LoadOrdered | LoadReported | DecodeScheduled | Finished,
    ) -> None:
        known = self._decodes[process.engine_id, event.request]
        decode = next((one for one in reversed(known) if one.process.boot == process.boot), None)
        begins = isinstance(event, DecodeArrived | Recomputed | LoadOrdered)
        if decode is None or (begins and decode.finished) or (isinstance(event, DecodeArrived) and decode.arrived):
            decode = Decode(process, event.request)
            known.append(decode)
        if isinstance(event, DecodeArrived):
            decode.arrived = event
        elif isinstance(event, Recomputed):
            decode.recomputed = decode.recomputed or event
        elif isinstance(event, LoadOrdered):
            decode.ordered = decode.ordered or event
        elif isinstance(event, LoadReported):
            decode.reported = decode.reported or event
        elif isinstance(event, DecodeScheduled):
            decode.scheduled = decode.scheduled or event
        else:
            decode.finished = event

    def handovers(self, loads: dict[tuple[str, str], list[Load]]) -> Iterable[Handover]:
        fetched: set[_Lease] = set()
        for (engine, request), lives in self._decodes.items():
            shared = _share_out(lives, loads.pop((engine, request), []))
            for decode, mine in zip(lives, shared, strict=True):
                name = _lease_of(decode)
                if name is None and decode.ordered is None and decode.recomputed is None and not mine:
                    continue  # only the end of this request was recorded
                lease = (name.boot, name.epoch) if name else None
                if lease is not None:
                    fetched.add(lease)
                yield Handover(name, self._prefills.get(lease) if lease else None, decode, tuple(mine))
        for lease, prefill in self._prefills.items():
            if lease not in fetched:
                yield Handover(LeaseName(boot=lease[0], epoch=lease[1]), prefill)
        yield from (Handover(None, prefill) for prefill in self._unscheduled)
        for (_, request), left in loads.items():  # of a consumer whose scheduler recorded nothing
            decode = Decode(left[0].process, request)
            yield Handover(None, None, decode, tuple(left))


def _lease_of(decode: Decode) -> LeaseName | None:
    if decode.arrived is not None:
        return decode.arrived.lease
    return decode.recomputed.lease if decode.recomputed is not None else None


def _share_out(lives: list[Decode], loads: list[Load]) -> list[list[Load]]:
    """Assign each load to the last request of its id that was ordered before the load began."""
    if len(lives) == 1:
        return [loads]
    shared: list[list[Load]] = [[] for _ in lives]
    ordered = sorted((one.ordered.at_ns, index) for index, one in enumerate(lives) if one.ordered)
    for load in loads:
        mine = [(at_ns, index) for at_ns, index in ordered if load.process.boot in ("", lives[index].process.boot)] or [
            (0, 0)
        ]
        shared[next((index for at_ns, index in reversed(mine) if at_ns <= load.begun_ns), mine[0][1])].append(load)
    return shared
