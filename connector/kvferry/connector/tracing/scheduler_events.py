"""Events of the scheduler side, for the file in `trace_dir` and for OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.local_engine import LocalEngine, MemoryIdentity
from kvferry.connector.tracing.spans import SpanItem, SpanSink, WorkerLoads
from kvferry.connector.tracing.worker_events import (
    has_opentelemetry_on,
    open_trace_file,
)
from kvferry.link.commands import RemoteLease
from kvferry.protocol.errors import InputError
from kvferry.protocol.orders import LeaseProgress, LoadOrder
from kvferry.protocol.params import RemoteDecode, RemotePrefill, read_params, read_turn
from kvferry.scheduler.consumer.ledger import LoadObserver
from kvferry.scheduler.producer.ledger import LeaseObserver
from kvferry.scheduler.requests import ProducerLease, RemotePrompt
from kvferry.trace.events import (
    DecodeArrived,
    DecodeScheduled,
    Event,
    Finished,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillArrived,
    PrefillScheduled,
    PrefillStep,
    PrefixAsked,
    PrefixNotPulled,
    ProcessRole,
    Recomputed,
    TracedLease,
)
from kvferry.trace.recorder import Recorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_LONGEST_NAME = 4096
_LONGEST_TRACEPARENT = 256


class SchedulerTracing(LeaseObserver, LoadObserver):
    """Records the events of one engine's scheduler. All methods are called by the step thread; none raises or waits.

    Args:
        memory: of this engine; its leases are named with its boot.
        file: the recorder for `trace_dir`; None without that option.
        spans: the recorder for OpenTelemetry; None if it is off.
    """

    def __init__(
        self,
        memory: MemoryIdentity,
        file: Recorder[Event] | None = None,
        spans: Recorder[SpanItem] | None = None,
    ) -> None:
        self._memory = memory
        self._file = file
        self._spans = spans
        # Requests to be decoded here, until they end; those of them that no step has computed yet.
        self._decoding: set[str] = set()
        self._unscheduled: set[str] = set()

    def prefill_arrived(self, request: Request) -> None:
        """A prompt will be decoded elsewhere."""
        tokens = request.num_prompt_tokens
        self._record(
            PrefillArrived,
            request.request_id,
            tokens=tokens,
            traceparent=_traceparent(request),
        )

    def decode_arrived(
        self, request: Request, source: RemotePrefill, shared_tokens: int
    ) -> None:
        """A prompt came with usable params, or a producer has answered with them."""
        self._expect(request.request_id)
        ticket = source.kvferry
        self._record(
            DecodeArrived,
            request.request_id,
            lease=TracedLease(boot=ticket.boot, epoch=ticket.lease_epoch),
            producer=source.engine_id,
            remote_request=source.remote_request_id,
            tokens=shared_tokens,
            is_early=ticket.opens_within_s > 0,
            traceparent=_traceparent(request),
        )

    def prefix_asked(self, request: Request, tokens: int, num_sources: int) -> None:
        """Other engines are asked for the first tokens of a prompt."""
        self._record(
            PrefixAsked, request.request_id, tokens=tokens, sources=num_sources
        )

    def prefix_not_pulled(self, request: Request, reason: str) -> None:
        """They are computed here."""
        self._record(PrefixNotPulled, request.request_id, reason=reason)

    def computed_here(self, request: Request, reason: str) -> None:
        """A prompt came with params that are not used; the request still has them."""
        self._expect(request.request_id)
        lease = _lease_in(request.kv_transfer_params, request.num_prompt_tokens)
        self._record(Recomputed, request.request_id, reason=reason, lease=lease)

    def recomputed(self, prompt: RemotePrompt, reason: str) -> None:
        self._record(
            Recomputed,
            prompt.request_id,
            reason=reason,
            lease=_remote_name(prompt.lease),
        )

    def lease_opened(self, lease: ProducerLease) -> None:
        self._record(PrefillScheduled, lease.request_id, lease=self._own_name(lease))

    def progressed(self, progress: Sequence[LeaseProgress]) -> None:
        """A step that is about to begin computes parts of prompts that are read meanwhile."""
        for part in progress:
            lease = TracedLease(boot=self._memory.boot, epoch=part.origin)
            self._put(
                PrefillStep(at_ns=time.time_ns(), lease=lease, tokens=part.tokens)
            )

    def params_given(
        self, request_id: str, params: RemotePrefill, lease: ProducerLease
    ) -> None:
        """A request has ended, and its response carries params."""
        self._record(
            ParamsGiven,
            request_id,
            lease=self._own_name(lease),
            tokens=params.remote_num_tokens,
        )

    def lease_over(self, lease: ProducerLease, how: str) -> None:
        self._record(LeaseOver, lease.request_id, lease=self._own_name(lease), how=how)

    def ordered(self, loads: Sequence[LoadOrder]) -> None:
        """The workers are ordered to load these."""
        for load in loads:
            self._record(
                LoadOrdered,
                load.request_id,
                first_token=load.first_token,
                stop_token=load.stop_token,
            )

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step is about to begin."""
        if self._unscheduled:
            for request in output.scheduled_new_reqs:
                if request.req_id in self._unscheduled:
                    self._unscheduled.remove(request.req_id)
                    self._record(DecodeScheduled, request.req_id)

    def loads_reported(self, loads: Mapping[int, Sequence[LoadEnded]]) -> None:
        """Ended loads, by worker."""
        if self._spans is not None:
            for worker, ended in loads.items():
                self._spans.record(WorkerLoads(worker, ended))

    def reported(self, request_id: str, *, good: bool) -> None:
        """Every worker has reported a load."""
        self._record(LoadReported, request_id, good=good)

    def finished(self, request_id: str) -> None:
        """A request has ended, with or without a load or a lease."""
        if request_id in self._decoding:
            self._decoding.remove(request_id)
            self._unscheduled.discard(request_id)
            self._record(Finished, request_id)

    def close(self) -> None:
        """Write the remaining events. Idempotent."""
        for recorder in (self._file, self._spans):
            if recorder is not None:
                recorder.close()

    def _expect(self, request_id: str) -> None:
        self._decoding.add(request_id)
        self._unscheduled.add(request_id)

    def _record(
        self, kind: Callable[..., Event], request_id: str, **fields: Any
    ) -> None:
        """Record an event of this kind, now."""
        self._put(
            kind(at_ns=time.time_ns(), request=request_id[:_LONGEST_NAME], **fields)
        )

    def _put(self, event: Event) -> None:
        for recorder in (self._file, self._spans):
            if recorder is not None:
                recorder.record(event)

    def _own_name(self, lease: ProducerLease) -> TracedLease:
        return TracedLease(boot=self._memory.boot, epoch=lease.origin.epoch)


def scheduler_tracing(
    vllm_config: VllmConfig, config: FerryConfig, local: LocalEngine
) -> SchedulerTracing | None:
    """The tracing of the scheduler side; None where it is off.

    Raises:
        InvalidConfig: `trace_dir` is not writable.
    """
    file = open_trace_file(vllm_config, config, ProcessRole.SCHEDULER, local.boot, "")
    spans: Recorder[SpanItem] | None = None
    if has_opentelemetry_on(vllm_config):
        spans = Recorder(SpanSink(trace.get_tracer("kvferry")), "kvferry-spans")
    if file is None and spans is None:
        return None
    return SchedulerTracing(local.memory, file, spans)


def _remote_name(lease: RemoteLease) -> TracedLease:
    return TracedLease(boot=lease.boot, epoch=lease.name.epoch)


def _lease_in(params: object, prompt_tokens: int) -> TracedLease | None:
    """The lease that a request's params name; None if they cannot be read."""
    try:
        source = read_params(params, prompt_tokens)
        if isinstance(source, RemoteDecode) and isinstance(params, dict):
            source = read_turn(params, prompt_tokens)
    except InputError:
        return None
    if not isinstance(source, RemotePrefill):
        return None
    return _remote_name(RemoteLease.from_params(source))


def _traceparent(request: Request) -> str:
    """The request's `traceparent` header, bounded: a client chooses it."""
    headers = request.trace_headers
    if not headers:
        return ""
    return str(headers.get("traceparent", ""))[:_LONGEST_TRACEPARENT]
