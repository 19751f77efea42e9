"""A producer worker's lease table: the words that consumers read, and the workers that have reported under each.

Leases are opened by the step thread, at once: to a consumer that reads the slot before that, the lease has ended.
Everything else is done by the transfer thread; both use a lock. A word is cleared before its request is reported, so a
read that overlapped the release of a block always sees it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import LeaseTable as LeaseTableAddress
from kvferry.protocol.ids import EMPTY, SLOT_BYTES, Epoch, SlotState, epoch_from_text, slot_word
from kvferry.protocol.notifications import Done
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen

_LIVE = (SlotState.COMPUTING, SlotState.READY)

MAX_CONSUMERS = 8
"""Most consumers whose notifications are kept under one lease. A lease is for one, but any may be named."""


@dataclass(slots=True)
class _Notifications:
    """The workers of one consumer that have reported, one bit each, and how many will, by their own notifications."""

    workers: int = 0
    expected: int = 0

    @property
    def complete(self) -> bool:
        return self.workers.bit_count() >= self.expected


@dataclass(slots=True)
class _Lease:
    epoch: Epoch
    request_id: str | None = None
    notifications: dict[str, _Notifications] = field(default_factory=dict)


class LeaseTable:
    """`slots` words of 8 bytes in host memory at a fixed address.

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
        """The table's address, for consumers."""
        return LeaseTableAddress(address=int(self.words.ctypes.data), slots=len(self.words))

    @property
    def num_bytes(self) -> int:
        return len(self.words) * SLOT_BYTES

    def held(self) -> int:
        """Number of leases that wait for a `done`."""
        return len(self._held)

    def is_open(self, slot: int, epoch: str) -> bool:
        """Whether the lease has not ended."""
        with self._lock:
            return self._find(slot, epoch) is not None

    def describe(self) -> str:
        """Numbers of words and leases, for an error text."""
        return f"{np.count_nonzero(self.words)} words, {len(self._leases)} leases, {len(self._held)} held"

    def errors(self) -> list[str]:
        """Errors, if any: every lease has its word, every other word is empty, only leases with a request are held."""
        with self._lock:
            wrong = [
                f"the word of slot {slot} is {int(self.words[slot]):#x} under epoch {lease.epoch:#x}"
                for slot, lease in self._leases.items()
                if int(self.words[slot]) not in (slot_word(lease.epoch, state) for state in _LIVE)
            ]
            words = int(np.count_nonzero(self.words))
            if words != len(self._leases):
                wrong.append(f"{words} words are not empty, and there are {len(self._leases)} leases")
            named = {slot for slot, lease in self._leases.items() if lease.request_id is not None}
            if named != self._held:
                wrong.append(f"slots {sorted(self._held ^ named)} are held by no request, or the other way round")
        return wrong

    def open(self, order: LeaseOpen) -> None:
        """Open a lease: its request runs and writes the blocks. An earlier lease of the slot that was not held ends."""
        epoch = epoch_from_text(order.epoch)
        with self._lock:
            self._held.discard(order.slot)
            self._leases[order.slot] = _Lease(epoch)
            self.words[order.slot] = slot_word(epoch, SlotState.COMPUTING)

    def hold(self, order: LeaseHold) -> str | None:
        """Hold the blocks of a request that has ended.

        Returns:
            The request, if all workers had reported already: its lease is over.
        """
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is None:
                return None
            lease.request_id = order.request_id
            self._held.add(order.slot)
            return self._finish_if_complete(order.slot, lease)

    def ready(self, order: LeaseHold) -> None:
        """Set READY: the device has finished everything that may write the blocks."""
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is not None:
                self.words[order.slot] = slot_word(lease.epoch, SlotState.READY)

    def end(self, order: LeaseEnd) -> str | None:
        """End a lease: its blocks may not be read any more.

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
        """Record that a consumer's worker needs nothing more under a lease. A worker counts once, the workers of each
        consumer separately; a report that comes before the hold is kept.

        Returns:
            The request, if this was the last report: its lease is over.

        Raises:
            KeyError: there is no such lease.
            InvalidMessage: too many other consumers have reported under it.
        """
        with self._lock:
            lease = self._find(message.slot, message.epoch)
            if lease is None:
                raise KeyError(message.slot)
            if message.consumer not in lease.notifications and len(lease.notifications) >= MAX_CONSUMERS:
                raise InvalidMessage("consumer", message.consumer, f"at most {MAX_CONSUMERS} consumers under one lease")
            notifications = lease.notifications.setdefault(message.consumer, _Notifications())
            notifications.workers |= 1 << message.worker
            notifications.expected = max(notifications.expected, message.expected)
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
        if lease.request_id is None or not any(sent.complete for sent in lease.notifications.values()):
            return None
        self._clear(slot)
        return lease.request_id

    def _clear(self, slot: int) -> None:
        self.words[slot] = EMPTY
        self._held.discard(slot)
        del self._leases[slot]
