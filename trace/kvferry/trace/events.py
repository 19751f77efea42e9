"""Recorded events: one line of JSON each, in one file per process.

A file begins with a `ProcessStarted`, which names its process; every other line is an event of that process. Times are
nanoseconds since the epoch by the clock of its host: a process that measures with a monotonic clock converts.

Records of two engines are joined by the lease: the producer's boot and the lease's epoch, which both sides know.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import Address, Count, Hex128, HexEpoch, Text

# Raised by a change that an older `kvferry trace` would misread: it leaves such files out and says so.
TRACE_VERSION = 1

MOST_CHUNKS = 64
"""Reads of a load that are recorded one by one."""

Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Longer than other names: clients choose request ids, and vLLM accepts them.
RequestName = Annotated[str, Meta(min_length=1, max_length=4096)]


class Phase(str, enum.Enum):
    """A phase of a handover, also the stages of a worker's load; `HANDOVER` is the whole, after the prefill.

    Attributes:
        value: its name in files and in JSON.
        meaning: a short description.
        label: its name in tables and pictures, as in JSON unless it is given.
    """

    label: str
    meaning: str

    def __new__(cls, value: str, meaning: str, label: str = "") -> Phase:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        member.label = label or value.replace("_", " ")
        return member

    PREFILL_QUEUE = "prefill_queue", "the producer has no room or no step for it yet"
    PREFILL = "prefill", "the producer computes the prompt"
    PREFILL_STEP = (
        "prefill_step",
        "the producer computes a part of a prompt that is read meanwhile",
    )
    HANDOVER = "handover", "from the prompt's end until it is loaded, or computed here"
    ROUTER = "router", "from the producer's answer to the consumer, by the router"
    PREFIX_QUERY = (
        "prefix_query",
        "engines are asked whether they have the prompt's first part",
    )
    DECODE_QUEUE = "decode_queue", "the consumer has no blocks or no step for it yet"
    ORDER = "order", "the order to load goes to the workers"
    LOAD = "load", "the workers load; their stages are not recorded"
    QUEUED = "queued", "the worker has other loads to do first", "load queued"
    CONNECTING = (
        "connecting",
        "first contact with the producer, or the device is not done",
    )
    FENCE = "fence", "the producer's worker is not ready"
    POSTING = "posting", "reads are prepared and posted"
    READING = "reading", "bytes are under way"
    CHUNK_READ = "chunk_read", "the part of the prompt that is complete is read"
    FENCE_AGAIN = "fence_again", "check that the lease was still valid", "second fence"
    REPORT = "report", "some workers have not reported to the scheduler yet"
    FIRST_STEP = "first_step", "loaded, and not scheduled yet"
    HELD = "held", "the producer keeps the blocks"


class ProcessRole(enum.Enum):
    """The part of an engine that a process runs."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Event(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"
):
    """Base of all recorded events.

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
    part: ProcessRole
    engine_id: Text
    boot: str
    host: Text
    pid: Count
    place: str = ""


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    """`count` events of this process could not be written since the previous line."""

    count: Count


class TracedLease(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a lease, known to both engines."""

    boot: Hex128
    epoch: HexEpoch

    def __str__(self) -> str:
        return f"{self.boot}/{self.epoch}"


class RequestEvent(Event, frozen=True, kw_only=True):
    """An event of a request of this engine.

    Attributes:
        request: its id in this engine.
    """

    request: RequestName


class PrefillArrived(RequestEvent, frozen=True, kw_only=True, tag="prefill_arrived"):
    """Producer's scheduler: a prompt is to be decoded elsewhere.

    Attributes:
        traceparent: of the client's or the router's span, as W3C writes it, where the engine traces.
    """

    tokens: Count
    traceparent: str = ""


class PrefillScheduled(
    RequestEvent, frozen=True, kw_only=True, tag="prefill_scheduled"
):
    """Producer's scheduler: the prompt has blocks and a lease."""

    lease: TracedLease


class PrefillStep(Event, frozen=True, kw_only=True, tag="prefill_step"):
    """Producer's scheduler: a step computes a part of a prompt that is read meanwhile.

    Attributes:
        tokens: leading tokens of the prompt that are complete after it.
    """

    lease: TracedLease
    tokens: Count


class ParamsGiven(RequestEvent, frozen=True, kw_only=True, tag="params_given"):
    """Producer's scheduler: the prompt is computed, its answer carries params."""

    lease: TracedLease
    tokens: Count


class LeaseOver(RequestEvent, frozen=True, kw_only=True, tag="lease_over"):
    """Producer's scheduler: the lease has ended and its blocks are freed.

    Attributes:
        how: the label of the metric `leases_released`.
    """

    lease: TracedLease
    how: Text


class DecodeArrived(RequestEvent, frozen=True, kw_only=True, tag="decode_arrived"):
    """Consumer's scheduler: a prompt with usable params.

    Attributes:
        remote_request: its id in the producer.
        is_early: whether the producer gave them before it had computed the prompt.
        traceparent: of the client's or the router's span, as W3C writes it, where the engine traces.
    """

    lease: TracedLease
    producer: Text
    remote_request: RequestName
    tokens: Count
    is_early: bool = False
    traceparent: str = ""


class Recomputed(RequestEvent, frozen=True, kw_only=True, tag="recomputed"):
    """Consumer's scheduler: the prompt is computed here.

    Attributes:
        reason: the label of the metric `local_recomputes`.
        lease: its name, where the params could be read.
    """

    reason: Text
    lease: TracedLease | None = None


class PrefixAsked(RequestEvent, frozen=True, kw_only=True, tag="prefix_asked"):
    """Consumer's scheduler: engines are asked for the first part of a prompt. A `DecodeArrived` tells what one has.

    Attributes:
        tokens: the most that they can have.
        sources: the number of engines.
    """

    tokens: Count
    sources: Count


class PrefixNotPulled(RequestEvent, frozen=True, kw_only=True, tag="prefix_not_pulled"):
    """Consumer's scheduler: no part of a prompt is read from an engine that may have it.

    Attributes:
        reason: the label of the metric `prefixes_not_pulled`.
    """

    reason: Text


class LoadOrdered(RequestEvent, frozen=True, kw_only=True, tag="load_ordered"):
    """Consumer's scheduler: the prompt has blocks, and the order to fill them goes to the workers."""

    first_token: Address
    stop_token: Address


class LoadReported(RequestEvent, frozen=True, kw_only=True, tag="load_reported"):
    """Consumer's scheduler: every worker has reported; the request may be scheduled, or its load has failed."""

    good: bool


class DecodeScheduled(RequestEvent, frozen=True, kw_only=True, tag="decode_scheduled"):
    """Consumer's scheduler: the first step with the request; its token is the first of the answer."""


class Finished(RequestEvent, frozen=True, kw_only=True, tag="finished"):
    """Consumer's scheduler: the request has ended, for any reason."""


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a load."""

    stage: Phase
    begun_ns: Nanoseconds
    ended_ns: Nanoseconds


class ChunkSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A read of a load that followed the prefill.

    Attributes:
        stop_token: the token up to which it went.
    """

    stop_token: Address
    begun_ns: Nanoseconds
    ended_ns: Nanoseconds


class LoadEnded(RequestEvent, frozen=True, kw_only=True, tag="load_ended"):
    """Consumer's worker: a load has ended.

    Attributes:
        reason: the reason of its failure; empty for a good load.
        stages: in order; a failed load failed in the last one.
        mapped_bytes: the part of the bytes that was copied from the producer's mapped memory.
        relayout_ns: time to put staged bytes in place.
        early_bytes: the part of the bytes that was read before the prefill had ended.
        restarts: times that it began anew, since the prefill was preempted.
        chunks: its reads, if it followed the prefill.
    """

    producer: Text
    stages: tuple[StageSpan, ...]
    reason: str = ""
    bytes: Count = 0
    descriptors: Count = 0
    staged_bytes: Count = 0
    mapped_bytes: Count = 0
    relayout_ns: Nanoseconds = 0
    early_bytes: Count = 0
    restarts: Count = 0
    chunks: Annotated[tuple[ChunkSpan, ...], Meta(max_length=MOST_CHUNKS)] = ()

    @property
    def begun_ns(self) -> int:
        """When the worker received the order."""
        if not self.stages:
            return self.at_ns
        return self.stages[0].begun_ns

    @property
    def ended_ns(self) -> int:
        """When the load ended."""
        if not self.stages:
            return self.at_ns
        return self.stages[-1].ended_ns


AnyEvent = (
    ProcessStarted
    | Dropped
    | PrefillArrived
    | PrefillScheduled
    | PrefillStep
    | ParamsGiven
    | LeaseOver
    | DecodeArrived
    | Recomputed
    | PrefixAsked
    | PrefixNotPulled
    | LoadOrdered
    | LoadReported
    | DecodeScheduled
    | Finished
    | LoadEnded
)
