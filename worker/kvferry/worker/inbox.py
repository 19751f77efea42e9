"""What the transfer thread can be told: all messages of its inbox."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.protocol.orders import OrdersHead
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.entry_buffers import EntriesSnapshot
from kvferry.worker.fabric.port import OpenHandles
from kvferry.worker.fabric.reads import Handle
from kvferry.worker.leases import LeaseTableSnapshot
from kvferry.worker.loads.record import LoadRecord
from kvferry.worker.loads.results import StepResults
from kvferry.worker.loads.state import LoadState
from kvferry.worker.peers.registry import PeerRegistrySnapshot
from kvferry.worker.staging.pool import PoolSnapshot, Wave


class Signal(enum.Enum):
    """A message without content."""

    WAKE = "wake"
    """There may be work that no message brings, such as the answer of a handshake."""
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class StepOrdered:
    """A step's orders.

    Attributes:
        frame: all of the orders, encoded: decoding takes time that the step thread has not got.
        mark: reached when the device has finished everything that was launched before the orders.
        arrived_s: when the worker had them, on the monotonic clock.
    """

    head: OrdersHead
    frame: bytes
    mark: DeviceMark
    arrived_s: float


@dataclass(frozen=True, slots=True)
class StepLaunched:
    """The step of the orders before has been launched on the device.

    Attributes:
        mark: reached when that step has finished.
    """

    mark: DeviceMark


@dataclass(frozen=True, slots=True)
class Holder:
    """What a load that has begun, a poll of slots or a first read has taken and must give back.

    Attributes:
        request_id, state: of a load; None of the others.
        entries, pages: for its reads of slots, and of block ids.
        transfers: number of its reads that the fabric has not taken back.
    """

    request_id: str | None
    state: LoadState | None
    entries: tuple[int, ...]
    pages: tuple[int, ...]
    waves: tuple[Wave, ...]
    transfers: int


@dataclass(frozen=True, slots=True)
class ThreadSnapshot:
    """The state of a transfer thread between two of its turns.

    Attributes:
        is_idle: nothing is left to do but what is due at long intervals.
        loads: by state the number of loads that are not over.
        begun: the records so far of those that have begun.
        untaken: what the next report to the engine has.
        peers: the producers that are known.
        leases: those that have not ended.
        holders: loads that have begun, polls of slots, first reads, each with what it has taken.
        first_reads: first contacts whose reads have not ended.
        agents, lists: of peers, numbers of those that the fabric was given and has not taken back.
        entries, pages: the memory for reads of slots, and of block ids.
        pool: the staging pool; None without one.
        refused: handles that the fabric has not taken back yet.
        handles: that the fabric has.
    """

    is_idle: bool
    loads: dict[LoadState, int]
    begun: tuple[LoadRecord, ...]
    untaken: StepResults
    peers: PeerRegistrySnapshot
    leases: LeaseTableSnapshot
    holders: tuple[Holder, ...]
    first_reads: int
    agents: int
    lists: int
    entries: EntriesSnapshot
    pages: EntriesSnapshot
    pool: PoolSnapshot | None
    refused: tuple[Handle, ...]
    handles: OpenHandles


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Answer with a snapshot. Only the transfer thread can take one: what it owns has no lock."""

    answer: Future[ThreadSnapshot]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Fail all loads, read nothing more, and end the thread as soon as nothing can write into the worker's memory.

    Attributes:
        deadline_s: on the monotonic clock; from then on the thread goes on instead.
        answer: None once the thread is about to end; `WithdrawalRefused` if it goes on. If it was cancelled before, the
            thread goes on.
    """

    deadline_s: float
    answer: Future[None]


Message: TypeAlias = Signal | StepOrdered | StepLaunched | TakeSnapshot | Withdraw
