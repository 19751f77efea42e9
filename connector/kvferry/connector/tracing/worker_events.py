"""Events of a worker's ended loads, for the file in `trace_dir` and for the spans that the scheduler makes.

`WorkerTracing` receives all loads and does nothing with them: it is used when tracing is off.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.trace.events import LoadEnded, StageSpan
from kvferry.trace.recorder import Recorder
from kvferry.trace.recorder_file import TraceFile
from kvferry.worker.loads.record import LoadRecord

_LONGEST_NAME = 4096
_NS = 1_000_000_000
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[LoadEnded])


class WorkerTracing:
    """Does nothing. All methods are called by the step thread; they never raise or wait."""

    def ended(self, loads: Sequence[LoadRecord]) -> None:
        """These loads have ended."""

    def take_reported(self) -> bytes:
        """The encoded loads that ended since the last call, for `reported_loads`; empty if there are none."""
        return b""

    def close(self) -> None:
        """Write the remaining events. Idempotent."""


UNTRACED = WorkerTracing()


@dataclass(frozen=True, slots=True)
class TimedLoad:
    """An ended load, and the wall clock minus the monotonic clock at its end."""

    load: LoadRecord
    offset_ns: int


class LoadFile:
    """A recorder's sink that makes events of loads, on the writer's thread, and writes them."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def take(self, items: Sequence[TimedLoad], lost: int) -> None:
        """See `TraceFile.take`."""
        self._file.take([load_event(timed.load, timed.offset_ns) for timed in items], lost)

    def close(self) -> None:
        self._file.close()


class RecordedWorker(WorkerTracing):
    """Records every load in a file."""

    def __init__(self, file: Recorder[TimedLoad]) -> None:
        self._file = file

    def ended(self, loads: Sequence[LoadRecord]) -> None:
        offset_ns = wall_offset_ns()
        for load in loads:
            self._file.record(TimedLoad(load, offset_ns))

    def close(self) -> None:
        self._file.close()


class ReportingWorker(WorkerTracing):
    """Keeps every load for the scheduler, and passes it on."""

    def __init__(self, other: WorkerTracing) -> None:
        self._other = other
        self._ended: list[LoadEnded] = []

    def ended(self, loads: Sequence[LoadRecord]) -> None:
        offset_ns = wall_offset_ns()
        self._ended += [load_event(load, offset_ns) for load in loads]
        self._other.ended(loads)

    def take_reported(self) -> bytes:
        if not self._ended:
            return b""
        ended, self._ended = self._ended, []
        return _ENCODER.encode(ended)

    def close(self) -> None:
        self._other.close()


def reported_loads(reported: bytes) -> list[LoadEnded]:
    """Decode the result of `take_reported` of this version of kvferry."""
    return _DECODER.decode(reported)


def wall_offset_ns() -> int:
    """The wall clock minus the monotonic clock, now."""
    return time.time_ns() - time.monotonic_ns()


def load_event(load: LoadRecord, offset_ns: int) -> LoadEnded:
    """The event of a load with its stages, converted from the monotonic clock to the wall clock."""
    begun_ns = int(load.times.ordered_s * _NS) + offset_ns
    stages: list[StageSpan] = []
    for stage, ended_s in load.times.ended_s.items():
        ended_ns = int(ended_s * _NS) + offset_ns
        stages.append(StageSpan(stage=stage.value, begun_ns=begun_ns, ended_ns=ended_ns))
        begun_ns = ended_ns
    totals = load.totals
    return LoadEnded(
        at_ns=begun_ns,
        request=load.request_id[:_LONGEST_NAME],
        producer=load.source.engine_id,
        stages=tuple(stages),
        reason="" if load.reason is None else load.reason.value,
        bytes=0 if totals is None else totals.planned_bytes,
        descriptors=0 if totals is None else totals.planned_descriptors,
        staged_bytes=0 if totals is None else totals.staged_bytes,
        relayout_ns=int(load.times.relayout_s * _NS),
    )
