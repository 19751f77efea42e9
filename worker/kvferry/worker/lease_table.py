"""A producer worker's lease table: the words that consumers read, and who has reported under each.

Leases are opened by the step thread, at once: a consumer that looks before anything is in the slot must take the lease
for ended. All else is done by the transfer thread; a lock keeps the two apart. A word is cleared before its request is
reported, so a read that overlapped the release of a block always sees it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from kvferry.protocol.handshake import LeaseTable as LeaseTableAddress
from kvferry.protocol.ids import Epoch, epoch_from_text
from kvferry.protocol.notifications import Done
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.protocol.slots import EMPTY, SLOT_BYTES, SlotState, slot_word


@dataclass(slots=True)
class _Reports:
    """Who of one consumer has reported, and how many it says there are."""

    workers: set[int] = field(default_factory=set)
    expected: int = 0

    @property
    def complete(self) -> bool:
        return len(self.workers) >= self.expected


@dataclass(slots=True)
class _Lease:
    epoch: Epoch
    request_id: str | None = None
    reports: dict[str, _Reports] = field(default_factory=dict)


class LeaseTable:
    """`slots` words of 8 bytes in host memory that stays where it is.

    Attributes:
        words: uint64 `[slots]`, the memory to register with NIXL.
    """

    def __init__(self, slots: int) -> None:
        self.words = np.full(slots, EMPTY, dtype=np.uint64)
        self._leases: dict[int, _Lease] = {}
        self._held: set[int] = set()
        self._lock = threading.Lock()

    @property
    def address(self) -> LeaseTableAddress:
        """Where consumers find it."""
        return LeaseTableAddress(address=int(self.words.ctypes.data), slots=len(self.words))

    @property
    def num_bytes(self) -> int:
        return len(self.words) * SLOT_BYTES

    def held(self) -> int:
        """Leases under which a `done` is awaited."""
        return len(self._held)

    def open(self, order: LeaseOpen) -> None:
        """The request runs: the blocks are being written. A former lease of the slot that was never held is over."""
        epoch = epoch_from_text(order.epoch)
        with self._lock:
            self._held.discard(order.slot)
            self._leases[order.slot] = _Lease(epoch)
            self.words[order.slot] = slot_word(epoch, SlotState.COMPUTING)

    def hold(self, order: LeaseHold) -> str | None:
        """The request has ended and its blocks are kept.

        Returns:
            The request, if everybody had reported already: it is over.
        """
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is None:
                return None
            lease.request_id = order.request_id
            self._held.add(order.slot)
            return self._finish_if_complete(order.slot, lease)

    def ready(self, order: LeaseHold) -> None:
        """The device has finished everything that may write the blocks."""
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is not None:
                self.words[order.slot] = slot_word(lease.epoch, SlotState.READY)

    def end(self, order: LeaseEnd) -> str | None:
        """Nobody may read any more.

        Returns:
            The request, if it was held and has not been reported: report it now.
        """
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is None:
                return None
            self._clear(order.slot)
            return lease.request_id

    def done(self, message: Done) -> str | None:
        """A consumer's worker has what it wanted. The same worker counts once, every consumer's workers by themselves;
        an early report is remembered.

        Returns:
            The request, if this was the last report: it is over.

        Raises:
            KeyError: there is no such lease.
        """
        with self._lock:
            lease = self._find(message.slot, message.epoch)
            if lease is None:
                raise KeyError(message.slot)
            reports = lease.reports.setdefault(message.consumer, _Reports())
            reports.workers.add(message.worker)
            reports.expected = max(reports.expected, message.expected)
            return self._finish_if_complete(message.slot, lease)

    def clear(self) -> None:
        """End every lease: the memory is about to be used for something else."""
        with self._lock:
            self.words[:] = EMPTY
            self._leases.clear()
            self._held.clear()

    def _find(self, slot: int, epoch: str) -> _Lease | None:
        lease = self._leases.get(slot)
        return lease if lease is not None and lease.epoch == epoch_from_text(epoch) else None

    def _finish_if_complete(self, slot: int, lease: _Lease) -> str | None:
        if lease.request_id is None or not any(reports.complete for reports in lease.reports.values()):
            return None
        self._clear(slot)
        return lease.request_id

    def _clear(self, slot: int) -> None:
        self.words[slot] = EMPTY
        self._held.discard(slot)
        del self._leases[slot]
