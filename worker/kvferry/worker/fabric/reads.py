"""Reads, from their post until they can write nothing more; and the release of handles.

When a read is over for certain:

| the fabric says | nothing more is written |
| --- | --- |
| DONE | from now on |
| `PeerLost`, at the post or later | from now on: the connection is gone, and what came over it with it |
| `InvalidFabricRequest` or `FabricClosed` at the post | ever: nothing was posted |
| `TransferFailed`, at the post or later | a grace after it was raised, or once the peer is known to be dead |
| anything else at the post | a grace after it was raised: it is unknown what was posted, and nothing can be polled |
| anything else later | when it says one of the above |

Why a grace: the posted parts of a failed transfer have been cancelled, and NIXL cannot report whether in time. Bytes
under way are written as soon as the network delivers them, or never, once the connection gives up. With UCX's defaults
a queue pair gives up after 7 retries of 1 s (`UCX_RC_RETRY_COUNT`, `UCX_RC_TIMEOUT`), which hardware may stretch four
times: about half a minute. `FAILED_READ_GRACE_S` is twice that. It is a bound for networks, not for stopped peers: one
that was stopped while it served a read by messages (TCP) may answer whenever it continues. So far only lost peers
have been seen to fail reads over UCX; the rule covers cases that have not been seen.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence, Set

import numpy as np

from kvferry.protocol.ids import EMPTY
from kvferry.protocol.stream_rows import PAGE_IDS
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
)

FAILED_READ_GRACE_S = 60.0
"""How long memory stays out of use after a read into it has failed; see the module."""

LET_GO_S = 50e-6
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
            `LET_GO_S`.
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
        self._refused: list[Handle] = []

    def reads(self) -> Reads:
        """Reads of one owner of memory."""
        return Reads(self)

    def give_back(self, handle: Handle) -> None:
        """Release a handle, or remove a peer. Raises nothing; a handle that the fabric refuses is kept for a retry."""
        if not self._try_give_back(handle):
            self._refused.append(handle)

    def refused(self) -> Collection[Handle]:
        """Handles that the fabric refused to take back, which should never happen."""
        return self._refused

    def try_again(self) -> None:
        """Give back again the handles that the fabric refused."""
        refused, self._refused = self._refused, []
        for handle in refused:
            self.give_back(handle)

    def _try_give_back(self, handle: Handle) -> bool:
        try:
            if isinstance(handle, str):
                self.fabric.remove_peer(handle)
            else:
                self.fabric.release(handle)
        except FabricClosed:
            return True  # it went with the fabric
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log(
                f"{type(handle).__name__} could not be given back; it is tried again"
            )
            return False
        return True


class Reads:
    """Reads into memory that belongs to one owner. `settle` returns True once none of them can write to it any more."""

    __slots__ = ("_failed", "_posted", "_reader", "_unconfirmed_posts")

    def __init__(self, reader: FabricReader) -> None:
        self._reader = reader
        self._posted: list[Transfer] = []
        self._failed: dict[Transfer, float] = {}
        self._unconfirmed_posts: list[float] = []

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
        """`Fabric.post_read`; what it raises is remembered where something may have been posted."""
        reader = self._reader
        begun_s = reader.clock()
        try:
            transfer = reader.fabric.post_read(local, local_indices, remote, remote_indices)
        except (InvalidFabricRequest, PeerLost, FabricClosed):
            raise
        except Exception:
            self._unconfirmed_posts.append(reader.clock())
            raise
        self._posted.append(transfer)
        posted_s = reader.clock()
        if posted_s - begun_s >= LET_GO_S:
            reader.gil_released_at_s = posted_s
        return transfer

    def until_done(self, transfers: Sequence[Transfer]) -> Generator[None, None, None]:
        """Poll these transfers until all are DONE; raises what `Fabric.poll` raises. None is given back."""
        poll = self._reader.fabric.poll
        while transfers := [one for one in transfers if poll(one) is TransferState.IN_FLIGHT]:
            yield

    def finished(self, transfer: Transfer) -> None:
        """Give back a transfer that `poll` reported as DONE and whose telemetry has been read."""
        self._posted.remove(transfer)
        self._failed.pop(transfer, None)
        self._reader.give_back(transfer)

    def settle(self) -> bool:
        """Give back the transfers that have ended; raises nothing.

        Returns:
            Whether nothing can be written any more.
        """
        now_s = self._reader.clock()
        for transfer in [transfer for transfer in self._posted if self._is_over(transfer, now_s)]:
            self.finished(transfer)
        doubts = [
            since_s for since_s in self._unconfirmed_posts if now_s < since_s + self._reader.grace_s
        ]
        self._reader.graces_over += len(self._unconfirmed_posts) - len(doubts)
        self._unconfirmed_posts = doubts
        return not self._posted and not self._unconfirmed_posts

    def _is_over(self, transfer: Transfer, now_s: float) -> bool:
        try:
            return self._reader.fabric.poll(transfer) is TransferState.DONE
        except PeerLost:
            return True
        except FabricError:
            since_s = self._failed.setdefault(transfer, now_s)
            is_over = now_s >= since_s + self._reader.grace_s
            self._reader.graces_over += is_over
            return is_over
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log("a transfer's state is unknown; its memory stays out of use")
            return False


class EntryBuffer:
    """Memory in equal entries, in which small reads land. An entry belongs to one reader until it is given back.

    Reads of a peer that stands still keep their entries until it goes on. So a peer gets no entry that would leave
    fewer free than it then has: whatever peers stand still, there are some for the next one.

    Attributes:
        memory: `[entries, numbers of an entry]`.
        given_back: how often entries were given back.
        descriptors: of all entries, once `prepare` has made them: descriptor `i` is entry `i`.
    """

    descriptors: LocalDescriptors

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.given_back = 0
        self._free = list(range(len(memory) - 1, -1, -1))
        self._held: Counter[str] = Counter()

    def region(self) -> Region:
        """The memory to register."""
        return Region(int(self.memory.ctypes.data), self.memory.nbytes, MemoryKind.DRAM)

    def prepare(self, fabric: Fabric) -> None:
        """Make the descriptors, once the region is registered."""
        entry_bytes = self.memory.nbytes // len(self.memory)
        row = (int(self.memory.ctypes.data), entry_bytes, 0, entry_bytes, len(self.memory))
        self.descriptors = fabric.prepare_local(DescriptorRows.of(MemoryKind.DRAM, [row]))

    def try_take(self, count: int, peer: str | None = None) -> tuple[int, ...] | None:
        """`count` entries, or None when there are not as many.

        Args:
            peer: the peer to be read from, for its share; None for no peer's, which may be all.
        """
        least = 0 if peer is None else self._held[peer] + count
        if len(self._free) - count < least:
            return None
        if peer is not None:
            self._held[peer] += count
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, entries: tuple[int, ...], peer: str | None = None) -> None:
        """Return entries that no read can write any more, and that were taken for `peer`."""
        if not entries:
            return
        self.given_back += 1
        self._free.extend(entries)
        if peer is not None:
            self._held[peer] -= len(entries)
            if not self._held[peer]:
                del self._held[peer]

    def free(self) -> int:
        """Number of free entries."""
        return len(self._free)

    def free_entries(self) -> Set[int]:
        """The free entries."""
        return set(self._free)


class SlotReads(EntryBuffer):
    """Where slots and the headers of rows land, of two words each.

    Attributes:
        words, progress: uint64 `[entries]`, the first and the second word of each entry.
    """

    def __init__(self, entries: int) -> None:
        super().__init__(np.full((entries, 2), EMPTY, dtype=np.uint64))
        self.words, self.progress = self.memory[:, 0], self.memory[:, 1]


ID_PAGES = 256


class IdPages(EntryBuffer):
    """Where pages of a row's block ids land: uint32 `[ID_PAGES, PAGE_IDS]`."""

    def __init__(self) -> None:
        super().__init__(np.zeros((ID_PAGES, PAGE_IDS), dtype=np.uint32))
