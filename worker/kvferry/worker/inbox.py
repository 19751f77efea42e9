"""What the transfer thread can be told: all messages of its inbox."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.protocol.orders import OrdersHead
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.port import OpenHandles
from kvferry.worker.loads.state import LoadState


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
class ThreadSnapshot:
    """The state of a transfer thread between two of its turns.

    Attributes:
        loads: by state the number of loads that are not over.
        first_reads: first contacts whose reads have not ended.
        refused: handles that the fabric has not taken back yet.
        handles: that the fabric has.
        sums: everything that is taken, and by whom, in a line.
        wrong: what does not add up.
    """

    loads: dict[LoadState, int]
    first_reads: int
    refused: int
    handles: OpenHandles
    sums: str
    wrong: list[str]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Answer with a snapshot. Only the transfer thread can take one: what it owns has no lock."""

    answer: Future[ThreadSnapshot]


Message: TypeAlias = Signal | StepOrdered | StepLaunched | TakeSnapshot
