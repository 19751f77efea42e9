"""Opens an engine's trace recorders according to its configuration."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from opentelemetry import trace

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.tracing.scheduler_events import SchedulerTracing
from kvferry.connector.tracing.spans import SpanItem, SpanSink
from kvferry.connector.tracing.worker_events import WorkerTracing
from kvferry.protocol.geometry import Place
from kvferry.trace.events import TRACE_VERSION, Event, Part, ProcessStarted
from kvferry.trace.recorder import Recorder, TraceFile

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def scheduler_tracing(vllm_config: VllmConfig, config: FerryConfig, local: LocalEngine) -> SchedulerTracing:
    """The tracing of the scheduler side.

    Raises:
        InvalidConfig: `trace_dir` is not writable.
    """
    file = _file(vllm_config, config, Part.SCHEDULER, local.boot, "")
    return SchedulerTracing(local.boot, file, _spans() if has_opentelemetry_on(vllm_config) else None)


def worker_tracing(vllm_config: VllmConfig, config: FerryConfig, place: Place) -> WorkerTracing | None:
    """The tracing of a worker side; None where it is off. Its file has no boot id, which workers do not know.

    Raises:
        InvalidConfig: `trace_dir` is not writable.
    """
    file = _file(vllm_config, config, Part.WORKER, "", str(place))
    keeps = has_opentelemetry_on(vllm_config)
    return WorkerTracing(file, keeps=keeps) if file is not None or keeps else None


def has_opentelemetry_on(vllm_config: VllmConfig) -> bool:
    """Whether OpenTelemetry is on. vLLM starts with an endpoint only if OpenTelemetry is installed."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None


def _spans() -> Recorder[SpanItem]:
    return Recorder(SpanSink(trace.get_tracer("kvferry")), "kvferry-spans")


def _file(vllm_config: VllmConfig, config: FerryConfig, part: Part, boot: str, place: str) -> Recorder[Event] | None:
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
