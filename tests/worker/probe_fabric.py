"""A fabric in front of the real or the fake one: it counts calls, raises on demand, and calls back at data reads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.protocol.ids import SLOT_BYTES
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    LocalDescriptors,
    OpenHandles,
    PeerAgent,
    Region,
    RemoteDescriptors,
    Transfer,
    TransferState,
    TransferTelemetry,
)


class ProbeFabric:
    """Delegates to `inner`.

    Attributes:
        calls: by method name, how often it was called.
        faults: by method name, the error to raise and how many more times; a call that raises is not passed on.
        on_data_read: called once, on the worker's thread, before the next read that is no slot read is posted.
        live: handles that were made and not released.
        peers: agents that were added and not removed.
        callers: threads that have posted reads.
    """

    def __init__(self, inner: Fabric) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, tuple[Callable[[], Exception], int]] = {}
        self.on_data_read: Callable[[], None] | None = None
        self.live: set[Transfer | LocalDescriptors | RemoteDescriptors] = set()
        self.peers: set[PeerAgent] = set()
        self.callers: set[int] = set()
        self._slot_lists: set[LocalDescriptors] = set()

    @property
    def agent_name(self) -> str:
        return self.inner.agent_name

    def fail(self, method: str, error: Callable[[], Exception], times: int = 1) -> None:
        """The next `times` calls of `method` raise."""
        self.faults[method] = (error, times)

    def transfers(self) -> int:
        """Transfers that were not released."""
        return sum(isinstance(one, Transfer) for one in self.live)

    def prepared(self) -> int:
        """Prepared lists that were not released."""
        return len(self.live) - self.transfers()

    def register(self, regions: Sequence[Region]) -> None:
        self._called("register")
        self.inner.register(regions)

    def metadata(self) -> bytes:
        self._called("metadata")
        return self.inner.metadata()

    def add_peer(self, metadata: bytes) -> PeerAgent:
        self._called("add_peer")
        peer = self.inner.add_peer(metadata)
        self.peers.add(peer)
        return peer

    def remove_peer(self, peer: PeerAgent) -> None:
        self._called("remove_peer")
        self.peers.discard(peer)
        self.inner.remove_peer(peer)

    def prepare_local(self, rows: DescriptorRows) -> LocalDescriptors:
        self._called("prepare_local")
        made = self.inner.prepare_local(rows)
        self.live.add(made)
        if (rows.rows[:, 1] == SLOT_BYTES).all():
            self._slot_lists.add(made)
        return made

    def prepare_remote(self, peer: PeerAgent, rows: DescriptorRows) -> RemoteDescriptors:
        self._called("prepare_remote")
        made = self.inner.prepare_remote(peer, rows)
        self.live.add(made)
        return made

    def post_read(
        self, local: LocalDescriptors, local_indices: Indices, remote: RemoteDescriptors, remote_indices: Indices
    ) -> Transfer:
        self.callers.add(threading.get_ident())
        if local not in self._slot_lists:
            self._called("post_data_read")
            happened, self.on_data_read = self.on_data_read, None
            if happened is not None:
                happened()
        self._called("post_read")
        made = self.inner.post_read(local, local_indices, remote, remote_indices)
        self.live.add(made)
        return made

    def poll(self, transfer: Transfer) -> TransferState:
        self._called("poll")
        return self.inner.poll(transfer)

    def telemetry(self, transfer: Transfer) -> TransferTelemetry | None:
        self._called("telemetry")
        return self.inner.telemetry(transfer)

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        self._called("release")
        self.live.discard(handle)
        self.inner.release(handle)

    def notify(self, peer: PeerAgent, message: bytes) -> None:
        self._called("notify")
        self.inner.notify(peer, message)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        self._called("take_notifications")
        return self.inner.take_notifications()

    def open_handles(self) -> OpenHandles:
        return self.inner.open_handles()

    def close(self) -> None:
        self._called("close")
        self.inner.close()

    def _called(self, method: str) -> None:
        self.calls[method] += 1
        error, times = self.faults.get(method, (None, 0))
        if error is not None and times > 0:
            self.faults[method] = (error, times - 1)
            raise error()
