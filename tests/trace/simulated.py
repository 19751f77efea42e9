"""Engines that never ran: what they would have recorded of handovers whose true times are known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvferry.trace.clocks import align
from kvferry.trace.events import (
    TRACE_VERSION,
    AnyEvent,
    ChunkSpan,
    DecodeArrived,
    DecodeScheduled,
    Event,
    Finished,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Phase,
    PrefillArrived,
    PrefillScheduled,
    PrefillStep,
    ProcessRole,
    ProcessStarted,
    Recomputed,
    StageSpan,
    TracedLease,
)
from kvferry.trace.handover import Handover
from kvferry.trace.joining import join

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
EventT = TypeVar("EventT", bound=Event)


@dataclass(eq=False)
class SimulatedProcess:
    """A process and what it records, by its own clock."""

    started: ProcessStarted
    ahead_ns: int
    events: list[AnyEvent] = field(default_factory=list)

    def record(self, kind: type[AnyEvent], true_ns: int, **fields: Any) -> None:
        """Record an event of a true time."""
        self.events.append(kind(at_ns=true_ns + self.ahead_ns, **fields))

    def the(self, kind: type[EventT]) -> EventT:
        """The only event of a kind."""
        (event,) = (event for event in self.events if isinstance(event, kind))
        return event

    def forget(self, *kinds: type) -> None:
        """Nothing of these kinds was recorded."""
        self.events[:] = [one for one in self.events if not isinstance(one, kinds)]

    def replace(self, event: AnyEvent, **fields: Any) -> None:
        """Change what was recorded of an event."""
        changed = msgspec.structs.replace(event, **fields)
        self.events[self.events.index(event)] = changed

    def restarted(self, **fields: Any) -> None:
        """Change what the process says of itself."""
        self.started = msgspec.structs.replace(self.started, **fields)

    def in_order(self) -> list[AnyEvent]:
        """Its events by time."""
        return sorted(self.events, key=lambda event: event.at_ns)

    def lines(self) -> bytes:
        """Its file."""
        return bytes(_encode([self.started, *self.in_order()]))


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


@dataclass(frozen=True)
class _Chunk:
    """A part of a prompt that is read while the rest is computed."""

    complete_ns: int
    stop_token: int


class Simulation:
    """Any number of engines."""

    def __init__(self) -> None:
        self.engines: list[SimulatedEngine] = []
        self._epochs = itertools.count(1)

    def engine(
        self, name: str, *, workers: int = 1, host: str = "", ahead_ns: int = 0
    ) -> SimulatedEngine:
        """One more engine, on a host of its own, whose clock is ahead of the truth."""
        boot = f"{len(self.engines) + 1:032x}"
        processes = []
        for number, place in enumerate(["", *(f"tp{rank}" for rank in range(workers))]):
            started = ProcessStarted(
                at_ns=BEGIN_NS,
                trace_version=TRACE_VERSION,
                part=ProcessRole.WORKER if place else ProcessRole.SCHEDULER,
                engine_id=name,
                boot="" if place else boot,
                host=host or f"host-of-{name}",
                pid=100 + number,
                place=place,
            )
            processes.append(SimulatedProcess(started, ahead_ns))
        engine = SimulatedEngine(name, boot, processes[0], processes[1:])
        self.engines.append(engine)
        return engine

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
        steps: int = 0,
        reason: str = "",
        recomputed: str = "",
        how: str = "done",
    ) -> TracedLease:
        """Record one, from `at_ns` after the begin on.

        Args:
            consumer: None if the lease is never read.
            steps: of a prompt that is read while it is computed, in as many steps of equal length: the consumer has
                the ticket `times.router` after the first begins, and reads the part of each when it has ended.
            reason: every worker's load fails after its fence.
            recomputed: why the consumer computes the prompt; without `reason` it orders no load at all.
        """
        times = times or Times()
        lease = TracedLease(boot=producer.boot, epoch=f"{next(self._epochs):015x}")
        theirs = producer.scheduler.record
        of_lease = {"request": request, "lease": lease}
        now = BEGIN_NS + at_ns
        theirs(PrefillArrived, now, request=request, tokens=tokens)
        now += times.prefill_queue
        theirs(PrefillScheduled, now, **of_lease)
        given_ns = now + times.prefill
        chunks = []
        for step in range(steps):
            stop_token = (step + 1) * tokens // steps
            begun_ns = now + step * times.prefill // steps
            theirs(PrefillStep, begun_ns, lease=lease, tokens=stop_token)
            ended_ns = now + (step + 1) * times.prefill // steps
            chunks.append(_Chunk(ended_ns, stop_token))
        theirs(ParamsGiven, given_ns, **of_lease, tokens=tokens)
        if consumer is None:
            theirs(LeaseOver, given_ns + times.kept, **of_lease, how=how)
            return lease
        ours = consumer.scheduler.record
        name = decode_request or f"{request}-d"
        if not steps:
            now = given_ns
        now += times.router
        ours(
            DecodeArrived,
            now,
            request=name,
            lease=lease,
            producer=producer.name,
            remote_request=request,
            tokens=tokens,
            is_early=steps > 0,
        )
        now += times.decode_queue
        if not recomputed or reason:
            ours(LoadOrdered, now, request=name, first_token=0, stop_token=tokens)
            num_bytes = tokens * token_bytes // len(consumer.workers)
            loaded = {"bytes": num_bytes, "descriptors": 64}
            ends = []
            for number, worker in enumerate(consumer.workers):
                stages = times.of_worker(number)
                load: dict[str, Any] = {"request": name, "producer": producer.name}
                load["reason"] = reason
                if not reason:
                    load |= loaded
                ends.append(_load(worker, now + times.order, stages, chunks, load))
            now = max(ends) + times.report
            ours(LoadReported, now, request=name, good=not reason)
            theirs(LeaseOver, max(ends) + times.kept, **of_lease, how=how)
        if recomputed:
            ours(Recomputed, now, request=name, reason=recomputed, lease=lease)
        now += times.first_step
        ours(DecodeScheduled, now, request=name)
        ours(Finished, now + 50 * MS, request=name)
        return lease

    def processes(self) -> list[SimulatedProcess]:
        """Of all engines."""
        return [
            process
            for engine in self.engines
            for process in (engine.scheduler, *engine.workers)
        ]

    def joined(self) -> list[Handover]:
        """What is recorded of each handover, with the times of different clocks."""
        return join({one.started: one.in_order() for one in self.processes()})

    def handovers(self) -> list[Handover]:
        """On aligned clocks."""
        handovers = self.joined()
        align(handovers)
        return handovers

    def write(self, folder: Path) -> Path:
        """One file a process, in a folder an engine."""
        for engine in self.engines:
            home = folder / engine.name
            home.mkdir(parents=True, exist_ok=True)
            for process in (engine.scheduler, *engine.workers):
                name = f"{process.started.part.value}-{process.started.place or 0}-{engine.boot[-4:]}.jsonl"
                (home / name).write_bytes(process.lines())
        return folder


def engine_pair(
    workers: int = 1,
) -> tuple[Simulation, SimulatedEngine, SimulatedEngine]:
    """A producer `p` and a consumer `d`, whose clocks are right."""
    simulation = Simulation()
    producer = simulation.engine("p")
    return simulation, producer, simulation.engine("d", workers=workers)


def _load(
    worker: SimulatedProcess,
    begun_ns: int,
    stages: dict[str, int],
    chunks: list[_Chunk],
    load: dict[str, Any],
) -> int:
    """A worker's load; gives its true end."""
    reads = []
    now = begun_ns
    for chunk in chunks:
        now = max(now, chunk.complete_ns)
        ended_ns = now + stages["reading"] // len(chunks)
        span = {
            "begun_ns": now + worker.ahead_ns,
            "ended_ns": ended_ns + worker.ahead_ns,
        }
        reads.append(ChunkSpan(stop_token=chunk.stop_token, **span))
        now = ended_ns
    if chunks:
        fence_ns = max(0, chunks[0].complete_ns - begun_ns)
        stages = {
            "fence": fence_ns,
            "reading": now - begun_ns - fence_ns,
            "fence_again": stages["fence_again"],
        }
    if load["reason"]:
        stages = dict(itertools.islice(stages.items(), 3))
    spans = []
    now = begun_ns
    for stage, lasted_ns in stages.items():
        at_ns = now + worker.ahead_ns
        ended_ns = at_ns + lasted_ns
        spans.append(
            StageSpan(stage=Phase[stage.upper()], begun_ns=at_ns, ended_ns=ended_ns)
        )
        now += lasted_ns
    if chunks:
        # All but the last chunk are read before the prompt is computed.
        early_bytes = load.get("bytes", 0) * (len(chunks) - 1) // len(chunks)
        load = {**load, "early_bytes": early_bytes, "chunks": tuple(reads)}
    worker.record(LoadEnded, now, stages=tuple(spans), **load)
    return now
