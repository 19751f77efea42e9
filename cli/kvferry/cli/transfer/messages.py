"""Messages between a command and its child processes, and those of `kvferry bench` between machines; all msgpack.

    command          each child        command          owner        command          reader
    Task          →                    Connect       →               ReadableAgent         →
                  ←  ReadableAgent                                                         ←  CaseProgress … Measured

`Failed` may come from a child at any time. Between machines, one frame each way over the side channel's sockets:

    client                          listener
    Join{session, metadata}      →
                                 ←  ReadableAgent | Refused
    Alive{session}               →                   every few seconds, or the session ends
                                 ←  Noted | Refused
    Leave{session, wrong}        →
                                 ←  Noted | Refused
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage, KvferryError
from kvferry.protocol.handshake import Refused
from kvferry.protocol.ids import Address, Count, Hex128, Positive, Text

# Of the messages between machines.
VERSION = 1
MIN_BYTES = 4 << 10
MAX_BYTES = 1 << 30
MAX_FRAME_BYTES = 160 << 10

Metadata = Annotated[bytes, Meta(min_length=1, max_length=128 << 10)]
Length = Annotated[int, Meta(ge=MIN_BYTES, le=MAX_BYTES)]
Kind = Literal["DRAM", "VRAM"]
Device = Literal["auto", "cpu", "cuda"]


class ReadsFailed(KvferryError):
    """The reads could not be made; the text says why.

    Args:
        late: only a deadline was missed.
        is_slow: and until then one read after the other ended.
    """

    def __init__(
        self, reason: str, *, late: bool = False, is_slow: bool = False
    ) -> None:
        super().__init__(reason)
        self.late = late
        self.is_slow = is_slow


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task"):
    """To a child: the kind and bytes of memory, the time to measure a case, the timeout of a read, in seconds.

    `is_short`: only the smallest and the largest reads.
    """

    device: Device
    max_bytes: Length
    seconds: float = 0.0
    timeout_s: float = 0.0
    is_short: bool = False


class ReadableAgent(msgspec.Struct, frozen=True, kw_only=True, tag="bench agent"):
    """A child's agent, and memory that may be read: `length` bytes, which are `process.content(seed, length)`."""

    version: Positive = VERSION
    host: Text
    agent_metadata: Metadata
    kind: Kind
    address: Address
    length: Length
    seed: Annotated[int, Meta(ge=0, lt=2**62)]


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """To a child, which becomes an owner: the agent of its reader."""

    agent_metadata: Metadata


class CaseProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """From a reader: the case that it works on."""

    what: str


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case.

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

    @property
    def gb_s(self) -> float:
        """GB/s of the median read."""
        return self.num_bytes / self.p50_us / 1e3


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """From a reader: all results. `first_contact_ms`: from the start until the end of the first, smallest read."""

    first_contact_ms: float
    reads: tuple[CaseResult, ...]

    @property
    def wrong(self) -> int:
        """The number of wrong bytes."""
        return sum(reads.wrong for reads in self.reads)


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """From a child: it cannot continue. `late`: only a deadline was missed."""

    reason: str
    late: bool = False


Message = Task | ReadableAgent | Connect | CaseProgress | Measured | Failed


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


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag="bench noted"):
    """Acknowledges `Alive` and `Leave`."""


Request = Join | Alive | Leave
Reply = ReadableAgent | Noted | Refused

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode_frame(message: Request | Reply) -> bytes:
    """One frame."""
    return msgspec.msgpack.encode(message)


def decode_request(frame: bytes) -> Request:
    """A frame that a listener received.

    Raises:
        InvalidMessage: it is none.
    """
    return decode(frame, _requests, MAX_FRAME_BYTES, InvalidMessage)


def decode_reply(frame: bytes) -> Reply:
    """A reply of a listener.

    Raises:
        InvalidMessage: it is none, or of another version.
    """
    reply = decode(frame, _replies, MAX_FRAME_BYTES, InvalidMessage)
    if isinstance(reply, ReadableAgent) and reply.version != VERSION:
        raise InvalidMessage("version", reply.version, str(VERSION))
    return reply
