"""A fabric in front of the real or the fake one, which counts its calls and goes wrong on demand.

Calls raise; reads stop at a point, so that an event "in the middle of a read" happens exactly there, or never complete;
notifications are lost.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.protocol.slots import (
    ID_BYTES,
    PAGE_IDS,
    SLOT_BYTES,
)
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    LocalDescriptors,
    MemoryKind,
    OpenHandles,
    PeerAgent,
    Region,
    RemoteDescriptors,
    Transfer,
    TransferState,
    TransferTelemetry,
)
from kvferry.worker.fabric.reads import ID_PAGES

_STOPPED_S = 120.0
ID_PAGES_ROW = [PAGE_IDS * ID_BYTES, 0, PAGE_IDS * ID_BYTES, ID_PAGES]


def reads_beside_blocks(rows: DescriptorRows) -> bool:
    """Whether these local descriptors are those of slots, headers or block ids: what is read into them writes into no
    block."""
    return bool((rows.rows[:, 1] == SLOT_BYTES).all()) or rows.rows[:, 1:].tolist() == [
        ID_PAGES_ROW
    ]


class Point(str, enum.Enum):
    """Where a worker can be made to stop: always on its transfer thread, inside a call of the fabric."""

    FIRST_CONTACT = "the producer has described itself; nothing has been read"
    FENCE = "the lease's slot is about to be read, before the data"
    DATA = "the slot was good; the data is about to be read"
    IN_READ = "the data is on its way"
    SECOND_FENCE = "the data is here; the slot is about to be read again"
    DONE = "both slots were good; the producer is about to be notified"


class Stops:
    """Makes the transfer thread stand still at a point of a load."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._connected: set[PeerAgent] = set()
        self.clear()

    def clear(self) -> None:
        """Go on, and stop nowhere."""
        self._read_from: set[PeerAgent] = set()
        self._next: Point | None = None
        self._then: Point | None = None
        self._reached: Callable[[Point], None] = lambda _: None
        self._go.set()

    def stop_at(self, point: Point, reached: Callable[[Point], None]) -> None:
        """The next call that gets there says so and waits for `go`. Call it while nothing is under way."""
        self._go.clear()
        self._next, self._reached = point, reached

    def go(self) -> None:
        """Go on; from any thread."""
        self._go.set()

    def go_on_to(self, point: Point) -> None:
        """Go on, and stop again there; from any thread, while one stands still."""
        self._then = point
        self._go.set()

    def at(self, point: Point) -> None:
        """The transfer thread has come to this point."""
        if self._next is not point:
            return
        self._next = None
        self._reached(point)
        if not self._go.wait(_STOPPED_S):
            raise RuntimeError(f"no `go` within {_STOPPED_S:g} s")
        self._go.clear()
        self._next, self._then = self._then, None

    def before_read(self, peer: PeerAgent, *, is_data: bool) -> None:
        """A read is about to be posted."""
        if is_data:
            self.at(Point.DATA)
            self._read_from.add(peer)
        elif peer in self._read_from:
            self._read_from.discard(peer)
            self.at(Point.SECOND_FENCE)
        elif peer in self._connected:
            self.at(Point.FENCE)
        self._connected.add(peer)  # the first read of a peer only warms it up

    def forget(self, peer: PeerAgent) -> None:
        self._connected.discard(peer)
        self._read_from.discard(peer)


class FaultFabric:
    """Delegates to `inner`.

    Attributes:
        calls: by method name, how often it was called; data reads also as `post_data_read`.
        faults: by method name, the error and the numbers of the calls that raise it; see `fail`.
        on_data_read: called once, on the worker's thread, before the next data read is posted.
        loses_notifications: whether the notifications that it sends get lost.
        stuck: no data read completes as long as this is set.
        dead: raised by every call but `close`, when set.
        stops: points at which its worker stands still. Which point a slot read is, is known as long as loads come one
            after the other.
        live: handles that were made and not released.
        peers: agents that were added and not removed.
    """

    def __init__(self, inner: Fabric) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.live: set[Transfer | LocalDescriptors | RemoteDescriptors] = set()
        self.peers: set[PeerAgent] = set()
        self._slot_lists: set[LocalDescriptors] = set()
        self.open_reads: set[Transfer] = set()
        self.stops = Stops()
        self.mend()

    @property
    def agent_name(self) -> str:
        return self.inner.agent_name

    def mend(self) -> None:
        """Nothing goes wrong any more."""
        self.on_data_read: Callable[[], None] | None = None
        self.loses_notifications = False
        self.stuck = False
        self.dead: Callable[[], Exception] | None = None
        self.faults: dict[str, tuple[Callable[[], Exception], range]] = {}
        self.stops.clear()

    def fail(
        self,
        method: str,
        error: Callable[[], Exception],
        times: int = 1,
        *,
        first: int | None = None,
    ) -> None:
        """The next `times` calls of `method` raise instead of happening; or those from call number `first` of all."""
        first = self.calls[method] if first is None else first
        self.faults[method] = (error, range(first, first + times))

    def failures_left(self, method: str) -> int | None:
        """How many calls of the method will still raise; None if it was not made to `fail`."""
        if method not in self.faults:
            return None
        _, numbers = self.faults[method]
        return max(0, numbers.stop - max(numbers.start, self.calls[method]))

    def reading(self) -> int:
        """Data reads that were posted and not released."""
        return len(self.open_reads)

    def transfers(self) -> int:
        """Transfers that were not released."""
        return sum(isinstance(one, Transfer) for one in self.live)

    def prepared(self) -> int:
        """Prepared lists that were not released."""
        return len(self.live) - self.transfers()

    def register(self, regions: Sequence[Region]) -> None:
        self._called("register")
        self.inner.register(regions)

    def slow_within_host(self, kind: MemoryKind, *, shares_ipc: bool) -> str | None:
        return self.inner.slow_within_host(kind, shares_ipc=shares_ipc)

    def metadata(self) -> bytes:
        self._called("metadata")
        return self.inner.metadata()

    def add_peer(self, metadata: bytes) -> PeerAgent:
        self.stops.at(Point.FIRST_CONTACT)
        self._called("add_peer")
        peer = self.inner.add_peer(metadata)
        self.peers.add(peer)
        return peer

    def remove_peer(self, peer: PeerAgent) -> None:
        self._called("remove_peer")
        self.peers.discard(peer)
        self.stops.forget(peer)
        self.inner.remove_peer(peer)

    def prepare_local(self, rows: DescriptorRows) -> LocalDescriptors:
        self._called("prepare_local")
        made = self.inner.prepare_local(rows)
        self.live.add(made)
        if reads_beside_blocks(rows):
            self._slot_lists.add(made)
        return made

    def prepare_remote(
        self, peer: PeerAgent, rows: DescriptorRows
    ) -> RemoteDescriptors:
        self._called("prepare_remote")
        made = self.inner.prepare_remote(peer, rows)
        self.live.add(made)
        return made

    def post_read(
        self,
        local: LocalDescriptors,
        local_indices: Indices,
        remote: RemoteDescriptors,
        remote_indices: Indices,
    ) -> Transfer:
        is_data = not self.is_slot_list(local)
        self.stops.before_read(remote.peer, is_data=is_data)
        if is_data:
            self._called("post_data_read")
            happened, self.on_data_read = self.on_data_read, None
            if happened is not None:
                happened()
        self._called("post_read")
        made = self.inner.post_read(local, local_indices, remote, remote_indices)
        self.live.add(made)
        if is_data:
            self.open_reads.add(made)
        return made

    def poll(self, transfer: Transfer) -> TransferState:
        if transfer in self.open_reads:
            self._called("poll_data_read")
        self._called("poll")
        state = self.inner.poll(transfer)
        if transfer in self.open_reads:
            if self.stuck:
                state = TransferState.IN_FLIGHT
            if state is TransferState.IN_FLIGHT:
                self.stops.at(Point.IN_READ)
        return state

    def telemetry(self, transfer: Transfer) -> TransferTelemetry | None:
        self._called("telemetry")
        return self.inner.telemetry(transfer)

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        self._called("release")
        self.live.discard(handle)
        if isinstance(handle, Transfer):
            self.open_reads.discard(handle)
        self.inner.release(handle)

    def notify(self, peer: PeerAgent, message: bytes) -> None:
        self.stops.at(Point.DONE)
        if not self.loses_notifications:
            self._called("notify")
            self.inner.notify(peer, message)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        self._called("take_notifications")
        return self.inner.take_notifications()

    def open_handles(self) -> OpenHandles:
        self._called("open_handles")
        return self.inner.open_handles()

    def close(self) -> None:
        self._called("close")
        self.inner.close()

    def is_slot_list(self, local: LocalDescriptors) -> bool:
        """Whether these descriptors are those of slots, headers or block ids."""
        return local in self._slot_lists

    def _called(self, method: str) -> None:
        number = self.calls[method]
        self.calls[method] += 1
        if self.dead is not None and method != "close":
            raise self.dead()
        error, numbers = self.faults.get(method, (None, range(0)))
        if error is not None and number in numbers:
            raise error()
