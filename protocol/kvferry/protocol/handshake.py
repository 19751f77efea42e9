"""The side channel: the messages of two engines before and beside the RDMA reads.

One ZMQ ROUTER socket per producing engine answers; each frame is one msgpack map with a `type`. The envelope is that
of a REQ socket: an empty frame, then the message. Any message may be answered by `Refused`: it is too long, or none of
the protocol's.

Handshake: every worker of a consumer, before its first read from a boot of a producer.

    consumer's worker                                                 producer's scheduler
    Hello{version, engine_id, client_id, queries_prompts,
          connects, at} ────────────────────────────────────────────►
        ◄────── EngineDescription{version, engine_id, boot, mac_key, facts, topology, groups,
                                  generation,
                                  workers: [WorkerDescription{place, agent, agent_metadata, lease_table,
                                                              tensors, stream_rows, …}]}
     or ◄────── DescriptionPart{total_bytes, digest, at, data}        the description is a long one
     or ◄────── Refused{version, field, value, expected}              other version or engine; starting or asleep

Handshake in parts: as many exchanges as the description needs, on one connection.

    consumer's worker                                                 producer's scheduler
    Hello{at: 0, …} ────────────────────────────────────────────────►
        ◄────── DescriptionPart{total_bytes, digest, at: 0, data}     or the whole of a short one, or a refusal
    Hello{at: 262144, …} ───────────────────────────────────────────►
        ◄────── DescriptionPart{total_bytes, digest, at: 262144, data}
    … until `total_bytes` have come; another `digest` means that the description has changed, and the handshake fails

A description of 64 MiB is allowed, but a connection that may bring 64 MiB may bring as many bytes of empty frames,
which are 2.3 GB in ZMQ's memory: six handshakes took 5 GB. In parts they take 140 MB.

Renewal: a consumer's scheduler, from the moment that a request has come with a ticket, every sixth of `lease_s`. A
lease without one expires.

    consumer's scheduler                                              producer's scheduler
    Renew{boot, leases: [LeaseName{slot, epoch}]} ──────────────────► all of this boot at once; no answer

Release: a consumer's scheduler, for leases that it will not read, or not any more.

    consumer's scheduler                                              producer's scheduler
    Release{boot, leases: [LeaseName{slot, epoch}]} ────────────────► clears the slots, frees the blocks; no answer

The queries are in `kvferry.protocol.queries`.

Evolution rules: a new field needs a default; a field is never retyped or reused; unknown fields are ignored; a new
message type is only sent to peers that have announced it; anything else raises `CHANNEL_VERSION`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import MAX_TENSORS, PagedTensor, Place, Topology
from kvferry.protocol.hosts import host_port
from kvferry.protocol.ids import (
    MAX_GROUPS,
    MAX_WORKERS,
    Address,
    Count,
    Hex128,
    HexEpoch,
    Positive,
    SlotIndex,
    Text,
)
from kvferry.protocol.params import MAC_KEY_BYTES
from kvferry.protocol.queries import Answers, FindPrefixes, Subscribe, Unsubscribe
from kvferry.protocol.slots import StreamRows

CHANNEL_VERSION = 3
MAX_REQUEST_BYTES = 256 << 10
MAX_REPLY_BYTES = 64 << 20
# ZMQ keeps the frames of a message until its last, and takes 32 times the bytes of empty ones. So a client takes no
# long message from an engine that it may not know (`PartsReceived`).
MAX_PART_BYTES = 256 << 10
MAX_PART_FRAME_BYTES = MAX_PART_BYTES + 1024
MAX_RENEWALS = 4096
# Clients choose which engine's description is read, and reading takes some 40 µs a tensor.
MAX_ENGINE_TENSORS = 1 << 16
"""Most paged tensors of all workers of an engine together."""

MAX_ALLOCATIONS = 256
"""Most allocations of one worker. Who maps them has a file descriptor for each, and proves each by a read."""

MAX_SETTINGS = 2048
"""Most settings of a model. A model has some 30, one with vision and audio some 200."""

UNKNOWN_ENGINE = "?"
"""The id in a request to an engine of unknown id, which any engine answers."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A request for the engine's description.

    Attributes:
        version: of the side channel.
        engine_id: the engine that the client expects at this address, or `?` for any.
        client_id: engine id of the sender, for the receiver's log.
        queries_prompts: whether the sender queries prompts that are named without a ticket.
        connects: whether the sender connects to the agents that are described, and keeps this connection of the side
            channel until it has done so or given up. An agent that closes meanwhile could end the sender's process.
        at: for a sender that takes a long description in parts, the first byte of the next; None if it takes none.
    """

    version: Positive = CHANNEL_VERSION
    engine_id: Text
    # It has a default because version 2 had another name for it: so its hello is refused by its version, which tells an
    # operator what to do, and not for lack of this field.
    client_id: Text = UNKNOWN_ENGINE
    queries_prompts: bool = False
    connects: bool = False
    at: Annotated[int, Meta(ge=0, lt=MAX_REPLY_BYTES)] | None = None


class LeaseName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of one lease.

    Attributes:
        slot: index into the lease table.
        epoch: the proof: it is random, and only the ticket contains it.
    """

    slot: SlotIndex
    epoch: HexEpoch


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """The sender still needs these leases: the full time of each starts again.

    Attributes:
        boot: the producer's, from the ticket.
        leases: all leases of this boot that the sender waits for.
    """

    boot: Hex128
    leases: Annotated[
        tuple[LeaseName, ...], Meta(min_length=1, max_length=MAX_RENEWALS)
    ]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """The sender does not need these leases any more, and no read uses them.

    Attributes:
        boot: the producer's, from the ticket.
        leases: the leases to end.
    """

    boot: Hex128
    leases: Annotated[
        tuple[LeaseName, ...], Meta(min_length=1, max_length=MAX_RENEWALS)
    ]


Request = Hello | Renew | Release | Subscribe | FindPrefixes | Unsubscribe


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that changes the values of keys and values, e.g. `config.rope_parameters.rope_theta`.

    Attributes:
        name: where it is set, with dots between the levels.
        value: as canonical JSON; of a long one its beginning and a digest.
    """

    name: Text
    value: Text


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that must be equal on both sides for the cache's bytes to mean the same.

    Attributes:
        model: its name as served; for information, not compared.
        fingerprint: digest of the weights' headers and samples, or a name set by an operator instead.
        dtype: of the activations.
        cache_dtype: of the cache, as configured; not compared, since every tensor has its format.
        quantization: of the weights.
        max_model_tokens: the longest sequence; not compared. Where it changes values, there is a setting.
        speculative: the draft method if its drafter has a cache, or `none`.
        settings: what else the engine runs with and what changes values, by name.
    """

    model: Text
    fingerprint: Text
    dtype: Text
    cache_dtype: Text
    quantization: Text
    max_model_tokens: Positive
    # Drafters without a cache (n-grams, suffixes) change no byte of it. When they were compared, such engines were
    # refused beside producers without one.
    speculative: Text = "none"
    # One by one and with their names, so that a refusal says which one differs. Only `config.json` was part of the
    # fingerprint at first: engines that differed in what vLLM decides by its options passed, and every answer was
    # wrong.
    settings: Annotated[tuple[Setting, ...], Meta(max_length=MAX_SETTINGS)] = ()


class LeaseTableAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a worker's lease slots: host memory, `slots` times 16 bytes (`kvferry.protocol.slots`).

    Attributes:
        address: of the first slot.
        slots: number of slots.
    """

    address: Address
    slots: Annotated[int, Meta(ge=1, lt=2**24)]


class SharedAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation: a sealed memory file of the worker's process (memfd).

    Attributes:
        address: of its first byte in the worker's process; the addresses of tensors and of the lease table count so.
        num_bytes: size of the file. Its last 16 bytes are random: what is read there over NIXL, and through a map, must
            be the same.
        fd: number of the file descriptor in the worker's process.
        name: of the file, new for each: a number that the process has used again is not mistaken for it.
    """

    address: Address
    num_bytes: Positive
    fd: Annotated[int, Meta(ge=0, lt=2**31)]
    name: Hex128


class DeviceAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a device, which others open with CUDA IPC: a part of one allocation of the driver's.

    An allocator that caches, such as PyTorch's, gives out parts of what it has from the driver, and a handle is of the
    whole.

    Attributes:
        address: of its first byte in the worker's process; the addresses of tensors count so.
        num_bytes: its size.
        offset: of its first byte in the driver's allocation.
        allocation_bytes: size of the driver's allocation.
        handle: that the driver opens it by.
        generation: the driver's number of the allocation; another one at the same address has another number.
        device: UUID of the device. Its number differs from process to process, with `CUDA_VISIBLE_DEVICES`.
    """

    address: Address
    num_bytes: Positive
    offset: Address
    allocation_bytes: Positive
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    generation: Address
    device: Hex128


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a worker that other processes of its host can map, and need not read over NIXL.

    Attributes:
        machine: the boot id of its kernel.
        pid_namespace: in which `pid` counts.
        pid: of the worker's process.
        ipc_namespace: its IPC namespace, in which UCX's shared memory is found; None if it is not known.
        allocations: files: the lease table's, and the caches' if they lie in host memory. All of them, or none.
        why_not: why there are none.
        device_allocations: the caches' if they lie on a device.
        device_proof: a copy of the last 16 bytes of the first file on that device: whoever reads the same there has
            opened memory of this process.
    """

    machine: Text
    pid_namespace: Text
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    allocations: Annotated[
        tuple[SharedAllocation, ...], Meta(max_length=MAX_ALLOCATIONS)
    ] = ()
    why_not: Text | None = None
    ipc_namespace: Text | None = None
    device_allocations: Annotated[
        tuple[DeviceAllocation, ...], Meta(max_length=MAX_ALLOCATIONS)
    ] = ()
    device_proof: DeviceAllocation | None = None


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of an engine: its place, its memory and its NIXL agent.

    Attributes:
        place: among the ranks of its engine.
        agent: name of its NIXL agent.
        agent_metadata: NIXL's serialised metadata of that agent.
        memory: `DRAM` or `VRAM`, where the caches are.
        device: the device's index in NIXL's counting, 0 for DRAM.
        lease_table: its lease slots.
        tensors: all paged tensors of its caches.
        stream_rows: its rows; None if its prompts can only be read when they are complete.
        shared: what processes of its host can map; None if they shall not.
    """

    place: Place
    agent: Text
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 20)]
    memory: Text
    device: Annotated[int, Meta(ge=0, lt=2**16)]
    lease_table: LeaseTableAddress
    tensors: Annotated[tuple[PagedTensor, ...], Meta(max_length=MAX_TENSORS)]
    stream_rows: StreamRows | None = None
    shared: SharedMemory | None = None


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A cache group: layers that share one block table.

    Attributes:
        policy: `full` if it holds every token, `whole` if every token and each depends on all of the prompt, `window`
            if only the last ones, `chunk` if only those of the last chunk, `state` if its last block is a recurrent
            state of the whole sequence.
        block_tokens: local slots per scheduler block (the unit of `remote_block_ids`); for `state` the tokens
            per block of its table, up to those of the longest sequence.
        window_tokens: length of the window or chunk, 0 without one.
    """

    policy: Text
    block_tokens: Positive
    window_tokens: Annotated[int, Meta(ge=0, lt=2**40)] = 0

    @property
    def holds_every_token(self) -> bool:
        """Whether a prompt's cache is complete token by token; all others are complete at the prompt's end only."""
        return self.policy == "full"


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """The answer to `Hello`: everything that a consumer needs to plan and to read.

    Its size grows with workers × paged tensors, never with blocks.

    Attributes:
        version: of the side channel.
        engine_id: the answering engine, which may differ from the one in `Hello`.
        boot: of its present registered memory: another one whenever the engine starts, and after each sleep.
        mac_key: key to check the mac of this boot's tickets.
        facts: model facts that must be equal on both sides.
        topology: its parallel sizes.
        groups: its cache groups, in the order of `remote_block_ids`.
        workers: all of them.
        generation: how often its memory was registered again since it started, for people.
    """

    version: Positive = CHANNEL_VERSION
    engine_id: Text
    boot: Hex128
    mac_key: Annotated[bytes, Meta(min_length=MAC_KEY_BYTES, max_length=MAC_KEY_BYTES)]
    facts: ModelFacts
    topology: Topology
    groups: Annotated[tuple[CacheGroup, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    workers: Annotated[
        tuple[WorkerDescription, ...], Meta(min_length=1, max_length=MAX_WORKERS)
    ]
    generation: Count = 0


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The answer to a request that cannot be answered.

    Attributes:
        version: of the side channel.
        field: the refused field.
        value: its value.
        expected: description of a valid value.
    """

    version: Positive = CHANNEL_VERSION
    field: Text
    value: Annotated[str, Meta(max_length=512)]
    expected: Annotated[str, Meta(max_length=512)]


class DescriptionPart(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """The answer to `Hello` with an `at`, where the description is longer than `MAX_PART_BYTES`.

    Attributes:
        total_bytes: of the description's frame.
        digest: BLAKE2b of that frame, 16 bytes: the parts are of one description.
        at: the first byte of this part.
        data: as many bytes as there are, `MAX_PART_BYTES` at most.
    """

    total_bytes: Annotated[int, Meta(ge=1, le=MAX_REPLY_BYTES)]
    digest: Hex128
    at: Annotated[int, Meta(ge=0, lt=MAX_REPLY_BYTES)]
    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_PART_BYTES)]


Reply = EngineDescription | Refused


class UnreadDescription(EngineDescription, frozen=True, kw_only=True, tag="engine"):
    """A description whose workers are not decoded."""

    workers: Annotated[
        tuple[msgspec.Raw, ...], Meta(min_length=1, max_length=MAX_WORKERS)
    ]  # type: ignore[assignment]


_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_MAX_REFUSED_BYTES = 8 << 10

_refusals: msgspec.msgpack.Decoder[Refused] = msgspec.msgpack.Decoder(Refused)
_replies: msgspec.msgpack.Decoder[UnreadDescription | Refused] = (
    msgspec.msgpack.Decoder(UnreadDescription | Refused)
)
_workers: msgspec.msgpack.Decoder[WorkerDescription] = msgspec.msgpack.Decoder(
    WorkerDescription
)
_encoder = msgspec.msgpack.Encoder()


def zmq_address(host: str, port: int) -> str:
    """The ZMQ address of a host and port; IPv6 addresses get brackets."""
    return f"tcp://{host_port(host, port)}"


def encode(
    message: Request | Reply | DescriptionPart | WorkerDescription | Answers,
) -> bytes:
    """Any message of the side channel as one frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """Decode a frame that a listener received.

    Raises:
        InvalidMessage: it is none of the protocol's, or too long.
    """
    return decode(frame, _requests, MAX_REQUEST_BYTES, InvalidMessage)


def is_refused(frame: bytes) -> bool:
    """True if a listener has refused a message."""
    try:
        decode(frame, _refusals, _MAX_REFUSED_BYTES, InvalidMessage)
    except InvalidMessage:
        return False
    return True


def decode_reply(frame: bytes) -> Reply:
    """Decode a frame that a listener answered.

    Raises:
        InvalidMessage: it is none of the protocol's, too long, or has too many tensors.
    """
    reply = decode_without_workers(frame)
    if isinstance(reply, Refused):
        return reply
    return _with_workers(reply)


def decode_without_workers(frame: bytes) -> UnreadDescription | Refused:
    """As `decode_reply`, for callers that need no worker: workers take most of its time.

    Raises:
        InvalidMessage: it is none of the protocol's, or too long.
    """
    reply = decode(frame, _replies, MAX_REPLY_BYTES, InvalidMessage)
    if reply.version != CHANNEL_VERSION:
        raise InvalidMessage("version", reply.version, str(CHANNEL_VERSION))
    return reply


def decode_worker(frame: bytes) -> WorkerDescription:
    """Decode the description that a worker gave to its own scheduler.

    Raises:
        InvalidMessage: it is none, or too long.
    """
    return decode(frame, _workers, MAX_REPLY_BYTES, InvalidMessage)


def _with_workers(unread: UnreadDescription) -> EngineDescription:
    # Workers are decoded one by one: a decoder holds the interpreter's lock while it runs, which stops the engine. A
    # description of 4,096 tensors takes 0.15 s.
    workers: list[WorkerDescription] = []
    num_tensors = 0
    for index, encoded in enumerate(unread.workers):
        where = f"workers[{index}]"
        worker = decode(
            bytes(encoded), _workers, MAX_REPLY_BYTES, InvalidMessage, where=where
        )
        workers.append(worker)
        num_tensors += len(worker.tensors)
        if num_tensors > MAX_ENGINE_TENSORS:
            sent = f"more than {num_tensors - 1}"
            expected = f"at most {MAX_ENGINE_TENSORS} in all"
            raise InvalidMessage("workers.tensors", sent, expected)
    fields = msgspec.structs.asdict(unread)
    fields["workers"] = tuple(workers)
    return EngineDescription(**fields)


# A long description in parts.


_answers: msgspec.msgpack.Decoder[UnreadDescription | Refused | DescriptionPart] = (
    msgspec.msgpack.Decoder(UnreadDescription | Refused | DescriptionPart)
)


class PartsSent:
    """The frame of a description, and the parts of it that answer a `Hello`."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self._digest = _digest_of(frame)

    def answer(self, at: int | None) -> bytes:
        """The frame that answers a `Hello` with this `at`.

        Returns:
            A part; the whole description for a client that takes no parts, and where it is short enough to be one.

        Raises:
            InvalidMessage: there is no such part.
        """
        if at is None:
            return self.frame
        total_bytes = len(self.frame)
        if at == 0 and total_bytes <= MAX_PART_BYTES:
            return self.frame
        if at >= total_bytes:
            raise InvalidMessage("at", at, f"less than {total_bytes}")
        part = DescriptionPart(
            total_bytes=total_bytes,
            digest=self._digest,
            at=at,
            data=self.frame[at : at + MAX_PART_BYTES],
        )
        return encode(part)


class PartsReceived:
    """The frames that answer a `Hello`, put together."""

    def __init__(self) -> None:
        self._first: DescriptionPart | None = None
        self._parts: list[bytes] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that have come, so the next `at`."""
        return sum(map(len, self._parts))

    def take(self, frame: bytes) -> bytes | None:
        """The whole answer; None if more parts are to come.

        Raises:
            InvalidMessage: it is no answer, or not the part that comes next.
        """
        answer = decode(frame, _answers, MAX_PART_FRAME_BYTES, InvalidMessage)
        if isinstance(answer, DescriptionPart):
            return self._take_part(answer)
        # A short description or a refusal is the whole answer, but only in place of the first part.
        if self._first is not None:
            raise InvalidMessage(
                "type", "another answer", "the next part of the description"
            )
        return frame

    def _take_part(self, part: DescriptionPart) -> bytes | None:
        self._check(part)
        self._parts.append(part.data)
        if self.num_bytes < part.total_bytes:
            return None
        frame = b"".join(self._parts)
        if _digest_of(frame) != part.digest:
            raise InvalidMessage("digest", part.digest, "the digest of what has come")
        return frame

    def _check(self, part: DescriptionPart) -> None:
        if self._first is None:
            self._first = part
        first = self._first
        # The engine may have restarted between two parts, and have another description.
        if (part.total_bytes, part.digest) != (first.total_bytes, first.digest):
            expected = f"{first.digest}: a part of the same description"
            raise InvalidMessage("digest", part.digest, expected)
        start = self.num_bytes
        num_expected = min(MAX_PART_BYTES, part.total_bytes - start)
        if part.at != start or len(part.data) != num_expected:
            sent = f"{len(part.data)} bytes at {part.at}"
            raise InvalidMessage("data", sent, f"{num_expected} bytes at {start}")


def _digest_of(frame: bytes) -> str:
    return hashlib.blake2b(frame, digest_size=16).hexdigest()
