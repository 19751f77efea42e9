"""What the transfer thread can be told: all messages of its inbox."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.protocol.orders import OrdersHead
from kvferry.worker.device import DeviceMark
from kvferry.worker.thread_snapshot import ThreadSnapshot


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
