"""Messages between listener and client of `kvferry bench`, and between each of them and its child.

Between machines: msgpack, one frame each way over the side channel's sockets (`kvferry.protocol.side_channel.sockets`).

    client                       listener
    Join{session, metadata}  →
                             ←   Offer | Refused
    Alive{session}           →                     every few seconds, or the session ends
                             ←   Noted | Refused
    Leave{session, wrong}    →
                             ←   Noted | Refused

Between a process and its child: these types and those below, as JSON lines.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage, KvferryError
from kvferry.protocol.handshake import Refused
from kvferry.protocol.ids import Address, Count, Hex128, Positive, Text

VERSION = 1
MIN_BYTES = 4 << 10
MAX_BYTES = 1 << 30
MAX_FRAME_BYTES = 160 << 10

Metadata = Annotated[bytes, Meta(min_length=1, max_length=128 << 10)]
Length = Annotated[int, Meta(ge=MIN_BYTES, le=MAX_BYTES)]
Reason = Annotated[str, Meta(max_length=512, pattern=r"\A[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z")]
Kind = Literal["DRAM", "VRAM"]
Device = Literal["auto", "cpu", "cuda"]

CHECK = "check the port, firewalls between, UCX_NET_DEVICES and `kvferry doctor` on both machines"


class BenchFailed(KvferryError):
    """The benchmark could not be run; the text says why and what to check."""


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="bench join"):
    """A client wants to read. `session` is a random id of this client; the metadata is its NIXL agent's."""

    version: Positive = VERSION
    session: Hex128
    host: Text
    agent_metadata: Metadata


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="bench alive"):
    """The session goes on."""

    session: Hex128


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="bench leave"):
    """The session is over. `wrong`: number of wrong bytes. `complete`: all cases were measured."""

    session: Hex128
    wrong: Count
    complete: bool


class OfferedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that may be read: `length` bytes, which are `kvferry.cli.bench.cases.content(seed, length)`."""

    kind: Kind
    address: Address
    length: Length
    seed: Annotated[int, Meta(ge=0, lt=2**62)]


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="bench offer"):
    """The memory to read. `no_cuda`: why there is no GPU memory, empty if there is some or none was requested."""

    version: Positive = VERSION
    host: Text
    agent_metadata: Metadata
    memories: Annotated[tuple[OfferedMemory, ...], Meta(min_length=1, max_length=2)]
    no_cuda: Reason


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag="bench noted"):
    """Acknowledges `Alive` and `Leave`."""


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task"):
    """To a child: the kind and amount of memory, the time to measure a case, the timeout of a read."""

    device: Device
    max_bytes: Length
    seconds: float = 0.0
    timeout_s: float = 0.0


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """From an owner: the client's agent was added."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """From a reader: it has memory to read into."""

    agent_metadata: Metadata
    no_cuda: Reason


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """From a reader: the case that it works on; `done` of `cases` are finished."""

    what: str
    done: int
    cases: int


class Reads(msgspec.Struct, frozen=True, kw_only=True, tag="reads"):
    """From a reader: the result of one case.

    Attributes:
        num_bytes, descriptors: of one read.
        reads: timed ones. checked, wrong: bytes of all reads, those of the warm-up too. first_wrong: offset, or -1.
        p50_us, p99_us: from just before the post until the poll that finds it done.
    """

    kind: Kind
    num_bytes: int
    descriptors: int
    reads: int
    p50_us: float
    p99_us: float
    checked: int
    wrong: int
    first_wrong: int


class Echoes(msgspec.Struct, frozen=True, kw_only=True, tag="echoes"):
    """From a reader: round trips of notifications."""

    reads: int
    p50_us: float
    p99_us: float


class FirstContact(msgspec.Struct, frozen=True, kw_only=True, tag="first contact"):
    """From a reader: time from the start until the end of the first, smallest read."""

    ms: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """From a child: it cannot continue."""

    reason: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """From a reader: all cases are finished."""


Request = Join | Alive | Leave
Reply = Offer | Noted | Refused
ToChild = Task | Join | Offer
FromChild = Offer | Connected | Ready | Progress | FirstContact | Reads | Echoes | Failed | Done

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """A frame that a listener received. Raises `InvalidMessage`."""
    return decode(frame, _requests, MAX_FRAME_BYTES, InvalidMessage)


def decode_reply(frame: bytes) -> Reply:
    """A reply of a listener. Raises `InvalidMessage`."""
    reply = decode(frame, _replies, MAX_FRAME_BYTES, InvalidMessage)
    if isinstance(reply, (Offer, Refused)) and reply.version != VERSION:
        raise InvalidMessage("version", reply.version, str(VERSION))
    return reply
