"""A producer worker's leases: the table of words that consumers read, the rows that list the blocks of prompts that are
being computed, and the notifications that end a lease.

A lease is held from the step on that completes its prompt. It becomes READY when the device has finished that step and,
where peers read a copy of the caches, the blocks have been copied. A prompt that is read while it is computed has a row
too (`kvferry.protocol.slots`), and its slot reports the tokens of the steps that the device has finished.

Leases are opened by the step thread; everything else is done by the transfer thread, and both use a lock.

Safety rests on one order of events: a word is cleared before its request is reported, and blocks are given away after
the report. So a read that overlapped the release of a block always sees another word afterwards.

A row belongs to the lease whose first epoch is in its header. Ids are written with the orders of the step that computes
their blocks, the tokens into the lease's slot when that step has ended. A row of which orders were lost would make
consumers read wrong blocks, so each order must continue exactly where the one before it ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.link.lock_pauses import LockPauses
from kvferry.protocol.errors import InvalidMessage, LocalProtocolError
from kvferry.protocol.handshake import LeaseTableAddress
from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress
from kvferry.protocol.params import Blocks
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.protocol.slots import (
    EMPTY,
    ID_BYTES,
    PAGE_IDS,
    ROW_HEADER_BYTES,
    SLOT_BYTES,
    STREAM_ROWS,
    Done,
    SlotState,
    StreamRows,
    decode_notification,
    epoch_from_text,
    header_word,
    progress_word,
    slot_word,
)
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import Fabric, MemoryKind, Region
from kvferry.worker.loads.results import ResultBox
from kvferry.worker.staging.host_buffer import HostMirror

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ServedStream:
    """The published part of one lease's prompt under its present epoch.

    Attributes:
        origin: the first epoch of the lease; only of use with a row.
        row: None before the first order for it.
        ids: per cache group the number of ids in the row.
        steps: the steps that have not ended, oldest first: the leading tokens that are complete then, and the step's
            mark.
    """

    origin: Epoch
    row: int | None = None
    ids: tuple[int, ...] = ()
    steps: deque[tuple[int, DeviceMark]] = field(default_factory=deque)

    def take_tokens(self) -> int:
        """The tokens that are complete since the last call; 0 if no step has ended."""
        complete = 0
        while self.steps:
            tokens, mark = self.steps[0]
            if not mark.reached():
                break
            complete = tokens
            self.steps.popleft()
        return complete


_HEADERS_BYTES = STREAM_ROWS * ROW_HEADER_BYTES


def bytes_of_rows(blocks: tuple[int, ...]) -> int:
    """Bytes of the headers, and of the ids behind them, with room for so many blocks of each cache group."""
    pages = -(-sum(blocks) // PAGE_IDS)
    return _HEADERS_BYTES + STREAM_ROWS * pages * PAGE_IDS * ID_BYTES


class StreamRowTable:
    """`STREAM_ROWS` rows at fixed addresses.

    Args:
        blocks: per cache group the most blocks of one prompt; empty if no prompt can be read before it is complete.
        memory: where the rows are, `bytes_of_rows`, zeroed, aligned to 16; None for memory of its own.

    Attributes:
        headers: uint64 `[rows, 2]`.
        ids: uint32 `[rows, ids]`, whole pages.
    """

    def __init__(
        self, blocks: tuple[int, ...] = (), memory: NDArray[np.uint8] | None = None
    ) -> None:
        if memory is None:
            memory = np.zeros(bytes_of_rows(blocks), dtype=np.uint8)
        self.headers = memory[:_HEADERS_BYTES].view(np.uint64).reshape(STREAM_ROWS, 2)
        self.headers[:] = EMPTY
        self.ids = memory[_HEADERS_BYTES:].view(np.uint32).reshape(STREAM_ROWS, -1)
        self._blocks = blocks

    @property
    def address(self) -> StreamRows | None:
        """Their location, for consumers."""
        if not self._blocks:
            return None
        return StreamRows(
            headers=int(self.headers.ctypes.data),
            ids=int(self.ids.ctypes.data),
            rows=STREAM_ROWS,
            blocks=self._blocks,
        )

    def regions(self) -> list[Region]:
        """The memory to register."""
        if not self._blocks:
            return []
        return [
            Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)
            for memory in (self.headers, self.ids)
        ]

    def name(self, row: int, stream: ServedStream, epoch: Epoch) -> None:
        """The row is a lease's from now on, under its present epoch."""
        stream.row = row
        # The origin tells consumers that this is still the lease of their ticket, whatever its present epoch is.
        self.headers[row] = (header_word(stream.origin), header_word(epoch))

    def free(self, stream: ServedStream) -> None:
        """The lease, which has a row, is over. A row that another lease has taken meanwhile stays that lease's."""
        if self.headers[stream.row, 0] == header_word(stream.origin):
            self.headers[stream.row] = EMPTY

    def extend(self, stream: ServedStream, order: LeaseProgress, epoch: Epoch) -> None:
        """Write an order's ids and name the row.

        Raises:
            LocalProtocolError: the order does not continue the row, or would leave it; nothing has been written.
        """
        listed = stream.ids or (0,) * len(self._blocks)
        stops = tuple(
            first + len(ids)
            for first, ids in zip(order.first_blocks, order.blocks, strict=False)
        )
        # `all` stops at the shorter of both, so the number of groups is compared first.
        has_room = len(order.blocks) == len(self._blocks) and all(
            stop <= room for stop, room in zip(stops, self._blocks, strict=False)
        )
        continues = order.first_blocks == listed and stream.row in (None, order.row)
        if not has_room or not continues:
            raise LocalProtocolError(
                f"row {order.row}, ids {order.first_blocks} to {stops} after ids {listed} "
                f"of row {stream.row}, which has room for {self._blocks}"
            )
        group_begins = 0
        for first, ids, room in zip(
            order.first_blocks, order.blocks, self._blocks, strict=True
        ):
            begin = group_begins + first
            self.ids[order.row, begin : begin + len(ids)] = ids
            group_begins += room
        stream.ids = stops
        self.name(order.row, stream, epoch)

    def snapshot(self) -> dict[int, tuple[int, int]]:
        """The headers that are not empty, by row: the words of origin and present epoch."""
        rows = np.flatnonzero(self.headers.any(axis=1)).tolist()
        return {row: tuple(self.headers[row].tolist()) for row in rows}


_NOTIFICATIONS_AT_ONCE = 32
"""Taken without a look at the clock, in some 100 µs. Anyone can send any number, so then the step thread gets the
interpreter's lock."""

MAX_CONSUMERS = 8
"""Most consumers whose notifications are kept under one lease. A lease is for one, but any may be named."""


@dataclass(slots=True)
class _Reports:
    """The workers of one consumer that have reported, one bit each, and how many will, by their own notifications."""

    workers: int = 0
    expected: int = 0


@dataclass(slots=True, eq=False)
class _ServedLease:
    """A lease that has not ended.

    Attributes:
        stream: what consumers may read of the prompt before it is held.
        request_id: the request, once it is held.
        mark: of a hold that is not READY: reached when everything that may write the blocks has finished; later, when
            they have been copied. None until the step ends that completes the prompt.
        waves: blocks that have yet to be copied.
        reports: by consumer; those that come before the hold are kept.
    """

    epoch: Epoch
    stream: ServedStream
    request_id: str | None = None
    mark: DeviceMark | None = None
    waves: deque[Blocks] = field(default_factory=deque)
    reports: dict[str, _Reports] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSnapshot:
    """A lease that has not ended.

    Attributes:
        row, origin: of what may be read while it is computed; None if it has no row.
    """

    epoch: Epoch
    is_held: bool
    row: int | None
    origin: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTableSnapshot:
    """A lease table at one moment.

    Attributes:
        words: of the slots that are not empty, by slot.
        leases: by slot.
        held: slots of the leases that wait for a consumer's report.
        pending: number of leases of which more can be read when the device has finished a step or a copy.
        headers: of the rows that are not empty, by row: the words of origin and present epoch.
    """

    words: dict[int, int]
    leases: dict[int, LeaseSnapshot]
    held: frozenset[int]
    pending: int
    headers: dict[int, tuple[int, int]]


class LeaseTable:
    """`slots` slots of two words in host memory at a fixed address.

    Args:
        mirror: where blocks are copied to before they may be read; None where peers read the caches.
        rows: of prompts that are read while they are computed.
        memory: where the slots are, uint64 `[slots, 2]`; None for memory of its own.

    Attributes:
        words, progress: uint64 `[slots]`, the two words of every slot, which alternate in memory.
        held: slots of the leases that wait for a `done`.
        pending: by slot the leases of which more can be read when the device has finished a step or a copy.
    """

    def __init__(
        self,
        slots: int,
        mirror: HostMirror | None = None,
        rows: StreamRowTable | None = None,
        memory: NDArray[np.uint64] | None = None,
    ) -> None:
        # The two words of a slot are neighbours: a consumer reads both at once.
        if memory is None:
            memory = np.empty((slots, 2), dtype=np.uint64)
        memory[:] = EMPTY
        self.words = memory[:, 0]
        self.progress = memory[:, 1]
        self._leases: dict[int, _ServedLease] = {}
        self.held: set[int] = set()
        self.pending: dict[int, _ServedLease] = {}
        self._mirror = mirror
        self._rows = rows if rows is not None else StreamRowTable()
        self._lock = threading.Lock()

    @property
    def address(self) -> LeaseTableAddress:
        """The table's address, for consumers."""
        return LeaseTableAddress(
            address=int(self.words.ctypes.data), slots=len(self.words)
        )

    @property
    def num_bytes(self) -> int:
        return len(self.words) * SLOT_BYTES

    def snapshot(self) -> LeaseTableSnapshot:
        """The leases and the table's memory now. May be called on any thread."""
        with self._lock:
            return LeaseTableSnapshot(
                words={
                    int(slot): int(self.words[slot])
                    for slot in np.flatnonzero(self.words)
                },
                leases={
                    slot: LeaseSnapshot(
                        epoch=lease.epoch,
                        is_held=lease.request_id is not None,
                        row=lease.stream.row,
                        origin=lease.stream.origin,
                    )
                    for slot, lease in self._leases.items()
                },
                held=frozenset(self.held),
                pending=len(self.pending),
                headers=self._rows.snapshot(),
            )

    def open(self, order: LeaseOpen) -> None:
        """Open a lease: its request runs and writes the blocks. An earlier lease of the slot that was not held ends;
        with a row, it goes on under another epoch, and nothing of what was published under the old one counts."""
        epoch = epoch_from_text(order.epoch)
        origin = epoch_from_text(order.origin or order.epoch)
        with self._lock:
            lease = _ServedLease(epoch, ServedStream(origin))
            former = self._leases.get(order.slot)
            if former is not None:
                is_restarted = former.stream.origin == origin
                self._forget(order.slot, former, keeps_row=is_restarted)
            # The header before the word: a consumer that sees the new word reads the header next.
            if order.row is not None:
                self._rows.name(order.row, lease.stream, epoch)
            self._leases[order.slot] = lease
            self.words[order.slot] = slot_word(epoch, SlotState.COMPUTING)

    def publish(self, order: LeaseProgress) -> bool:
        """Write the blocks that a step computes of a prompt into the lease's row.

        Returns:
            True if the order must be completed when the step ends (`complete`). False if its lease is over: then or
            because the order did not fit the row, which is an internal error.
        """
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            if lease is None:
                return False
            try:
                self._rows.extend(lease.stream, order, lease.epoch)
            except LocalProtocolError:
                # Orders were lost. What follows would be listed at the wrong places, and consumers would read others'
                # blocks.
                internal_errors.log(
                    f"the lease of slot {order.slot} cannot be read any more"
                )
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
        waves: deque[Blocks] = deque()
        if self._mirror is not None:
            waves = self._mirror.waves(order.blocks)
        with self._lock:
            lease = self._find(order.slot, order.epoch)
            # Reported at once: nobody else would report it, and its blocks would stay held.
            if lease is None:
                return order.request_id
            lease.request_id = order.request_id
            lease.mark = mark
            lease.waves = waves
            self.held.add(order.slot)
            if mark is not None:
                self.pending[order.slot] = lease
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
            self.pending[order.slot] = lease

    def advance(self) -> bool:
        """Report the tokens of the leases with a step that the device has finished; set the held ones READY whose mark
        is reached, or begin to copy their blocks.

        Returns:
            Whether there were any.
        """
        with self._lock:
            pending = list(self.pending.items())
        has_advanced = False
        for slot, lease in pending:
            # Marks ask the device, so they are asked without the lock: the step thread opens leases meanwhile.
            tokens = 0
            if lease.stream.steps:
                tokens = lease.stream.take_tokens()
            is_reached = lease.mark is not None and lease.mark.reached()
            if not tokens and not is_reached:
                continue
            has_advanced = True
            must_copy = is_reached and bool(lease.waves)
            with self._lock:
                # It has ended meanwhile: its blocks may be another request's, and are not copied.
                if self.pending.get(slot) is not lease:
                    continue
                if tokens:
                    self.progress[slot] = progress_word(lease.epoch, tokens)
                if is_reached and not must_copy:
                    lease.mark = None
                    self.words[slot] = slot_word(lease.epoch, SlotState.READY)
                # At the end of the queue, so that others come first next time; and before the copy, which may raise.
                del self.pending[slot]
                if lease.mark is not None or lease.stream.steps:
                    self.pending[slot] = lease
            if must_copy and self._mirror is not None:
                copied = self._mirror.try_copy(lease.waves)
                if copied is not None:
                    lease.mark = copied
        return has_advanced

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
        opens leases: so none of a later step's is ended.

        Returns:
            For each the request, if it was held and has not been reported: report it now.
        """
        with self._lock:
            # vLLM's first model runner calls the hooks of a step's end in a `finally`, so a step that raised looks like
            # any other to what was marked there.
            doubtful = {
                slot: lease
                for slot, lease in self._leases.items()
                if not self._is_ready(slot, lease)
            }
            for slot in doubtful:
                self._clear(slot)
            return [lease.request_id for lease in doubtful.values()]

    def end_all(self) -> list[str]:
        """End every lease. May be called on any thread.

        Returns:
            The requests that were held and have not been reported: report them now.
        """
        with self._lock:
            # All words before anything else: what is read from now on does not count.
            self.words[:] = EMPTY
            ended = list(self._leases.values())
            for slot in list(self._leases):
                self._clear(slot)
            return [lease.request_id for lease in ended if lease.request_id is not None]

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
            is_new = message.consumer not in lease.reports
            # Bounded: whoever knows the epoch can name any number of consumers.
            if is_new and len(lease.reports) >= MAX_CONSUMERS:
                raise InvalidMessage(
                    "consumer",
                    message.consumer,
                    f"at most {MAX_CONSUMERS} consumers under one lease",
                )
            reports = lease.reports.setdefault(message.consumer, _Reports())
            # A bit, not a number: a worker whose message comes twice must not stand for its sibling, which still reads.
            reports.workers |= 1 << message.worker
            reports.expected = max(reports.expected, message.expected)
            return self._finish_if_complete(message.slot, lease)

    def clear(self) -> None:
        """End every lease: the memory is about to be used for something else."""
        self.end_all()
        with self._lock:
            self.progress[:] = EMPTY
            self._rows.headers[:] = EMPTY

    def _find(self, slot: int, epoch: str) -> _ServedLease | None:
        """The lease of this slot and epoch. Orders and messages for a former lease of the slot find none."""
        lease = self._leases.get(slot)
        if lease is None or lease.epoch != epoch_from_text(epoch):
            return None
        return lease

    def _finish_if_complete(self, slot: int, lease: _ServedLease) -> str | None:
        """End a held lease, if all workers of a consumer have reported. One consumer is enough: a lease is for one."""
        if lease.request_id is None:
            return None
        for reports in lease.reports.values():
            if reports.workers.bit_count() >= reports.expected:
                self._clear(slot)
                return lease.request_id
        return None

    def _clear(self, slot: int) -> None:
        # The word first of all: from now on no read that is under way counts.
        self.words[slot] = EMPTY
        self._forget(slot, self._leases.pop(slot))

    def _forget(
        self, slot: int, lease: _ServedLease, *, keeps_row: bool = False
    ) -> None:
        self.progress[slot] = EMPTY
        self.held.discard(slot)
        self.pending.pop(slot, None)
        if lease.stream.row is not None and not keeps_row:
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
        self._pauses = LockPauses()

    def take(self) -> bool:
        """Take the notifications that have arrived. Returns whether there were any.

        Raises:
            FabricError: the fabric failed.
        """
        arrived = self._fabric.take_notifications()
        for count, (sender, frame) in enumerate(arrived, start=1):
            if count % _NOTIFICATIONS_AT_ONCE == 0:
                self._pauses.pause()
            try:
                done = decode_notification(frame)
                request_id = self._table.done(done)
                logger.debug(
                    "slot=%d done by worker %d of %s",
                    done.slot,
                    done.worker,
                    done.consumer,
                )
                if request_id is not None:
                    with self._results as results:
                        results.sent.add(request_id)
            except InvalidMessage as invalid:
                self._invalid.warning(
                    "ignored a notification of %s: %s", sender, invalid
                )
                with self._results as results:
                    results.counts["bad_notifications"] += 1
            except KeyError:
                # Ordinary: the lease has expired, or all had reported already.
                logger.debug("ignored a notification of %s: no such lease", sender)
                with self._results as results:
                    results.counts["late_notifications"] += 1
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log(
                    "one notification is lost; the others are processed"
                )
        return bool(arrived)
