"""Engines that never ran: what they would have recorded of handovers whose true times are known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvferry.trace.clocks import compare
from kvferry.trace.events import (
    TRACE_VERSION,
    AnyEvent,
    ChunkSpan,
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
    PrefillStep,
    ProcessRole,
    ProcessStarted,
    Recomputed,
    StageSpan,
    TracedLease,
)
from kvferry.trace.handover import Handover, match
from kvferry.trace.reading import Process
from kvferry.trace.timeline import Timeline, make_timeline

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

    def forget(self, *kinds: type) -> None:
        """Nothing of these kinds was recorded."""
        self.events[:] = [one for one in self.events if not isinstance(one, kinds)]

    def lines(self) -> bytes:
        """Its file."""
        return bytes(
            _encode([self.started, *sorted(self.events, key=lambda event: event.at_ns)])
        )


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
                    boot="" if place else boot,
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
        theirs = producer.scheduler
        now = BEGIN_NS + at_ns
        record(theirs, PrefillArrived(at_ns=now, request=request, tokens=tokens))
        now += times.prefill_queue
        record(theirs, PrefillScheduled(at_ns=now, request=request, lease=lease))
        chunks = []
        for step in range(steps):
            stop_token = (step + 1) * tokens // steps
            begun_ns = now + step * times.prefill // steps
            record(theirs, PrefillStep(at_ns=begun_ns, lease=lease, tokens=stop_token))
            chunks.append((now + (step + 1) * times.prefill // steps, stop_token))
        given_ns = now + times.prefill
        record(
            theirs,
            ParamsGiven(at_ns=given_ns, request=request, lease=lease, tokens=tokens),
        )
        if consumer is None:
            over_ns = given_ns + times.kept
            record(
                theirs, LeaseOver(at_ns=over_ns, request=request, lease=lease, how=how)
            )
            return lease
        ours = consumer.scheduler
        name = decode_request or f"{request}-d"
        if not steps:
            now = given_ns
        now += times.router
        arrived = DecodeArrived(
            at_ns=now,
            request=name,
            lease=lease,
            producer=producer.name,
            remote_request=request,
            tokens=tokens,
            is_early=steps > 0,
        )
        record(ours, arrived)
        now += times.decode_queue
        if not recomputed or reason:
            record(
                ours,
                LoadOrdered(at_ns=now, request=name, first_token=0, stop_token=tokens),
            )
            ended = LoadEnded(
                at_ns=0,
                request=name,
                producer=producer.name,
                stages=(),
                reason=reason,
                bytes=0 if reason else tokens * token_bytes // len(consumer.workers),
                descriptors=0 if reason else 64,
            )
            ends = []
            for number, worker in enumerate(consumer.workers):
                stages = times.of_worker(number)
                ends.append(_load(worker, ended, now + times.order, stages, chunks))
            now = max(ends) + times.report
            record(ours, LoadReported(at_ns=now, request=name, good=not reason))
            over_ns = max(ends) + times.kept
            record(
                theirs, LeaseOver(at_ns=over_ns, request=request, lease=lease, how=how)
            )
        if recomputed:
            record(
                ours,
                Recomputed(at_ns=now, request=name, reason=recomputed, lease=lease),
            )
        now += times.first_step
        record(ours, DecodeScheduled(at_ns=now, request=name))
        record(ours, Finished(at_ns=now + 50 * MS, request=name))
        return lease

    def processes(self) -> list[SimulatedProcess]:
        """Of all engines."""
        return [
            process
            for engine in self.engines
            for process in (engine.scheduler, *engine.workers)
        ]

    def read(self) -> list[Process]:
        """Their files, as they are read."""
        return [
            Process("", one.started, sorted(one.events, key=lambda event: event.at_ns))
            for one in self.processes()
        ]

    def handovers(self) -> list[Handover]:
        """The handovers that their recordings show."""
        return match(self.read())

    def timelines(self) -> list[Timeline]:
        """On clocks that were compared."""
        found = self.handovers()
        clocks = compare(found)
        return [make_timeline(handover, clocks) for handover in found]

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


def record(process: SimulatedProcess, event: AnyEvent) -> None:
    """Record an event of a true time."""
    process.events.append(
        msgspec.structs.replace(event, at_ns=event.at_ns + process.ahead_ns)
    )


def _load(
    worker: SimulatedProcess,
    ended: LoadEnded,
    begun_ns: int,
    stages: dict[str, int],
    chunks: Sequence[tuple[int, int]],
) -> int:
    """A worker's load; gives its true end.

    Args:
        chunks: when each part of the prompt is complete, and up to which token it goes.
    """
    reads = []
    read_ns = 0
    ready_ns = begun_ns
    for complete_ns, stop_token in chunks:
        ready_ns = max(ready_ns, complete_ns)
        read_ns = stages["reading"] // len(chunks)
        read = ChunkSpan(
            stop_token=stop_token,
            begun_ns=ready_ns + worker.ahead_ns,
            ended_ns=ready_ns + read_ns + worker.ahead_ns,
        )
        reads.append(read)
        ready_ns += read_ns
    if chunks:
        fence_ns = max(0, chunks[0][0] - begun_ns)
        reading_ns = ready_ns - begun_ns - fence_ns
        stages = {
            "fence": fence_ns,
            "reading": reading_ns,
            "fence_again": stages["fence_again"],
        }
    spans = []
    end_ns = begun_ns
    for stage, lasted_ns in list(stages.items())[: 3 if ended.reason else None]:
        at_ns = end_ns + worker.ahead_ns
        spans.append(
            StageSpan(
                stage=Phase[stage.upper()], begun_ns=at_ns, ended_ns=at_ns + lasted_ns
            )
        )
        end_ns += lasted_ns
    early_parts = max(0, len(chunks) - 1)
    event = msgspec.structs.replace(
        ended,
        at_ns=end_ns,
        stages=tuple(spans),
        early_bytes=ended.bytes * early_parts // max(1, len(chunks)),
        chunks=tuple(reads),
    )
    record(worker, event)
    return end_ns
