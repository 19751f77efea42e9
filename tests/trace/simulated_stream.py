"""A simulated handover whose prompt is read while it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.trace.events import (
    ChunkSpan,
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
    TracedLease,
)
from tests.trace.simulated import (
    BEGIN_NS,
    MS,
    SimulatedEngine,
    SimulatedProcess,
    Simulation,
    Times,
    record,
    spans_from,
)


def follow(
    simulation: Simulation,
    producer: SimulatedEngine,
    consumer: SimulatedEngine,
    at_ns: int = 0,
    times: Times | None = None,
    *,
    request: str = "cmpl-1-0",
    decode_request: str | None = None,
    tokens: int = 4096,
    token_bytes: int = 131072,
    steps: int = 8,
) -> TracedLease:
    """Record a handover whose prompt every worker reads while it is computed, in steps of equal length: the part of
    a step when the step has ended. The consumer has the ticket with the first one, after `times.router`."""
    times = times or Times()
    lease = simulation.lease_of(producer)
    name, theirs, ours = decode_request or f"{request}-d", producer.scheduler, consumer.scheduler
    now = BEGIN_NS + at_ns
    record(theirs, PrefillArrived(at_ns=now, request=request, tokens=tokens))
    begun = now + times.prefill_queue
    record(theirs, PrefillScheduled(at_ns=begun, request=request, lease=lease))
    ends = [begun + (step + 1) * times.prefill // steps for step in range(steps)]
    for step, at in enumerate([begun, *ends[:-1]]):
        record(theirs, PrefillStep(at_ns=at, lease=lease, tokens=(step + 1) * tokens // steps))
    record(theirs, ParamsGiven(at_ns=ends[-1], request=request, lease=lease, tokens=tokens))
    arrived = DecodeArrived(
        at_ns=begun + times.router,
        request=name,
        lease=lease,
        producer=producer.name,
        remote_request=request,
        tokens=tokens,
        is_early=True,
    )
    record(ours, arrived)
    ordered = begun + times.router + times.decode_queue
    record(ours, LoadOrdered(at_ns=ordered, request=name, first_token=0, stop_token=tokens))
    share = tokens * token_bytes // len(consumer.workers)
    followed = [
        _load(
            worker,
            name,
            producer.name,
            ordered + times.order,
            times.of_worker(number),
            ends,
            tokens,
            share,
        )
        for number, worker in enumerate(consumer.workers)
    ]
    now = max(followed) + times.report
    record(ours, LoadReported(at_ns=now, request=name, good=True))
    record(
        theirs,
        LeaseOver(at_ns=max(followed) + times.kept, request=request, lease=lease, how="done"),
    )
    record(ours, DecodeScheduled(at_ns=now + times.first_step, request=name))
    record(ours, Finished(at_ns=now + times.first_step + 50 * MS, request=name))
    return lease


def _load(
    worker: SimulatedProcess,
    request: str,
    producer: str,
    begun_ns: int,
    stages: Mapping[str, int],
    step_ends: Sequence[int],
    tokens: int,
    num_bytes: int,
) -> int:
    """A worker's load that follows these steps, each read as long as its part of the reading; gives its true end."""
    read_ns, count, ready_ns = stages["reading"] // len(step_ends), len(step_ends), begun_ns
    chunks: list[ChunkSpan] = []
    for step, at in enumerate(step_ends):
        ready_ns = max(ready_ns, at)
        stop, shift_ns = (step + 1) * tokens // count, worker.ahead_ns
        chunks.append(
            ChunkSpan(
                stop_token=stop,
                begun_ns=ready_ns + shift_ns,
                ended_ns=ready_ns + read_ns + shift_ns,
            )
        )
        ready_ns += read_ns
    waits = max(0, step_ends[0] - begun_ns)
    lasted = [
        ("fence", waits),
        ("reading", ready_ns - begun_ns - waits),
        ("fence_again", stages["fence_again"]),
    ]
    spans = spans_from(lasted, begun_ns + worker.ahead_ns)
    event = LoadEnded(
        at_ns=ready_ns + stages["fence_again"],
        request=request,
        producer=producer,
        stages=spans,
        bytes=num_bytes,
        descriptors=64,
        early_bytes=num_bytes * (count - 1) // count,
        chunks=tuple(chunks),
    )
    record(worker, event)
    return event.at_ns
