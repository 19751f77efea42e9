"""What listener and client of `kvferry bench` say to each other, and what each says to its child.

Between machines: msgpack, one frame each way over the side channel's sockets (`kvferry.protocol.side_channel.sockets`).

    client                       listener
    Join{session, metadata}  →
                             ←   Offer | Refused
    Alive{session}           →                     every few seconds, or the session ends
                             ←   Noted | Refused
    Leave{session, wrong}    →
                             ←   Noted | Refused

Between a process and its child: the same types and those below, JSON, one a line.
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
    """The benchmark could not be made; the text says why and what to check."""


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="bench join"):
    """I want to read. `session` is random and names this client from now on; the metadata is its NIXL agent's."""

    version: Positive = VERSION
    session: Hex128
    host: Text
    agent_metadata: Metadata


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="bench alive"):
    """The session goes on."""

    session: Hex128


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="bench leave"):
    """The session is over; so many bytes were wrong. `complete`: all was measured."""

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
    """What there is to read. `no_cuda`: why there is no GPU memory, empty where there is some or none was wanted."""

    version: Positive = VERSION
    host: Text
    agent_metadata: Metadata
    memories: Annotated[tuple[OfferedMemory, ...], Meta(min_length=1, max_length=2)]
    no_cuda: Reason


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag="bench noted"):
    """Heard."""


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task"):
    """For a child: which memory, how much of it; for how long a case is measured and how long a read may take."""

    device: Device
    max_bytes: Length
    seconds: float = 0.0
    timeout_s: float = 0.0


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """An owner: the client's agent is known."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A reader: what it can read into."""

    agent_metadata: Metadata
    no_cuda: Reason


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A reader: it works on a case, `done` of `cases` are behind it."""

    what: str
    done: int
    cases: int


class Reads(msgspec.Struct, frozen=True, kw_only=True, tag="reads"):
    """A reader: what one case gave.

    Attributes:
        num_bytes, descriptors: of one read.
        reads: timed ones. checked, wrong: bytes of all reads, those of the warm-up too. first_wrong: offset, or -1.
        p50_us, p99_us: from before it is posted until it was seen to be done.
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
    """A reader: notifications that went there and back."""

    reads: int
    p50_us: float
    p99_us: float


class FirstContact(msgspec.Struct, frozen=True, kw_only=True, tag="first contact"):
    """A reader: from nothing to the end of the first, smallest read."""

    ms: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A child: it cannot go on."""

    reason: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """A reader: that was all."""


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
    """A frame that a listener answered. Raises `InvalidMessage`."""
    reply = decode(frame, _replies, MAX_FRAME_BYTES, InvalidMessage)
    if isinstance(reply, (Offer, Refused)) and reply.version != VERSION:
        raise InvalidMessage("version", reply.version, str(VERSION))
    return reply
