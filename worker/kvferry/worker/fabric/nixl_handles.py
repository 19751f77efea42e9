"""The state that `NixlFabric` keeps of its peers, prepared lists and transfers, and the index arrays of a read.

Index arrays are checked before NIXL sees them. Peers that were removed while they lived are still connected: UCX closes
a connection when both ends do, and NIXL closes only the end that asked for it. So a peer that is added, removed and
added again would leave a connection in both processes each time, for as long as both live (over shared memory three
attached segments, permanently). Living peers are therefore removed from NIXL only when there are too many.

Each of those that are removed leaves a file open, and nothing but the end of either process closes it. So no new peer
is added once most files of this process are open: without files vLLM itself would fail.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.worker.fabric.agent import NixlErrors
from kvferry.worker.fabric.errors import (
    FabricError,
    FabricUnavailable,
    InvalidFabricRequest,
    InvalidMetadata,
    PeerLost,
    TransferFailed,
)
from kvferry.worker.fabric.port import (
    Indices,
    LocalDescriptors,
    PeerAgent,
    RemoteDescriptors,
    Transfer,
    TransferState,
)


def check_index_pairs(
    local: LocalDescriptors,
    local_indices: Indices,
    remote: RemoteDescriptors,
    remote_indices: Indices,
) -> None:
    """Raise `InvalidFabricRequest` unless both are C-contiguous int32[n] of one n and every index is inside its list.

    NIXL would check the ranges as well, but without naming the index, and it converts other dtypes with a copy.
    """
    _check_side("local", local.count, local_indices)
    _check_side("remote", remote.count, remote_indices)
    if len(local_indices) != len(remote_indices):
        raise InvalidFabricRequest(
            "post read", f"{len(local_indices)} local indices, {len(remote_indices)} remote ones"
        )


def _is_inside(indices: Indices, count: int) -> bool:
    if len(indices) == 1:  # a lease's slot, read twice for each load
        return 0 <= int(indices[0]) < count
    # One pass: as unsigned numbers, negative ones are larger than any count.
    return bool(indices.view(np.uint32).max() < count)


def _check_side(side: str, count: int, indices: Indices) -> None:
    if indices.dtype != np.int32 or indices.ndim != 1 or not indices.flags.c_contiguous:
        found = f"{indices.dtype}{list(indices.shape)}"
        raise InvalidFabricRequest(
            "post read", f"{side} indices are {found}; expected a contiguous int32[n]"
        )
    if len(indices) and not _is_inside(indices, count):
        outside = indices[(indices < 0) | (indices >= count)]
        raise InvalidFabricRequest(
            "post read", f"{side} index {outside[0]} is outside [0, {count})"
        )


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer from `add_peer` to its end. `removed` peers stay until the last of `in_flight` has ended.

    Attributes:
        metadata: NIXL's part of the peer's metadata.
        is_sound: no request to it has failed or was given up.
    """

    name: PeerAgent
    metadata: bytes
    in_flight: set[NixlTransfer] = field(default_factory=set)
    removed: bool = False
    lost: str | None = None
    is_sound: bool = True

    def failure(
        self, operation: str, error: Exception, errors: NixlErrors
    ) -> PeerLost | TransferFailed:
        """The port's error for what NIXL raised about this peer, which is marked as lost if it is."""
        reason = errors.describe(error)
        self.is_sound = False
        # NOT_FOUND: another transfer noticed the death first, and NIXL dropped the peer's entry by itself.
        if isinstance(error, (errors.disconnected, errors.not_found)):
            self.lost = self.lost or reason
            return PeerLost(operation, reason, self.name)
        return TransferFailed(operation, reason, self.name)


class NixlLocal(LocalDescriptors):
    __slots__ = ("raw",)

    def __init__(self, raw: int, count: int) -> None:
        super().__init__(count)
        self.raw = raw


class NixlRemote(RemoteDescriptors):
    __slots__ = ("entry", "raw")

    def __init__(self, raw: int, count: int, entry: NixlPeer) -> None:
        super().__init__(count, entry.name)
        self.raw, self.entry = raw, entry


class NixlTransfer(Transfer):
    """`raw` is None for an empty read, which NIXL never sees."""

    __slots__ = ("entry", "failure", "raw", "state")

    def __init__(self, raw: int | None, entry: NixlPeer, state: TransferState) -> None:
        super().__init__(entry.name)
        self.raw, self.entry, self.state = raw, entry, state
        self.failure: FabricError | None = None


MOST_PARTED = 1024
"""As many as a worker knows at once (`PeerRegistry`). Each costs about half a megabyte and a file for as long as its
process lives, whether NIXL has removed it or not; so with 256 a rotation of 300 living peers leaked, and saved nothing.
"""

MOST_OPEN_FILES = 0.75
"""Fraction of this process's files; more are open when no new peer is added."""


def check_open_files() -> None:
    """Raise `FabricUnavailable` if most of the files that this process may have are open.

    They are counted, a millisecond for some thousands: connections of peers that have ended are closed by UCX, which
    does not report it.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not Linux
        return
    except OSError:  # not one is left to look with
        count = most
    if most != resource.RLIM_INFINITY and count > MOST_OPEN_FILES * most:
        raise FabricUnavailable(
            "add peer",
            f"{count} of {most} files of this process are open, and no further peer is connected; raise `ulimit -n`, "
            "or restart this engine if its peers have changed thousands of times",
        )


class NixlPeers:
    """The peers of a fabric, and those that NIXL still knows although they were removed.

    Args:
        load: gives a peer's metadata to NIXL.
        forget: removes an agent from NIXL; raises nothing.
    """

    def __init__(
        self,
        load: Callable[[PeerAgent, bytes], None],
        forget: Callable[[str], None],
        most_parted: int = MOST_PARTED,
    ) -> None:
        self.leaving = 0
        self._load = load
        self._forget = forget
        self._most_parted = most_parted
        self._peers: dict[PeerAgent, NixlPeer] = {}
        self._parted: dict[str, bytes] = {}  # the one left first is first

    def __len__(self) -> int:
        """Number of those added and not removed."""
        return len(self._peers) - self.leaving

    def add(self, name: PeerAgent, metadata: bytes) -> None:
        """Add a peer, which NIXL gets unless it still knows it by exactly this metadata.

        Raises:
            FabricUnavailable: too many files of this process are open.
            InvalidMetadata: it is known already, or as `load`.
        """
        if name in self._peers:
            raise InvalidMetadata("add peer", "the agent is known already; remove it first", name)
        if self._parted.get(name) == metadata:
            del self._parted[name]
        else:
            check_open_files()
            if name in self._parted:
                self._drop(name)
            self._load(name, metadata)
        self._peers[name] = NixlPeer(name, metadata)

    def get(self, operation: str, peer: PeerAgent) -> NixlPeer:
        """The peer. Raises PeerLost unless it is known, not removed, and not known to be dead."""
        return self.check(operation, self._peers.get(peer), peer)

    def check(self, operation: str, entry: NixlPeer | None, peer: PeerAgent) -> NixlPeer:
        """As `get`, for a peer that was found before."""
        if entry is None or entry.removed:
            raise PeerLost(operation, "the peer was removed or never added", peer)
        if entry.lost is not None:
            raise PeerLost(operation, f"the peer is known to be dead: {entry.lost}", peer)
        return entry

    def remove(self, peer: PeerAgent) -> None:
        """Remove a peer, once the last of its transfers has ended. Idempotent."""
        entry = self._peers.get(peer)
        if entry is not None and not entry.removed:
            entry.removed = True
            self.leaving += 1
            self._part_if_removed(entry)

    def ended(self, transfer: NixlTransfer) -> None:
        """A transfer has ended, or was released."""
        transfer.entry.in_flight.discard(transfer)
        self._part_if_removed(transfer.entry)

    def clear(self) -> None:
        """Remove all of them from NIXL, once their transfers have ended."""
        for name in list(self._peers):
            self.remove(name)
        for parted in list(self._parted):
            self._drop(parted)

    def _part_if_removed(self, entry: NixlPeer) -> None:
        if not entry.removed or entry.in_flight or self._peers.get(entry.name) is not entry:
            return
        del self._peers[entry.name]
        self.leaving -= 1
        if not entry.is_sound:
            self._forget(entry.name)
            return
        self._parted[entry.name] = entry.metadata
        if len(self._parted) > self._most_parted:
            self._drop(next(iter(self._parted)))

    def _drop(self, name: str) -> None:
        del self._parted[name]
        self._forget(name)
