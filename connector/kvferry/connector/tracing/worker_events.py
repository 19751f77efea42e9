"""Events of a worker's ended loads, for the file in `trace_dir` and for the spans that the scheduler makes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvferry.trace.events import Event, LoadEnded, Phase, StageSpan
from kvferry.trace.recorder import Recorder
from kvferry.worker.loads.results import LoadRecord

_LONGEST_NAME = 4096
_NS = 1_000_000_000


class WorkerTracing:
    """Makes an event of every load. Its methods are called by the step thread; they never raise or wait.

    Args:
        file: the recorder for `trace_dir`; None without that option.
        keeps: whether `take` returns the events, for OpenTelemetry.
    """

    def __init__(self, file: Recorder[Event] | None, *, keeps: bool) -> None:
        self._file = file
        self._keeps = keeps
        self._kept: list[LoadEnded] = []

    def ended(self, loads: Sequence[LoadRecord]) -> None:
        """These loads have ended."""
        offset_ns = wall_offset_ns()
        for load in loads:
            event = load_event(load, offset_ns)
            if self._file is not None:
                self._file.record(event)
            if self._keeps:
                self._kept.append(event)

    def take(self) -> tuple[LoadEnded, ...]:
        """The events since the last call."""
        taken, self._kept = tuple(self._kept), []
        return taken

    def close(self) -> None:
        """Write the remaining events. Idempotent."""
        if self._file is not None:
            self._file.close()


def wall_offset_ns() -> int:
    """The wall clock minus the monotonic clock, now."""
    return time.time_ns() - time.monotonic_ns()


def load_event(load: LoadRecord, offset_ns: int) -> LoadEnded:
    """The event of a load with its stages, converted from the monotonic clock to the wall clock."""
    begun_ns = int(load.ordered_s * _NS) + offset_ns
    stages: list[StageSpan] = []
    for stage, ended_s in load.ended_s.items():
        ended_ns = int(ended_s * _NS) + offset_ns
        stages.append(StageSpan(stage=Phase[stage.name], begun_ns=begun_ns, ended_ns=ended_ns))
        begun_ns = ended_ns
    return LoadEnded(
        at_ns=begun_ns,
        request=load.request_id[:_LONGEST_NAME],
        producer=load.source.engine_id,
        stages=tuple(stages),
        reason="" if load.reason is None else load.reason.value,
        bytes=load.planned_bytes,
        descriptors=load.planned_descriptors,
        staged_bytes=load.staged_bytes,
        relayout_ns=int(load.relayout_s * _NS),
    )
