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

Releasing a read does not stop it (measured), so memory stays out of use until then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from kvferry.worker.fabric.errors import (
    FabricClosed,
    FabricError,
    InvalidFabricRequest,
    PeerLost,
    internal_errors,
)
from kvferry.worker.fabric.port import (
    Fabric,
    Indices,
    LocalDescriptors,
    PeerAgent,
    RemoteDescriptors,
    Transfer,
    TransferState,
)

# The posted parts of a failed transfer have been cancelled, but NIXL cannot report whether in time.
# Bytes under way are written as soon as the network delivers them, or never, once the connection
# gives up. With UCX's defaults a queue pair gives up after 7 retries of 1 s (`UCX_RC_RETRY_COUNT`,
# `UCX_RC_TIMEOUT`), which hardware may stretch four times: about half a minute. The grace is twice
# that. It is a bound for networks, not for stopped peers: one that was stopped while it served a
# read by messages (TCP) may answer whenever it continues. So far only lost peers have been seen to
# fail reads over UCX; the grace covers cases that have not been seen.
FAILED_READ_GRACE_S = 60.0
"""How long memory stays out of use after a read into it has failed."""

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


class Reads:
    """Reads into memory that belongs to one owner. `settle` returns True once none of them can write to it any more.

    Args:
        reader: posts them.
    """

    __slots__ = ("_failed_s", "_posted", "_reader", "_unconfirmed_posts_s")

    def __init__(self, reader: FabricReader) -> None:
        self._reader = reader
        self._posted: list[Transfer] = []
        # When a transfer was first found failed.
        self._failed_s: dict[Transfer, float] = {}
        # When a post raised after parts of it may have been posted. There is no handle to poll, so
        # nothing but the grace ends these.
        self._unconfirmed_posts_s: list[float] = []

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
        reader = self._reader
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

    def until_done(self, transfers: Sequence[Transfer]) -> Generator[None, None, None]:
        """Poll these transfers until all are DONE. None is given back.

        Raises:
            PeerLost: as `Fabric.poll`.
            TransferFailed: as `Fabric.poll`.
        """
        poll = self._reader.fabric.poll
        in_flight = list(transfers)
        while True:
            polled = in_flight
            in_flight = []
            for transfer in polled:
                if poll(transfer) is TransferState.IN_FLIGHT:
                    in_flight.append(transfer)
            if not in_flight:
                return
            yield

    def finished(self, transfer: Transfer) -> None:
        """Give back a transfer that `poll` reported as DONE and whose telemetry has been read."""
        self._posted.remove(transfer)
        self._failed_s.pop(transfer, None)
        self._reader.give_back(transfer)

    def settle(self) -> bool:
        """Give back the transfers that have ended; raises nothing.

        Returns:
            True if nothing can be written any more.
        """
        reader = self._reader
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
            return self._reader.fabric.poll(transfer) is TransferState.DONE
        except PeerLost:
            return True
        except FabricError:
            failed_s = self._failed_s.setdefault(transfer, now_s)
            if now_s < failed_s + self._reader.grace_s:
                return False
            self._reader.graces_over += 1
            return True
        except Exception:  # noqa: BLE001 - shown, with its traceback
            # Memory that is out of use for ever is the lesser harm: a wrong "over" would let a read
            # write into blocks of another request.
            internal_errors.log(
                "a transfer's state is unknown; its memory stays out of use"
            )
            return False
