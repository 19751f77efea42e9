"""Messages between a command and its child processes, msgpack over a pipe.

    command          owner        command          reader
    Task          →               Task{offer}   →
                  ←  Offer                      ←  CaseProgress … Measured
    (the pipe ends: it ends)

A child may send `Failed` at any time.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.ids import Address, Text

MIN_BYTES = 4 << 10
MAX_BYTES = 1 << 30

Metadata = Annotated[bytes, Meta(min_length=1, max_length=128 << 10)]
Length = Annotated[int, Meta(ge=MIN_BYTES, le=MAX_BYTES)]
Kind = Literal["DRAM", "VRAM"]
Device = Literal["auto", "cpu", "cuda"]


class ReadsFailed(KvferryError):
    """The reads could not be made; the text says why.

    Args:
        late: only a deadline was missed.
    """

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="bench offer"):
    """An owner's agent, and its memory: `length` bytes, which are `process.content(seed, length)`."""

    host: Text
    agent_metadata: Metadata
    kind: Kind
    address: Address
    length: Length
    seed: Annotated[int, Meta(ge=0, lt=2**62)]


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task"):
    """To a child.

    Attributes:
        max_bytes: of its memory.
        seconds: to measure a case.
        timeout_s: of a read.
        is_short: only the smallest and the largest reads.
        offer: what a reader reads; None for an owner.
    """

    device: Device
    max_bytes: Length
    seconds: float = 0.0
    timeout_s: float = 0.0
    is_short: bool = False
    offer: Offer | None = None


class CaseProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """From a reader, several times a second: what it is doing."""

    what: str


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case.

    Attributes:
        num_bytes, descriptors: of one read.
        reads: timed ones.
        p50_us, p99_us: from just before the post until the poll that finds it done.
        checked, wrong: bytes of all reads, those of the warm-up too.
        first_wrong: offset, or -1.
        gb_s: GB/s of the median read.
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
    gb_s: float


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """From a reader: all results, as `kvferry bench --json` prints them.

    Attributes:
        listener: the owner's host.
        transports: as UCX names them; the command adds them.
        first_contact_ms: from the start until the end of the first, smallest read.
    """

    listener: str
    transports: str = ""
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


Message = Task | Offer | CaseProgress | Measured | Failed

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(pipe: Connection, message: Message) -> None:
    """Send one message; raises `OSError` when the other end is gone."""
    pipe.send_bytes(msgspec.msgpack.encode(message))


def receive(pipe: Connection) -> Message:
    """Wait for the next message; raises `OSError` or `EOFError` when the other end is gone."""
    return _decoder.decode(pipe.recv_bytes())
