"""Joins the events of all processes to handovers.

Events of a producer are joined by the lease, arrivals by the request's id. A consumer's requests are joined to leases
by the params that arrived with them, and a worker's loads to requests by engine and request id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvferry.trace.events import (
    AnyEvent,
    DecodeArrived,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    ParamsGiven,
    PrefillArrived,
    PrefillScheduled,
    PrefillStep,
    ProcessStarted,
    Recomputed,
    RequestEvent,
    TracedLease,
)
from kvferry.trace.handover import Events, Handover, RequestKey

# Of other requests nothing but a question to other engines was recorded, or their end.
_BEGINS_DECODE = frozenset({DecodeArrived, Recomputed, LoadOrdered})


def join(processes: Mapping[ProcessStarted, Iterable[AnyEvent]]) -> list[Handover]:
    """One handover for every lease, and for every request that read it, in no order.

    Args:
        processes: the events of each, in the order of their times.
    """
    # By the id of a request, which vLLM ends with random digits: so it is of one request for ever.
    arrivals: defaultdict[RequestKey, Events] = defaultdict(dict)
    decodes: defaultdict[RequestKey, Handover] = defaultdict(Handover)
    # By lease: a consumer knows nothing else of the producer's part.
    prefills: defaultdict[TracedLease, Handover] = defaultdict(Handover)
    for process, events in processes.items():
        for event in events:
            if isinstance(event, PrefillStep):
                prefills[event.lease].prefill_steps[process, event] = None
            if not isinstance(event, RequestEvent):
                continue
            key = RequestKey(process.engine_id, event.request)
            record = (process, event)
            # The first of a type counts: a prompt that is preempted opens its lease again.
            if isinstance(event, PrefillArrived):
                arrivals[key] = {PrefillArrived: record}
            elif isinstance(event, PrefillScheduled | ParamsGiven | LeaseOver):
                prefill = prefills[event.lease].prefill
                prefill.update(arrivals.pop(key, {}))
                prefill.setdefault(type(event), record)
            elif isinstance(event, LoadEnded):
                decodes[key].loads.setdefault(process, event)
            else:
                decodes[key].decode.setdefault(type(event), record)
            if isinstance(event, DecodeArrived | Recomputed):
                decodes[key].lease = decodes[key].lease or event.lease

    handovers = []
    for handover in decodes.values():
        if handover.loads or not _BEGINS_DECODE.isdisjoint(handover.decode):
            if handover.lease is not None:
                of_producer = prefills[handover.lease]
                handover.prefill = of_producer.prefill
                handover.prefill_steps = of_producer.prefill_steps
            handovers.append(handover)
    # What nobody read is shown as well: it is what an operator looks for.
    read = {handover.lease for handover in handovers}
    for lease, handover in prefills.items():
        if handover.prefill and lease not in read:
            handover.lease = lease
            handovers.append(handover)
    handovers += [Handover(prefill=arrived) for arrived in arrivals.values()]
    return handovers
