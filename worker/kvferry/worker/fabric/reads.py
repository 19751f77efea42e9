"""Reads, from their post until they can write nothing more, the entries in which small ones land, what a load reads of
its lease with them, and the release of handles.

When a read is over for certain:

| the fabric says | nothing more is written |
| --- | --- |
| DONE | from now on |
| `PeerLost`, at the post or later | from now on: the connection is gone, and what came over it with it |
| `InvalidFabricRequest` or `FabricClosed` at the post | ever: nothing was posted |
| `TransferFailed`, at the post or later | a grace after it was raised, or once the peer is known to be dead |
| anything else at the post | a grace after it was raised: it is unknown what was posted, and nothing can be polled |
| anything else later | when it says one of the above |

Releasing a read does not stop it (measured), so memory stays out of use until then.

*Entries* are equal pieces of memory: lease slots, the headers of rows, pages of block ids. Of workers that are mapped
they are loaded here; docs/design.md says why the order of loads is enough. Of the others they are read over the fabric,
each into an entry of this worker. What a load or a poll does with them is the same.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.hosts import ChannelAddress
from kvferry.protocol.slots import EMPTY, PAGE_IDS
from kvferry.worker.fabric.errors import (
    FabricClosed,
    FabricError,
    InvalidFabricRequest,
    PeerLost,
    internal_errors,
)
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    LocalDescriptors,
    MemoryKind,
    PeerAgent,
    Region,
    RemoteDescriptors,
    Transfer,
    TransferState,
    TransferTelemetry,
)
from kvferry.worker.fabric.ucx_settings import FAILED_READ_GRACE_S

GIL_RELEASED_FROM_S = 50e-6
"""A post that takes this long has copied, or waited, without the interpreter's lock: other threads could take it."""

Handle = Transfer | LocalDescriptors | RemoteDescriptors | PeerAgent
"""Anything that a fabric hands out and that must be given back."""


class FabricReader:
    """The fabric as loads and first contacts use it. Used on the thread that owns the fabric.

    Args:
        grace_s: how long memory stays out of use after a read into it has failed.
        clock: monotonic seconds.

    Attributes:
        graces_over: reads whose memory came back only because the grace was over, since they were last taken.
        gil_released_at_s: by `clock`, when a post last returned that had released the interpreter's lock for
            `GIL_RELEASED_FROM_S` or longer.
        refused: handles that the fabric refused to take back, which should never happen.
    """

    def __init__(
        self,
        fabric: Fabric,
        grace_s: float = FAILED_READ_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fabric = fabric
        self.grace_s = grace_s
        self.clock = clock
        self.graces_over = 0
        self.gil_released_at_s = -math.inf
        self.refused: list[Handle] = []

    def give_back(self, handle: Handle) -> None:
        """Release a handle, or remove a peer. Raises nothing; a handle that the fabric refuses is kept for a retry."""
        try:
            if isinstance(handle, str):
                self.fabric.remove_peer(handle)
            else:
                self.fabric.release(handle)
        except FabricClosed:
            # It went with the fabric.
            return
        except Exception:  # noqa: BLE001 - shown, with its traceback
            # Only a bug can raise here. The handle is kept, so that nothing is reused that NIXL may
            # still write to, and the loads above go on.
            internal_errors.log(
                f"{type(handle).__name__} could not be given back; it is tried again"
            )
            self.refused.append(handle)

    def retry_refused(self) -> None:
        """Give back again the handles that the fabric refused."""
        refused = self.refused
        self.refused = []
        for handle in refused:
            self.give_back(handle)


@dataclass(slots=True, eq=False)
class Reads:
    """Reads into memory that belongs to one owner. `settle` returns True once none of them can write to it any more.

    Attributes:
        reader: posts them.
    """

    reader: FabricReader
    _posted: list[Transfer] = field(default_factory=list)
    # When a transfer was first found failed.
    _failed_s: dict[Transfer, float] = field(default_factory=dict)
    # When a post raised after parts of it may have been posted. There is no handle to poll, so
    # nothing but the grace ends these.
    _unconfirmed_posts_s: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        """Transfers that have not been given back."""
        return len(self._posted)

    def __iter__(self) -> Iterator[Transfer]:
        """These transfers."""
        return iter(self._posted)

    def post(
        self,
        local: LocalDescriptors,
        local_indices: Indices,
        remote: RemoteDescriptors,
        remote_indices: Indices,
    ) -> Transfer:
        """`Fabric.post_read`. What it raises is remembered where something may have been posted.

        Raises:
            FabricError: as `Fabric.post_read`.
        """
        reader = self.reader
        begun_s = reader.clock()
        try:
            transfer = reader.fabric.post_read(
                local, local_indices, remote, remote_indices
            )
        except (InvalidFabricRequest, PeerLost, FabricClosed):
            # Nothing was posted, or nothing more can be written: the table above.
            raise
        except Exception:
            self._unconfirmed_posts_s.append(reader.clock())
            raise
        self._posted.append(transfer)
        posted_s = reader.clock()
        if posted_s - begun_s >= GIL_RELEASED_FROM_S:
            reader.gil_released_at_s = posted_s
        return transfer

    def until_done(
        self,
        transfers: Sequence[Transfer],
        count: Callable[[TransferTelemetry | None], None] | None = None,
    ) -> Generator[None, None, None]:
        """Poll these transfers until all are DONE, and give them back.

        Args:
            count: is told what the fabric has measured of each.

        Raises:
            PeerLost, TransferFailed: as `Fabric.poll`. None is given back then.
        """
        fabric = self.reader.fabric
        in_flight = list(transfers)
        while True:
            polled = in_flight
            in_flight = []
            for transfer in polled:
                if fabric.poll(transfer) is TransferState.IN_FLIGHT:
                    in_flight.append(transfer)
            if not in_flight:
                break
            yield
        for transfer in transfers:
            # Before the transfer is given back: NIXL forgets its telemetry with it.
            if count is not None:
                count(fabric.telemetry(transfer))
            self.finished(transfer)

    def finished(self, transfer: Transfer) -> None:
        """Give back a transfer that `poll` reported as DONE and whose telemetry has been read."""
        self._posted.remove(transfer)
        self._failed_s.pop(transfer, None)
        self.reader.give_back(transfer)

    def settle(self) -> bool:
        """Give back the transfers that have ended; raises nothing.

        Returns:
            True if nothing can be written any more.
        """
        reader = self.reader
        now_s = reader.clock()
        for transfer in list(self._posted):
            if self._is_over(transfer, now_s):
                self.finished(transfer)
        still_unconfirmed_s: list[float] = []
        for raised_s in self._unconfirmed_posts_s:
            if now_s < raised_s + reader.grace_s:
                still_unconfirmed_s.append(raised_s)
            else:
                reader.graces_over += 1
        self._unconfirmed_posts_s = still_unconfirmed_s
        return not self._posted and not still_unconfirmed_s

    def _is_over(self, transfer: Transfer, now_s: float) -> bool:
        """True if this read can write nothing more."""
        try:
            return self.reader.fabric.poll(transfer) is TransferState.DONE
        except PeerLost:
            return True
        except FabricError:
            failed_s = self._failed_s.setdefault(transfer, now_s)
            if now_s < failed_s + self.reader.grace_s:
                return False
            self.reader.graces_over += 1
            return True
        except Exception:  # noqa: BLE001 - shown, with its traceback
            # Memory that is out of use for ever is the lesser harm: a wrong "over" would let a read
            # write into blocks of another request.
            internal_errors.log(
                "a transfer's state is unknown; its memory stays out of use"
            )
            return False


@dataclass(slots=True)
class ReadQueue:
    """The data reads of one peer, which share its link.

    NIXL shows nothing of a read that is under way. What was posted first may well end first, so a read progresses
    while those end that were posted before it. Those after it do not count: if a read were lost, a busy peer would
    keep its load waiting for ever.

    Attributes:
        entered: loads that have begun to read data from it. When `ended` is as many, all that are under way now have
            ended.
        ended: those of them that have ended, well or badly.
    """

    entered: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class EntriesSnapshot:
    """The entries at one moment.

    Attributes:
        count: of all entries.
        free: those that nobody has taken.
    """

    count: int
    free: tuple[int, ...]

    @property
    def taken(self) -> int:
        return self.count - len(self.free)


SlotWords: TypeAlias = tuple[tuple[int, int], ...]
"""The two words of a slot on every producer worker that a load reads from, in the order of the peer's routes."""


class EntryBuffer:
    """Memory in equal entries. An entry belongs to one reader until it is given back.

    Attributes:
        memory: `[entries, numbers of an entry]`.
        given_back: how often entries were given back.
        descriptors: of all entries, once `prepare` has made them: descriptor `i` is entry `i`.
    """

    descriptors: LocalDescriptors

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.given_back = 0
        # A stack, the lowest entry on top.
        self._free = list(range(len(memory) - 1, -1, -1))
        self._held: Counter[ChannelAddress] = Counter()

    def region(self) -> Region:
        """The memory to register."""
        return Region(int(self.memory.ctypes.data), self.memory.nbytes, MemoryKind.DRAM)

    def prepare(self, fabric: Fabric) -> None:
        """Make the descriptors, once the region is registered."""
        entries = len(self.memory)
        entry_bytes = self.memory.nbytes // entries
        row = (int(self.memory.ctypes.data), entry_bytes, 0, entry_bytes, entries)
        self.descriptors = fabric.prepare_local(
            DescriptorRows.from_tuples(MemoryKind.DRAM, [row])
        )

    def try_take(
        self, count: int, peer: ChannelAddress | None = None
    ) -> tuple[int, ...] | None:
        """`count` entries, or None when there are not as many.

        Args:
            peer: the peer to be read from, for its share; None for no peer's, which may be all.
        """
        # Whoever needs none waits for none, however many the peer holds.
        if not count:
            return ()
        must_stay_free = 0
        if peer is not None:
            # Reads of a peer that stands still keep their entries until it goes on. So a peer gets
            # no entry that would leave fewer free than it then has: whatever peers stand still,
            # there are some for the next one.
            must_stay_free = self._held[peer] + count
        if len(self._free) - count < must_stay_free:
            return None
        if peer is not None:
            self._held[peer] += count
        taken = tuple(reversed(self._free[-count:]))
        del self._free[-count:]
        return taken

    def give_back(
        self, entries: tuple[int, ...], peer: ChannelAddress | None = None
    ) -> None:
        """Return entries that no read can write any more, and that were taken for `peer`."""
        if not entries:
            return
        self.given_back += 1
        self._free.extend(entries)
        if peer is None:
            return
        self._held[peer] -= len(entries)
        # Peers come and go under new names for as long as the worker lives.
        if self._held[peer] == 0:
            del self._held[peer]

    def free(self) -> int:
        """Number of free entries."""
        return len(self._free)

    def snapshot(self) -> EntriesSnapshot:
        return EntriesSnapshot(len(self.memory), tuple(self._free))


class SlotReads(EntryBuffer):
    """Where slots and the headers of rows land, of two words each.

    Attributes:
        words: uint64 `[entries]`, the first word of each entry: a slot's epoch and state.
        progress: uint64 `[entries]`, the second word.
    """

    def __init__(self, entries: int) -> None:
        # The word of a slot without a lease: an entry that no read has written yet grants nothing.
        super().__init__(np.full((entries, 2), EMPTY, dtype=np.uint64))
        self.words = self.memory[:, 0]
        self.progress = self.memory[:, 1]


ID_PAGES = 256


class IdPages(EntryBuffer):
    """Where pages of a row's block ids land: uint32 `[ID_PAGES, PAGE_IDS]`."""

    def __init__(self) -> None:
        super().__init__(np.zeros((ID_PAGES, PAGE_IDS), dtype=np.uint32))


@dataclass(frozen=True, slots=True)
class RemoteEntries:
    """Equal entries in a producer worker's memory.

    Attributes:
        descriptors: descriptor `i` is entry `i`.
        mapped: the same memory as an array `[entries, numbers of an entry]`; None where it is not mapped.
    """

    descriptors: RemoteDescriptors
    mapped: NDArray[Any] | None


def entries_needed(sources: Sequence[RemoteEntries], wanted: int) -> int:
    """How many entries of this worker such a read needs: none of those that are mapped."""
    needed = 0
    for source in sources:
        if source.mapped is None:
            needed += wanted
    return needed


@dataclass(slots=True, eq=False)
class EntryRead:
    """A read of the same entries of every worker of a producer.

    Attributes:
        wanted: the entries, the same of each source.
        buffer: that `entries` belong to.
        entries: where they are read to, `entries_needed` of them: all of the first source that is read, then those of
            the next one.
        transfers: the reads over the fabric.
    """

    sources: Sequence[RemoteEntries]
    wanted: Indices
    buffer: EntryBuffer
    entries: tuple[int, ...]
    transfers: list[Transfer] = field(default_factory=list)

    def post(self, reads: Reads) -> None:
        """Begin it; `reads` settles it.

        Raises:
            FabricError: the fabric refuses one. Those before it are in `transfers`.
        """
        # All of it is mapped: nothing is to be done before the values are loaded.
        if not self.entries:
            return
        entries = np.array(self.entries, dtype=np.int32)
        # No lease has this word: an entry that no read has written is never taken for READY.
        self.buffer.memory[entries] = EMPTY
        count = len(self.wanted)
        first = 0
        for source in self.sources:
            if source.mapped is not None:
                continue
            into = entries[first : first + count]
            first += count
            transfer = reads.post(
                self.buffer.descriptors, into, source.descriptors, self.wanted
            )
            self.transfers.append(transfer)

    def values(self) -> NDArray[Any]:
        """What was read, `[wanted, sources, numbers of an entry]`; a copy. Call it when the transfers have ended."""
        count = len(self.wanted)
        first = 0
        columns: list[NDArray[Any]] = []
        for source in self.sources:
            if source.mapped is not None:
                columns.append(source.mapped[self.wanted])
                continue
            columns.append(
                self.buffer.memory[list(self.entries[first : first + count])]
            )
            first += count
        return np.stack(columns, axis=1)


_PAGES_AT_ONCE = 8
"""Most pages that one read takes. The pages of the worker are shared by all its loads."""


@dataclass(slots=True, eq=False)
class LeaseReads:
    """Reads of what the producer's workers say of one lease: its slot and, of a prompt that is being computed, the
    header of its row and its block ids. Each read ends, and is given back, before the next one begins.

    Attributes:
        reads: the load's, which settles them.
        peer: the producer's address, for the fairness of entries and pages.
        entries: where slots and headers are read to; kept from one read to the next.
        pages: where ids are read to.
        waits_for: of which there are too few now.
    """

    reads: Reads
    slot_reads: SlotReads
    id_pages: IdPages
    peer: ChannelAddress
    entries: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    waits_for: EntryBuffer | None = None

    def give_back(self) -> None:
        """Give the memory back. Call it when none of the load's reads can write any more."""
        self.slot_reads.give_back(self.entries, self.peer)
        self.id_pages.give_back(self.pages, self.peer)
        self.entries = ()
        self.pages = ()

    @property
    def queue_moves(self) -> int:
        """While it waits for entries or pages: grows when others give some back."""
        if self.waits_for is None:
            return 0
        return self.waits_for.given_back

    def words(
        self, sources: Sequence[RemoteEntries], index: int
    ) -> Generator[None, None, SlotWords]:
        """Read the two words of the same entry of each of these: a slot, or the header of a row.

        Raises:
            FabricError: a read failed.
        """
        # Where all are mapped, which is usual within a host, without an `EntryRead`: its arrays take ten times as long
        # as the two loads, twice in every load.
        mapped_words: list[tuple[int, int]] = []
        for source in sources:
            if source.mapped is not None:
                first, second = source.mapped[index].tolist()
                mapped_words.append((first, second))
        num_read = len(sources) - len(mapped_words)
        if not num_read:
            return tuple(mapped_words)
        if not self.entries:
            self.entries = yield from self._take(self.slot_reads, num_read)
        wanted = np.array([index], dtype=np.int32)
        read = EntryRead(sources, wanted, self.slot_reads, self.entries)
        read.post(self.reads)
        yield from self.reads.until_done(read.transfers)
        words: list[tuple[int, int]] = []
        for state, progress in read.values()[0].tolist():
            words.append((state, progress))
        return tuple(words)

    def ids(
        self, source: RemoteEntries, first_page: int, pages: Sequence[int]
    ) -> Generator[None, None, dict[int, np.ndarray]]:
        """Read pages of a row's ids: uint32 `[PAGE_IDS]` by page.

        Args:
            source: the pages of all rows of one producer worker; those of this row begin with `first_page`.

        Raises:
            FabricError: a read failed.
        """
        ids: dict[int, np.ndarray] = {}
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            part = pages[first : first + _PAGES_AT_ONCE]
            wanted = np.array([first_page + page for page in part], dtype=np.int32)
            # In `self.pages` before anything is posted: the read may fail, and they must not be lost.
            needed = entries_needed([source], len(part))
            self.pages = yield from self._take(self.id_pages, needed)
            read = EntryRead([source], wanted, self.id_pages, self.pages)
            read.post(self.reads)
            yield from self.reads.until_done(read.transfers)
            ids.update(zip(part, read.values()[:, 0], strict=True))
            self.id_pages.give_back(self.pages, self.peer)
            self.pages = ()
        return ids

    def post_slot(self, slots: RemoteEntries, slot: int) -> None:
        """Read the slot on one producer worker, for nothing. Mapped ones are not read, nor is any before the first
        `words` or after `give_back`."""
        if self.entries and slots.mapped is None:
            wanted = np.array([slot], dtype=np.int32)
            read = EntryRead([slots], wanted, self.slot_reads, self.entries[:1])
            read.post(self.reads)

    def _take(
        self, buffer: EntryBuffer, count: int
    ) -> Generator[None, None, tuple[int, ...]]:
        """Take entries of a buffer, when there are enough."""
        taken = buffer.try_take(count, self.peer)
        while taken is None:
            self.waits_for = buffer
            yield
            taken = buffer.try_take(count, self.peer)
        self.waits_for = None
        return taken
