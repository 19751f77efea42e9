"""Engines that never ran: what they would have recorded of handovers whose true times are known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvferry.trace.events import (
    TRACE_VERSION,
    AnyEvent,
    DecodeArrived,
    DecodeScheduled,
    Finished,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Phase,
    PrefillArrived,
    PrefillScheduled,
    ProcessRole,
    ProcessStarted,
    Recomputed,
    StageSpan,
    TracedLease,
)

MS = 1_000_000
BEGIN_NS = 1_790_000_000_000_000_000
STAGES = {
    "queued": MS // 10,
    "connecting": MS // 20,
    "fence": MS // 4,
    "posting": MS // 2,
    "reading": 4 * MS,
    "fence_again": MS // 5,
}
_encode = msgspec.json.Encoder().encode_lines


@dataclass(eq=False)
class SimulatedProcess:
    """A process and what it records, by its own clock."""

    started: ProcessStarted
    ahead_ns: int
    events: list[AnyEvent] = field(default_factory=list)

    def lines(self) -> bytes:
        """Its file."""
        return bytes(_encode([self.started, *sorted(self.events, key=lambda event: event.at_ns)]))


@dataclass(eq=False)
class SimulatedEngine:
    """One life of an engine."""

    name: str
    boot: str
    scheduler: SimulatedProcess
    workers: list[SimulatedProcess]


@dataclass(frozen=True)
class Times:
    """How long each part of a handover truly takes, in nanoseconds.

    Attributes:
        stages: by the worker's number what differs from `STAGES`.
        kept: from the end of the last load until the producer is notified.
    """

    prefill_queue: int = 2 * MS
    prefill: int = 80 * MS
    router: int = 3 * MS
    decode_queue: int = MS
    order: int = MS // 2
    stages: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    report: int = MS
    first_step: int = 2 * MS
    kept: int = MS

    def of_worker(self, number: int) -> dict[str, int]:
        """All stages of a worker."""
        return {**STAGES, **self.stages.get(number, {})}


class Simulation:
    """Any number of engines."""

    def __init__(self) -> None:
        self.engines: list[SimulatedEngine] = []
        self._boots = itertools.count(1)
        self._epochs = itertools.count(1)

    def engine(
        self,
        name: str,
        *,
        workers: int = 1,
        host: str = "",
        ahead_ns: int = 0,
        workers_know_boot: bool = False,
    ) -> SimulatedEngine:
        """One more engine, on a host of its own, whose clock is ahead of the truth."""
        boot = f"{next(self._boots):032x}"
        places = ["", *(f"tp{number}" for number in range(workers))]
        processes = [
            SimulatedProcess(
                ProcessStarted(
                    at_ns=BEGIN_NS,
                    trace_version=TRACE_VERSION,
                    part=ProcessRole.WORKER if place else ProcessRole.SCHEDULER,
                    engine_id=name,
                    boot=boot if workers_know_boot or not place else "",
                    host=host or f"host-of-{name}",
                    pid=100 + number,
                    place=place,
                ),
                ahead_ns,
            )
            for number, place in enumerate(places)
        ]
        engine = SimulatedEngine(name, boot, processes[0], processes[1:])
        self.engines.append(engine)
        return engine

    def lease_of(self, producer: SimulatedEngine) -> TracedLease:
        """A new lease."""
        return TracedLease(boot=producer.boot, epoch=f"{next(self._epochs):015x}")

    def handover(
        self,
        producer: SimulatedEngine,
        consumer: SimulatedEngine | None,
        at_ns: int = 0,
        times: Times | None = None,
        *,
        request: str = "cmpl-1-0",
        decode_request: str | None = None,
        tokens: int = 4096,
        token_bytes: int = 131072,
        reason: str = "",
        recomputed: str = "",
        how: str = "done",
    ) -> TracedLease:
        """Record one, from `at_ns` after the begin on.

        Args:
            consumer: None if the lease is never read.
            reason: every worker's load fails after its fence.
            recomputed: why the consumer computes the prompt; without `reason` it orders no load at all.
        """
        times = times or Times()
        lease = self.lease_of(producer)
        theirs = producer.scheduler
        now = BEGIN_NS + at_ns
        record(theirs, PrefillArrived(at_ns=now, request=request, tokens=tokens))
        now += times.prefill_queue
        record(theirs, PrefillScheduled(at_ns=now, request=request, lease=lease))
        now += times.prefill
        record(theirs, ParamsGiven(at_ns=now, request=request, lease=lease, tokens=tokens))
        if consumer is None:
            record(theirs, LeaseOver(at_ns=now + times.kept, request=request, lease=lease, how=how))
            return lease
        ours, name = consumer.scheduler, decode_request or f"{request}-d"
        now += times.router
        arrived = DecodeArrived(
            at_ns=now,
            request=name,
            lease=lease,
            producer=producer.name,
            remote_request=request,
            tokens=tokens,
        )
        record(ours, arrived)
        now += times.decode_queue
        if not recomputed or reason:
            record(ours, LoadOrdered(at_ns=now, request=name, first_token=0, stop_token=tokens))
            share = tokens * token_bytes // len(consumer.workers)
            ends = [
                _load(
                    worker,
                    name,
                    producer.name,
                    now + times.order,
                    times.of_worker(number),
                    share,
                    reason,
                )
                for number, worker in enumerate(consumer.workers)
            ]
            now = max(ends) + times.report
            record(ours, LoadReported(at_ns=now, request=name, good=not reason))
            record(
                theirs,
                LeaseOver(at_ns=max(ends) + times.kept, request=request, lease=lease, how=how),
            )
        if recomputed:
            record(ours, Recomputed(at_ns=now, request=name, reason=recomputed, lease=lease))
        now += times.first_step
        record(ours, DecodeScheduled(at_ns=now, request=name))
        record(ours, Finished(at_ns=now + 50 * MS, request=name))
        return lease

    def processes(self) -> list[SimulatedProcess]:
        """Of all engines."""
        return [
            process for engine in self.engines for process in (engine.scheduler, *engine.workers)
        ]

    def write(self, folder: Path) -> Path:
        """One file a process, in a folder an engine."""
        for engine in self.engines:
            home = folder / engine.name
            home.mkdir(parents=True, exist_ok=True)
            for process in (engine.scheduler, *engine.workers):
                name = f"{process.started.part.value}-{process.started.place or 0}-{engine.boot[-4:]}.jsonl"
                (home / name).write_bytes(process.lines())
        return folder


def record(process: SimulatedProcess, event: AnyEvent) -> None:
    """Record an event of a true time."""
    process.events.append(msgspec.structs.replace(event, at_ns=event.at_ns + process.ahead_ns))


def _load(
    worker: SimulatedProcess,
    request: str,
    producer: str,
    begun_ns: int,
    stages: Mapping[str, int],
    num_bytes: int,
    reason: str,
) -> int:
    """A worker's load; gives its true end."""
    done = list(stages.items())[: 3 if reason else None]
    spans = spans_from(done, begun_ns + worker.ahead_ns)
    end_ns = begun_ns + sum(lasted for _, lasted in done)
    event = LoadEnded(
        at_ns=end_ns,
        request=request,
        producer=producer,
        stages=spans,
        reason=reason,
        bytes=0 if reason else num_bytes,
        descriptors=0 if reason else 64,
    )
    record(worker, event)
    return end_ns


def spans_from(stages: Sequence[tuple[str, int]], begun_ns: int) -> tuple[StageSpan, ...]:
    """Stages of these lengths, one after the other."""
    spans = []
    for stage, lasted in stages:
        spans.append(
            StageSpan(stage=Phase[stage.upper()], begun_ns=begun_ns, ended_ns=begun_ns + lasted)
        )
        begun_ns += lasted
    return tuple(spans)
