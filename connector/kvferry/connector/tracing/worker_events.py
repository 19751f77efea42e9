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
from kvferry.worker.loads.results import LoadRecord

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
        # Loads are timed with the monotonic clock; the events of several processes are put together by the wall clock.
        wall_offset_ns = time.time_ns() - time.monotonic_ns()
        for load in loads:
            event = load_event(load, wall_offset_ns)
            if self._file is not None:
                self._file.record(event)
            if self._keeps:
                self._kept.append(event)

    def take(self) -> tuple[LoadEnded, ...]:
        """The events since the last call."""
        taken = tuple(self._kept)
        self._kept.clear()
        return taken

    def close(self) -> None:
        """Write the remaining events. Idempotent."""
        if self._file is not None:
            self._file.close()


def load_event(load: LoadRecord, wall_offset_ns: int) -> LoadEnded:
    """The event of a load with its stages and its reads, converted from the monotonic clock to the wall clock.

    Args:
        wall_offset_ns: what the wall clock shows more than the monotonic one.
    """

    def wall_ns(monotonic_s: float) -> int:
        return int(monotonic_s * _NS) + wall_offset_ns

    # A stage begins when the one before it has ended.
    stages: list[StageSpan] = []
    ended_ns = wall_ns(load.ordered_s)
    for stage, ended_s in load.ended_s.items():
        begun_ns = ended_ns
        ended_ns = wall_ns(ended_s)
        stages.append(
            StageSpan(stage=Phase[stage.name], begun_ns=begun_ns, ended_ns=ended_ns)
        )
    chunks = []
    for stop_token, begun_s, ended_s in load.chunks[:MOST_CHUNKS]:
        chunk = ChunkSpan(
            stop_token=stop_token,
            begun_ns=wall_ns(begun_s),
            ended_ns=wall_ns(ended_s),
        )
        chunks.append(chunk)
    return LoadEnded(
        at_ns=ended_ns,
        request=load.request_id[:_LONGEST_NAME],
        producer=load.source.engine_id,
        stages=tuple(stages),
        reason="" if load.reason is None else load.reason.value,
        bytes=load.planned_bytes,
        descriptors=load.planned_descriptors,
        staged_bytes=load.staged_bytes,
        mapped_bytes=load.mapped_bytes,
        relayout_ns=int(load.relayout_s * _NS),
        early_bytes=load.early_bytes,
        restarts=load.restarts,
        chunks=tuple(chunks),
    )


def worker_tracing(
    vllm_config: VllmConfig, config: FerryConfig, place: Place
) -> WorkerTracing | None:
    """The tracing of a worker side; None where it is off.

    Raises:
        InvalidConfig: `trace_dir` is not writable.
    """
    # Without a boot id, which workers do not know.
    file = open_trace_file(vllm_config, config, ProcessRole.WORKER, "", str(place))
    keeps = has_opentelemetry_on(vllm_config)
    if file is None and not keeps:
        return None
    return WorkerTracing(file, keeps=keeps)


def has_opentelemetry_on(vllm_config: VllmConfig) -> bool:
    """Whether OpenTelemetry is on."""
    # vLLM starts with an endpoint only if OpenTelemetry is installed.
    return vllm_config.observability_config.otlp_traces_endpoint is not None


def open_trace_file(
    vllm_config: VllmConfig,
    config: FerryConfig,
    part: ProcessRole,
    boot: str,
    place: str,
) -> Recorder[Event] | None:
    """The recorder for `trace_dir`; None without that option.

    Raises:
        InvalidConfig: `trace_dir` is not writable.
    """
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
    return Recorder(
        TraceFile(config.trace_dir, transfer.kv_role, started, config.trace_max_bytes)
    )
