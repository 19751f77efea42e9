"""A producer worker's leases: the table of words that consumers read.

A lease is held from the step on that completes its prompt. It becomes READY when the device has finished that step and,
where peers read a copy of the caches, the blocks have been copied. A prompt that is read while it is computed has a row
too (`stream_rows`), and its slot reports the tokens of the steps that the device has finished.

Leases are opened by the step thread, at once: to a consumer that reads the slot before that, the lease has ended.
Everything else is done by the transfer thread; both use a lock. A word is cleared before its request is reported, so a
read that overlapped the release of a block always sees it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvferry.protocol.errors import InvalidMessage, LocalProtocolError
from kvferry.protocol.handshake import LeaseTable as LeaseTableAddress
from kvferry.protocol.ids import (
    EMPTY,
    SLOT_BYTES,
    Epoch,
    SlotState,
    epoch_from_text,
    progress_word,
    slot_word,
)
from kvferry.protocol.notifications import Done, decode_notification
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress
from kvferry.protocol.params import Blocks
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.loads.results import ResultBox
from kvferry.worker.staging.host_buffer import HostMirror
from kvferry.worker.stream_rows import ServedStream, StreamRowTable

logger = logging.getLogger(__name__)

_LIVE = (SlotState.COMPUTING, SlotState.READY)

_AT_ONCE = 32
_RELEASED_S = 50e-6
"""Given to other threads after every `_AT_ONCE`, which take some 100 µs: anyone can send any number, and the step
thread would wait for 5 ms each time it needs the interpreter's lock."""

MAX_CONSUMERS = 8
"""Most consumers whose notifications are kept under one lease. A lease is for one, but any may be named."""


@dataclass(slots=True)
class _Reports:
    """The workers of one consumer that have reported, one bit each, and how many will, by their own notifications."""

    workers: int = 0
    expected: int = 0

    @property
    def complete(self) -> bool:
        return self.workers.bit_count() >= self.expected


@dataclass(slots=True, eq=False)
class _ServedLease:
    """A lease that has not ended.

    Attributes:
        stream: what consumers may read of the prompt before it is held.
        request_id: the request, once it is held.
        mark: of a hold that is not READY: reached when everything that may write the blocks has finished; later, when
            they have been copied. None until the step ends that completes the prompt.
        waves: blocks that have yet to be copied.
    """

    epoch: Epoch
    stream: ServedStream
    request_id: str | None = None
    mark: DeviceMark | None = None
    waves: deque[Blocks] = field(default_factory=deque)
    notifications: dict[str, _Reports] = field(default_factory=dict)


class LeaseTable:
    """`slots` slots of two words in host memory at a fixed address.

    Args:
        mirror: where blocks are copied to before they may be read; None where peers read the caches.
        rows: of prompts that are read while they are computed.

    Attributes:
        words, progress: uint64 `[slots]`, the two words of every slot, which alternate in memory.
    """

    def __init__(
        self, slots: int, mirror: HostMirror | None = None, rows: StreamRowTable | None = None
    ) -> None:
        memory = np.full((slots, 2), EMPTY, dtype=np.uint64)
        self.words, self.progress = memory[:, 0], memory[:, 1]
        self._leases: dict[int, _ServedLease] = {}
        self._held: set[int] = set()
        self._pending: dict[int, _ServedLease] = {}
        self._mirror = mirror
        self._rows = rows if rows is not None else StreamRowTable()
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

    def pending(self) -> int:
        """Number of leases of which more can be read when the device has finished a step or a copy."""
        return len(self._pending)

    def describe(self) -> str:
        """Numbers of words and leases, for an error text."""
        leases = f"{len(self._leases)} leases, {len(self._held)} held, {len(self._pending)} pending"
        return f"{np.count_nonzero(self.words)} words, {leases}"

    def errors(self) -> list[str]:
        """Errors, if any: every lease that can be read has its word, every other word is empty, only leases with a
        request are held, and every row is a lease's."""
        with self._lock:
            wrong = [
                f"the word of slot {slot} is {int(self.words[slot]):#x} under epoch {lease.epoch:#x}"
                for slot, lease in self._leases.items()
                if int(self.words[slot]) not in (slot_word(lease.epoch, state) for state in _LIVE)
            ]
            words = int(np.count_nonzero(self.words))
            if words != len(self._leases):
                wrong.append(
                    f"{words} words are not empty, and there are {len(self._leases)} leases"
                )
            named = {slot for slot, lease in self._leases.items() if lease.request_id is not None}
            if named != self._held:
                wrong.append(
                    f"slots {sorted(self._held ^ named)} are held by no request, or the other way round"
                )
            wrong += self._rows.errors(
                (lease.stream, lease.epoch) for lease in self._leases.values()
            )
        return wrong

    def open(self, order: LeaseOpen) -> None:
        """Open a lease: its request runs and writes the blocks. An earlier lease of the slot that was not held ends;
        with a row, it goes on under another epoch, and nothing of what was published under the old one counts."""
        epoch, origin = epoch_from_text(order.epoch), epoch_from_text(order.origin or order.epoch)
        with self._lock:
            former, lease = self._leases.get(order.slot), _ServedLease(epoch, ServedStream(origin))
            if former is not None:
                self._forget(order.slot, former, keeps_row=former.stream.origin == origin)
            if order.row is not None:
                self._rows.name(
                    order.row, lease.stream, epoch
                )  # first: a consumer that sees the word reads the header
            self._leases[order.slot] = lease
            self.words[order.slot] = slot_word(epoch, SlotState.COMPUTING)

    def publish(self, order: LeaseProgress) -> bool:
        """Write the blocks that a step computes of a prompt into the lease's row.

        Returns:
            Whether to `complete` the order when the step ends: not if its lease is over. An order that does not fit
            the row, an internal error, ends it.
        """
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is None:
                return False
            try:
                self._rows.extend(lease.stream, order, lease.epoch)
            except LocalProtocolError:
                internal_errors.log(f"the lease of slot {order.slot} cannot be read any more")
                self._clear(order.slot)
                return False
            return True

    def hold(self, order: LeaseHold, mark: DeviceMark | None) -> str | None:
        """Hold the blocks of a request whose prompt is complete, or will be when the present step ends.

        Args:
            mark: reached when everything that may write the blocks has finished; None until `complete`.

        Returns:
            The request, if its lease is over: all workers had reported already, or an order for it did not fit.
        """
        waves = self._mirror.waves(order.blocks) if self._mirror is not None else deque()
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is None:
                return order.request_id
            lease.request_id, lease.mark, lease.waves = order.request_id, mark, waves
            self._held.add(order.slot)
            if mark is not None:
                self._pending[order.slot] = lease
            return self._finish_if_complete(order.slot, lease)

    def complete(self, order: LeaseHold | LeaseProgress, mark: DeviceMark) -> None:
        """The step that computes a part of a prompt, or its last part, has been launched.

        Args:
            mark: reached when that step has finished.
        """
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is None:
                return
            if isinstance(order, LeaseHold):
                lease.mark = mark
            else:
                lease.stream.steps.append((order.tokens, mark))
            self._pending[order.slot] = lease

    def advance(self) -> bool:
        """Report the tokens of the leases with a step that the device has finished; set the held ones READY whose mark
        is reached, or begin to copy their blocks. Returns whether there were any. The blocks of a lease that has ended
        may be another request's: they are not copied."""
        with self._lock:
            pending = list(self._pending.items())
        found = [self._advance(slot, lease) for slot, lease in pending]
        return any(found)

    def _advance(self, slot: int, lease: _ServedLease) -> bool:
        tokens, is_reached = (
            lease.stream.take_tokens(),
            lease.mark is not None and lease.mark.reached(),
        )
        if not tokens and not is_reached:
            return False
        mirror = self._mirror if is_reached and lease.waves else None
        with self._lock:
            if self._pending.get(slot) is not lease:
                return True
            if tokens:
                self.progress[slot] = progress_word(lease.epoch, tokens)
            if is_reached and mirror is None:
                lease.mark = None
                self.words[slot] = slot_word(lease.epoch, SlotState.READY)
            del self._pending[slot]
            if lease.mark is not None or lease.stream.steps:
                self._pending[slot] = (
                    lease  # before a copy, which may raise; at the end: others come first next time
                )
        if mirror is not None:
            lease.mark = mirror.try_copy(lease.waves) or lease.mark
        return True

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

    def distrust(self) -> list[str | None]:
        """End every lease that is not READY: its blocks may not have been written. Call it on the step thread, which
        opens leases: none of a later step's is ended.

        Returns:
            For each the request, if it was held and has not been reported: report it now.
        """
        with self._lock:
            doubtful = {
                slot: lease
                for slot, lease in self._leases.items()
                if not self._is_ready(slot, lease)
            }
            for slot in doubtful:
                self._clear(slot)
            return [lease.request_id for lease in doubtful.values()]

    def _is_ready(self, slot: int, lease: _ServedLease) -> bool:
        return int(self.words[slot]) == slot_word(lease.epoch, SlotState.READY)

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
            if (
                message.consumer not in lease.notifications
                and len(lease.notifications) >= MAX_CONSUMERS
            ):
                raise InvalidMessage(
                    "consumer",
                    message.consumer,
                    f"at most {MAX_CONSUMERS} consumers under one lease",
                )
            notifications = lease.notifications.setdefault(message.consumer, _Reports())
            notifications.workers |= 1 << message.worker
            notifications.expected = max(notifications.expected, message.expected)
            return self._finish_if_complete(message.slot, lease)

    def clear(self) -> None:
        """End every lease: the memory is about to be used for something else."""
        with self._lock:
            self.words[:] = self.progress[:] = self._rows.headers[:] = EMPTY
            self._leases.clear()
            self._held.clear()
            self._pending.clear()

    def _find(self, slot: int, epoch: str) -> _ServedLease | None:
        lease = self._leases.get(slot)
        return lease if lease is not None and lease.epoch == epoch_from_text(epoch) else None

    def _finish_if_complete(self, slot: int, lease: _ServedLease) -> str | None:
        if lease.request_id is None or not any(
            sent.complete for sent in lease.notifications.values()
        ):
            return None
        self._clear(slot)
        return lease.request_id

    def _clear(self, slot: int) -> None:
        self.words[slot] = EMPTY
        self._forget(slot, self._leases.pop(slot))

    def _forget(self, slot: int, lease: _ServedLease, *, keeps_row: bool = False) -> None:
        self.progress[slot] = EMPTY
        self._held.discard(slot)
        self._pending.pop(slot, None)
        if not keeps_row:
            self._rows.free(lease.stream)


class Notifications:
    """Passes consumers' notifications from the fabric to the lease table. Used on the transfer thread.

    Any agent can send them, so the log of invalid ones is limited.
    """

    def __init__(self, fabric: Fabric, table: LeaseTable, results: ResultBox) -> None:
        self._fabric = fabric
        self._table = table
        self._results = results
        self._invalid = RateLimitedLog(logger)

    def take(self) -> bool:
        """Take the notifications that have arrived. Returns whether there were any.

        Raises:
            FabricError: the fabric failed.
        """
        arrived = self._fabric.take_notifications()
        for count, (sender, frame) in enumerate(arrived, 1):
            if count % _AT_ONCE == 0:
                time.sleep(_RELEASED_S)
            try:
                self._take_one(sender, frame)
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log("one notification is lost; the others are processed")
        return bool(arrived)

    def _take_one(self, sender: str, frame: bytes) -> None:
        try:
            done = decode_notification(frame)
            finished = self._table.done(done)
        except InvalidMessage as invalid:
            self._invalid.warning("ignored a notification of %s: %s", sender, invalid)
            with self._results as results:
                results.counts["bad_notifications"] += 1
            return
        except KeyError:
            logger.debug("ignored a notification of %s: no such lease", sender)
            with self._results as results:
                results.counts["late_notifications"] += 1
            return
        logger.debug("slot=%d done by worker %d of %s", done.slot, done.worker, done.consumer)
        if finished is not None:
            with self._results as results:
                results.sent.add(finished)
