"""A fabric that goes wrong on demand, in front of the real or the fake one.

It stops at given points, so that an event "in the middle of a read" happens exactly there; it raises
at the n-th call of a method; it loses, doubles and reorders notifications; it never completes a read.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from kvferry.protocol.ids import SLOT_BYTES
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    LocalDescriptors,
    OpenHandles,
    PeerAgent,
    RemoteDescriptors,
    Transfer,
    TransferState,
)
from tests.worker.probe_fabric import ProbeFabric

_STOPPED_S = 120.0


class Point(str, enum.Enum):
    """Where a worker can be made to stop: always on its transfer thread, inside a call of the fabric."""

    FIRST_CONTACT = "the producer has described itself; nothing has been read"
    FENCE = "the lease's slot is about to be read, before the data"
    DATA = "the slot was good; the data is about to be read"
    IN_READ = "the data is on its way"
    SECOND_FENCE = "the data is here; the slot is about to be read again"
    DONE = "both slots were good; the producer is about to be notified"


class Delivery(str, enum.Enum):
    """Delivery of this worker's notifications."""

    ONCE = "once"
    NEVER = "never"
    TWICE = "twice"
    REVERSED = "two by two, the second one first"


class FaultFabric(ProbeFabric):
    """Delegates to `inner`. Which point a slot read stands for is known as long as loads come one after the other.

    Attributes:
        delivery: what becomes of the notifications.
        stuck: no data read completes as long as this is set.
        dead: raised by every call but `close`, when set.
    """

    def __init__(self, inner: Fabric) -> None:
        super().__init__(inner)
        self.delivery = Delivery.ONCE
        self.stuck = False
        self.dead: Callable[[], Exception] | None = None
        self._stop_at: Point | None = None
        self._go_on_to: Point | None = None
        self._reached: Callable[[Point], None] = lambda _: None
        self._go = threading.Event()
        self._kept: tuple[PeerAgent, bytes] | None = None
        self._nth: dict[str, tuple[int, Callable[[], Exception]]] = {}
        self._slots: set[LocalDescriptors] = set()
        self._reads: set[Transfer] = set()
        self._read_from: set[PeerAgent] = set()
        self._connected: set[PeerAgent] = set()

    def stop_at(self, point: Point, reached: Callable[[Point], None]) -> None:
        """The next call that gets there says so and waits for `go`. Call it while nothing is under way."""
        self._go.clear()
        self._stop_at, self._reached = point, reached

    def go(self) -> None:
        """Go on; from any thread."""
        self._go.set()

    def go_on_to(self, point: Point) -> None:
        """Go on, and stop again there; from any thread, while one stands still."""
        self._go_on_to = point
        self._go.set()

    def fail_nth(self, method: str, index: int, error: Callable[[], Exception]) -> None:
        """The `index`-th call of a method, counted from the first ever, raises instead of happening."""
        self._nth[method] = (index, error)

    def reading(self) -> int:
        """Data reads that were posted and not released."""
        return len(self._reads)

    def mend(self) -> None:
        """Nothing goes wrong any more."""
        self.delivery, self.stuck, self.dead = Delivery.ONCE, False, None
        self._nth.clear()
        self._read_from.clear()
        self._stop_at = self._go_on_to = None
        self._go.set()

    def add_peer(self, metadata: bytes) -> PeerAgent:
        self._at(Point.FIRST_CONTACT)
        return super().add_peer(metadata)

    def prepare_local(self, rows: DescriptorRows) -> LocalDescriptors:
        made = super().prepare_local(rows)
        if (rows.rows[:, 1] == SLOT_BYTES).all():
            self._slots.add(made)
        return made

    def post_read(
        self, local: LocalDescriptors, local_indices: Indices, remote: RemoteDescriptors, remote_indices: Indices
    ) -> Transfer:
        if local not in self._slots:
            self._at(Point.DATA)
        elif remote.peer in self._read_from:
            self._read_from.discard(remote.peer)
            self._at(Point.SECOND_FENCE)
        elif remote.peer in self._connected:
            self._at(Point.FENCE)
        self._connected.add(remote.peer)  # the first read of a peer only warms it up
        made = super().post_read(local, local_indices, remote, remote_indices)
        if local not in self._slots:
            self._reads.add(made)
            self._read_from.add(remote.peer)
        return made

    def poll(self, transfer: Transfer) -> TransferState:
        state = super().poll(transfer)
        if transfer in self._reads:
            if self.stuck:
                state = TransferState.IN_FLIGHT
            if state is TransferState.IN_FLIGHT:
                self._at(Point.IN_READ)
        return state

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        super().release(handle)
        if isinstance(handle, Transfer):
            self._reads.discard(handle)

    def remove_peer(self, peer: PeerAgent) -> None:
        super().remove_peer(peer)
        self._connected.discard(peer)
        self._read_from.discard(peer)

    def notify(self, peer: PeerAgent, message: bytes) -> None:
        self._at(Point.DONE)
        if self.delivery is Delivery.NEVER:
            return
        if self.delivery is Delivery.REVERSED:
            if self._kept is None:
                self._kept = (peer, message)
                return
            (first, kept), self._kept = self._kept, None
            super().notify(peer, message)
            super().notify(first, kept)
            return
        super().notify(peer, message)
        if self.delivery is Delivery.TWICE:
            super().notify(peer, message)

    def open_handles(self) -> OpenHandles:
        self._called("open_handles")
        return super().open_handles()

    def _at(self, point: Point) -> None:
        if self._stop_at is not point:
            return
        self._stop_at = None
        self._reached(point)
        if not self._go.wait(_STOPPED_S):
            raise RuntimeError(f"no `go` within {_STOPPED_S:g} s")
        self._go.clear()
        self._stop_at, self._go_on_to = self._go_on_to, None

    def _called(self, method: str) -> None:
        if self.dead is not None and method != "close":
            raise self.dead()
        index, error = self._nth.get(method, (-1, RuntimeError))
        if self.calls[method] == index:
            self.calls[method] += 1
            raise error()
        super()._called(method)
