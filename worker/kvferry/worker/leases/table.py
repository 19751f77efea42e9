"""A producer worker's lease table: the words that consumers read, and which workers have sent `done` under each.

Leases are opened by the step thread, at once: a consumer that looks before anything is in the slot must take the lease
for ended. All else is done by the transfer thread; a lock keeps the two apart. A word is cleared before its request is
reported, so a read that overlapped the release of a block always sees it.
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
"""At most so many consumers' notifications are kept under one lease: a peer that knows it may name any number."""


@dataclass(slots=True)
class _Notifications:
    """The workers of one consumer that have sent `done`, one bit each, and how many it says there are."""

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

    def is_open(self, slot: int, epoch: str) -> bool:
        """Whether the lease has not ended."""
        with self._lock:
            return self._find(slot, epoch) is not None

    def describe(self) -> str:
        """How many leases there are, for an error."""
        return f"{np.count_nonzero(self.words)} words, {len(self._leases)} leases, {len(self._held)} held"

    def errors(self) -> list[str]:
        """What does not add up: every lease has its word, every other word is empty, what is held was held once."""
        with self._lock:
            wrong = [
                f"slot {slot} says {int(self.words[slot]):#x} under epoch {lease.epoch:#x}"
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
        """The request runs: the blocks are being written. A former lease of the slot that was never held is over."""
        epoch = epoch_from_text(order.epoch)
        with self._lock:
            self._held.discard(order.slot)
            self._leases[order.slot] = _Lease(epoch)
            self.words[order.slot] = slot_word(epoch, SlotState.COMPUTING)

    def hold(self, order: LeaseHold) -> str | None:
        """The request has ended and its blocks are kept.

        Returns:
            The request, if every `done` had come already: it is over.
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
        an early notification is remembered.

        Returns:
            The request, if this was the last notification: it is over.

        Raises:
            KeyError: there is no such lease.
            InvalidMessage: too many others have sent one under it.
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
