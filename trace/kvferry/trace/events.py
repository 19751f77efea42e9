"""Recorded events: one line of JSON each, in one file per process.

A file begins with a `ProcessStarted`, which says whose it is; every other line is an event of that process. Times are
nanoseconds since the epoch by the clock of its host: a process that measures with a monotonic clock converts.

What joins the records of two engines is the lease: the producer's boot and the lease's epoch, which both sides know.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import Address, Count, Hex128, HexEpoch, Text

TRACE_VERSION = 1

Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
RequestName = Annotated[str, Meta(min_length=1, max_length=4096)]


class Part(enum.Enum):
    """Which part of an engine a process is."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Anything recorded.

    Attributes:
        at_ns: when it happened.
    """

    at_ns: Nanoseconds


class ProcessStarted(Event, frozen=True, kw_only=True, tag="process"):
    """The first line of a file.

    Attributes:
        place: the worker's, as its engine logs it; empty for a scheduler.
    """

    trace_version: int
    part: Part
    engine_id: Text
    boot: str
    host: Text
    pid: Count
    place: str = ""


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    """So many events of this process could not be written since the line before."""

    count: Count


class LeaseName(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, as both engines know it."""

    boot: Hex128
    epoch: HexEpoch


class RequestEvent(Event, frozen=True, kw_only=True):
    """Something that happened to a request of this engine.

    Attributes:
        request: its id in this engine.
    """

    request: RequestName


class PrefillArrived(RequestEvent, frozen=True, kw_only=True, tag="prefill_arrived"):
    """Producer's scheduler: a prompt is to be decoded elsewhere.

    Attributes:
        correlation: the client's name for the request, where the engine got one.
        traceparent: of the client's or the router's span, as W3C writes it, where the engine traces.
    """

    tokens: Count
    correlation: str = ""
    traceparent: str = ""


class PrefillScheduled(RequestEvent, frozen=True, kw_only=True, tag="prefill_scheduled"):
    """Producer's scheduler: it has blocks and a lease."""

    lease: LeaseName


class ParamsGiven(RequestEvent, frozen=True, kw_only=True, tag="params_given"):
    """Producer's scheduler: the prompt is computed, its answer carries params."""

    lease: LeaseName
    tokens: Count


class LeaseOver(RequestEvent, frozen=True, kw_only=True, tag="lease_over"):
    """Producer's scheduler: the blocks are given back.

    Attributes:
        how: as the metric `leases_released` has it.
    """

    lease: LeaseName
    how: Text


class DecodeArrived(RequestEvent, frozen=True, kw_only=True, tag="decode_arrived"):
    """Consumer's scheduler: a prompt with usable params.

    Attributes:
        remote_request: its id in the producer.
        correlation: the client's name for the request, where the engine got one.
        traceparent: of the client's or the router's span, as W3C writes it, where the engine traces.
    """

    lease: LeaseName
    producer: Text
    remote_request: RequestName
    tokens: Count
    correlation: str = ""
    traceparent: str = ""


class Recomputed(RequestEvent, frozen=True, kw_only=True, tag="recomputed"):
    """Consumer's scheduler: the prompt is computed here.

    Attributes:
        reason: as the metric `local_recomputes` has it.
        lease: where the params could be read.
    """

    reason: Text
    lease: LeaseName | None = None


class LoadOrdered(RequestEvent, frozen=True, kw_only=True, tag="load_ordered"):
    """Consumer's scheduler: the prompt has blocks, and the order to fill them goes to the workers."""

    first_token: Address
    stop_token: Address


class LoadReported(RequestEvent, frozen=True, kw_only=True, tag="load_reported"):
    """Consumer's scheduler: every worker has reported; the request may be scheduled, or its load has failed."""

    good: bool


class DecodeScheduled(RequestEvent, frozen=True, kw_only=True, tag="decode_scheduled"):
    """Consumer's scheduler: the first step that has the request in it; the step's token is the answer's first."""


class Finished(RequestEvent, frozen=True, kw_only=True, tag="finished"):
    """Consumer's scheduler: the request has ended, for whatever reason."""


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a load."""

    stage: Text
    begun_ns: Nanoseconds
    ended_ns: Nanoseconds


class LoadEnded(RequestEvent, frozen=True, kw_only=True, tag="load_ended"):
    """Consumer's worker: a load is over.

    Attributes:
        reason: why it failed; empty for a good one.
        stages: in their order; of a failed load the last one is that in which it failed.
        relayout_ns: spent on putting staged bytes in place.
    """

    producer: Text
    stages: tuple[StageSpan, ...]
    reason: str = ""
    bytes: Count = 0
    descriptors: Count = 0
    staged_bytes: Count = 0
    relayout_ns: Nanoseconds = 0


AnyEvent = (
    ProcessStarted
    | Dropped
    | PrefillArrived
    | PrefillScheduled
    | ParamsGiven
    | LeaseOver
    | DecodeArrived
    | Recomputed
    | LoadOrdered
    | LoadReported
    | DecodeScheduled
    | Finished
    | LoadEnded
)
