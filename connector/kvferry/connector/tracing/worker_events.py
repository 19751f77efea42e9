"""Events of a worker's ended loads, for the file in `trace_dir` and for the spans that the scheduler makes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.connector.config import FerryConfig
from kvferry.protocol.geometry import Place
from kvferry.trace.events import (
    MOST_CHUNKS,
    TRACE_VERSION,
    ChunkSpan,
    Event,
    LoadEnded,
    Phase,
    ProcessRole,
    ProcessStarted,
    StageSpan,
)
from kvferry.trace.recorder import Recorder, TraceFile
from kvferry.worker.loads.record import LoadRecord

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
        offset_ns = time.time_ns() - time.monotonic_ns()  # of the wall clock
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


def load_event(load: LoadRecord, offset_ns: int) -> LoadEnded:
    """The event of a load with its stages and its reads, converted from the monotonic clock to the wall clock."""
    begun_ns = int(load.ordered_s * _NS) + offset_ns
    stages: list[StageSpan] = []
    for stage, ended_s in load.ended_s.items():
        ended_ns = int(ended_s * _NS) + offset_ns
        stages.append(StageSpan(stage=Phase[stage.name], begun_ns=begun_ns, ended_ns=ended_ns))
        begun_ns = ended_ns
    chunks = (
        ChunkSpan(
            stop_token=stop_token,
            begun_ns=int(begun_s * _NS) + offset_ns,
            ended_ns=int(ended_s * _NS) + offset_ns,
        )
        for stop_token, begun_s, ended_s in load.chunks[:MOST_CHUNKS]
    )
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
        early_bytes=load.early_bytes,
        restarts=load.restarts,
        chunks=tuple(chunks),
    )


def worker_tracing(
    vllm_config: VllmConfig, config: FerryConfig, place: Place
) -> WorkerTracing | None:
    """The tracing of a worker side; None where it is off. Its file has no boot id, which workers do not know.

    Raises:
        InvalidConfig: `trace_dir` is not writable.
    """
    file = open_trace_file(vllm_config, config, ProcessRole.WORKER, "", str(place))
    keeps = has_opentelemetry_on(vllm_config)
    return WorkerTracing(file, keeps=keeps) if file is not None or keeps else None


def has_opentelemetry_on(vllm_config: VllmConfig) -> bool:
    """Whether OpenTelemetry is on. vLLM starts with an endpoint only if OpenTelemetry is installed."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None


def open_trace_file(
    vllm_config: VllmConfig, config: FerryConfig, part: ProcessRole, boot: str, place: str
) -> Recorder[Event] | None:
    """The recorder for `trace_dir`; None without that option."""
    if config.trace_dir is None:
        return None
    transfer = vllm_config.kv_transfer_config
    started = ProcessStarted(
        at_ns=time.time_ns(),
        trace_version=TRACE_VERSION,
        part=part,
        engine_id=transfer.engine_id,
        boot=boot,
        host=socket.gethostname(),
        pid=os.getpid(),
        place=place,
    )
    return Recorder(TraceFile(config.trace_dir, transfer.kv_role, started, config.trace_max_bytes))
