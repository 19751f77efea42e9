"""Reads, from their post to the moment from which nothing of them can be written any more; and giving handles back.

When a read is over for certain:

| the fabric says | nothing more is written |
| --- | --- |
| DONE | from now on |
| `PeerLost`, at the post or later | from now on: the connection is gone, and what came over it with it |
| `InvalidRequest` or `FabricClosed` at the post | ever: nothing was posted |
| `TransferFailed`, at the post or later | a grace after it was said, or once the peer is known to be dead |
| anything else at the post | a grace after it was said: nobody knows what was posted, and there is nothing to ask |
| anything else later | when it says one of the above |

Why a grace. What was posted of a failed transfer has been cancelled, and NIXL cannot say whether in time. What is under
way lands as soon as the network delivers it, or never, once the connection gives up. With UCX's defaults a queue pair
gives up after 7 retries of 1 s (`UCX_RC_RETRY_COUNT`, `UCX_RC_TIMEOUT`), of which hardware may take four times as much:
about half a minute. `FAILED_READ_GRACE_S` is twice that. It is a bound for networks, not for peers that stand still:
one that was stopped while it served a read by messages (TCP) may answer whenever it goes on. So far only lost peers
have been seen to fail reads over UCX; the rule is for what has not been seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator

from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import (
    Fabric,
    FabricClosed,
    FabricError,
    Indices,
    InvalidRequest,
    LocalDescriptors,
    PeerAgent,
    PeerLost,
    RemoteDescriptors,
    Transfer,
    TransferState,
)

FAILED_READ_GRACE_S = 60.0
"""How long memory stays out of use after a read into it has failed; see the module."""

LET_GO_S = 50e-6
"""A post that takes so long has copied, or waited, without the interpreter's lock: whoever wanted that has had it."""

Handle = Transfer | LocalDescriptors | RemoteDescriptors | PeerAgent
"""What a fabric hands out and wants back."""


class Reader:
    """The fabric as loads and first contacts use it. Used on the thread that owns the fabric.

    Args:
        grace_s: how long memory stays out of use after a read into it has failed.
        clock: monotonic seconds.

    Attributes:
        graces_over: reads whose memory came back because the grace was over, and nothing better was known.
        let_go_s: by `clock`, when a post last came back that had let go of the interpreter's lock for `LET_GO_S`.
    """

    def __init__(
        self, fabric: Fabric, grace_s: float = FAILED_READ_GRACE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fabric = fabric
        self.grace_s = grace_s
        self.clock = clock
        self.graces_over = 0
        self.let_go_s = -math.inf
        self._refused: list[Handle] = []

    def reads(self) -> Reads:
        """Reads of one owner of memory."""
        return Reads(self)

    def give_back(self, handle: Handle) -> None:
        """Release a handle, or remove a peer. Raises nothing; what the fabric does not take now is offered again."""
        if not self._try_give_back(handle):
            self._refused.append(handle)

    def refused(self) -> Collection[Handle]:
        """What the fabric did not take, which it never should."""
        return self._refused

    def try_again(self) -> None:
        """Offer again what the fabric did not take."""
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
            internal_errors.log(f"{type(handle).__name__} could not be given back; it is tried again")
            return False
        return True


class Reads:
    """Reads into memory that belongs to one owner. `settle` says when the memory is the owner's alone again."""

    __slots__ = ("_doubts", "_failed", "_posted", "_reader")

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._posted: list[Transfer] = []
        self._failed: dict[Transfer, float] = {}
        self._doubts: list[float] = []

    def __len__(self) -> int:
        """Transfers that have not been given back."""
        return len(self._posted)

    def __iter__(self) -> Iterator[Transfer]:
        """These transfers."""
        return iter(self._posted)

    def post(
        self, local: LocalDescriptors, local_indices: Indices, remote: RemoteDescriptors, remote_indices: Indices
    ) -> Transfer:
        """`Fabric.post_read`; what it raises is remembered where something may have been posted."""
        reader = self._reader
        begun_s = reader.clock()
        try:
            transfer = reader.fabric.post_read(local, local_indices, remote, remote_indices)
        except (InvalidRequest, PeerLost, FabricClosed):
            raise
        except Exception:
            self._doubts.append(reader.clock())
            raise
        self._posted.append(transfer)
        posted_s = reader.clock()
        if posted_s - begun_s >= LET_GO_S:
            reader.let_go_s = posted_s
        return transfer

    def finished(self, transfer: Transfer) -> None:
        """`poll` said DONE, and everything about the transfer has been asked: give it back."""
        self._posted.remove(transfer)
        self._failed.pop(transfer, None)
        self._reader.give_back(transfer)

    def settle(self) -> bool:
        """Give back what has come to an end; raises nothing.

        Returns:
            Whether nothing can be written any more.
        """
        now_s = self._reader.clock()
        for transfer in [transfer for transfer in self._posted if self._is_over(transfer, now_s)]:
            self.finished(transfer)
        doubts = [since_s for since_s in self._doubts if now_s < since_s + self._reader.grace_s]
        self._reader.graces_over += len(self._doubts) - len(doubts)
        self._doubts = doubts
        return not self._posted and not self._doubts

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
            internal_errors.log("a transfer's state cannot be told; its memory stays out of use")
            return False
