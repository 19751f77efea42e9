"""The state that `NixlFabric` keeps of its peers, prepared lists and transfers, and the check of a read's index arrays.

A peer's life:

    add ─→ known ─remove─→ leaving ─its last read ends─→ retained ─added again─→ known
                                                      │         └─too many are retained─┐
                                                      └─a request to it has failed──────┴→ forgotten by NIXL
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
    """Check the index arrays of a read.

    NIXL would check the ranges as well, but without naming the index, and it converts other dtypes with a copy.

    Raises:
        InvalidFabricRequest: they are not C-contiguous int32[n] of one n, or an index is outside its list.
    """
    _check_side("local", local.count, local_indices)
    _check_side("remote", remote.count, remote_indices)
    if len(local_indices) != len(remote_indices):
        raise InvalidFabricRequest(
            "post read",
            f"{len(local_indices)} local indices, {len(remote_indices)} remote ones",
        )


def _is_inside(indices: Indices, count: int) -> bool:
    # A lease's slot is a single index, read twice for each load: plain integers are faster there.
    if len(indices) == 1:
        return 0 <= int(indices[0]) < count
    # One pass: as unsigned numbers, negative ones are larger than any count.
    return bool(indices.view(np.uint32).max() < count)


def _check_side(side: str, count: int, indices: Indices) -> None:
    if indices.dtype != np.int32 or indices.ndim != 1 or not indices.flags.c_contiguous:
        form = f"{indices.dtype}{list(indices.shape)}"
        raise InvalidFabricRequest(
            "post read", f"{side} indices are {form}; expected a contiguous int32[n]"
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
        # NOT_FOUND: another transfer noticed the death first, and NIXL dropped the peer's entry by
        # itself.
        if isinstance(error, (errors.disconnected, errors.not_found)):
            # The first reason stays: the later ones only say that the peer is not there any more.
            if self.lost is None:
                self.lost = reason
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
        self.raw = raw
        self.entry = entry


class NixlTransfer(Transfer):
    """`raw` is None for an empty read, which NIXL never sees."""

    __slots__ = ("entry", "failure", "raw", "state")

    def __init__(self, raw: int | None, entry: NixlPeer, state: TransferState) -> None:
        super().__init__(entry.name)
        self.raw = raw
        self.entry = entry
        self.state = state
        self.failure: FabricError | None = None


MAX_RETAINED_PEERS = 1024
"""Removed peers that NIXL still knows, at most: as many as a worker knows at once (`PeerRegistry`).

Each costs about half a megabyte and a file for as long as its process lives, whether NIXL has removed it or not. So a
smaller number saves nothing: with 256 a rotation of 300 living peers leaked a file with every contact.
"""

MAX_OPEN_FILES_FRACTION = 0.75
"""Part of the files that this process may open; with more of them open no new peer is added."""


def check_open_files() -> None:
    """Check that this process can open enough further files for vLLM.

    A removed peer that lives leaves a file open, and nothing but the end of either process closes it. Without files
    vLLM itself would fail.

    Raises:
        FabricUnavailable: more than `MAX_OPEN_FILES_FRACTION` of them are open.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Counted each time, a millisecond for some thousands, and not estimated from the peers: UCX
    # closes the connections of peers that have ended, and does not report it.
    try:
        count = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        # Not Linux: there is nothing to count.
        return
    except OSError:
        # Not one file is left to look with.
        count = limit
    if limit == resource.RLIM_INFINITY:
        return
    if count > MAX_OPEN_FILES_FRACTION * limit:
        raise FabricUnavailable(
            "add peer",
            f"{count} of {limit} files of this process are open, and no further peer is connected; raise `ulimit -n`, "
            "or restart this engine if its peers have changed thousands of times",
        )


class NixlPeers:
    """The peers of a fabric, and those that NIXL retains although they were removed.

    Args:
        load: gives a peer's metadata to NIXL.
        forget: removes an agent from NIXL; raises nothing.
        max_retained: removed peers that NIXL still knows.

    Attributes:
        leaving: number of removed peers from which reads are still in flight.
    """

    def __init__(
        self,
        load: Callable[[PeerAgent, bytes], None],
        forget: Callable[[str], None],
        max_retained: int = MAX_RETAINED_PEERS,
    ) -> None:
        self.leaving = 0
        self._load = load
        self._forget = forget
        self._max_retained = max_retained
        self._peers: dict[PeerAgent, NixlPeer] = {}
        # Metadata of removed peers that are still connected. UCX closes a connection when both ends
        # do, and NIXL closes only the end that asked for it. So a living peer that is forgotten and
        # added again would leave a connection in both processes each time (over shared memory three
        # attached segments, permanently). In the order of their removal, the longest ago first.
        self._retained: dict[str, bytes] = {}

    def __len__(self) -> int:
        """Number of those added and not removed."""
        return len(self._peers) - self.leaving

    def add(self, name: PeerAgent, metadata: bytes) -> None:
        """Add a peer. It is loaded into NIXL unless NIXL still knows it by exactly this metadata.

        Raises:
            FabricUnavailable: too many files of this process are open.
            InvalidMetadata: it is known already, or as `load`.
        """
        if name in self._peers:
            raise InvalidMetadata(
                "add peer", "the agent is known already; remove it first", name
            )
        if self._retained.get(name) == metadata:
            del self._retained[name]
        else:
            check_open_files()
            # The same name with other metadata: the peer has restarted, or registered more memory.
            if name in self._retained:
                self._drop(name)
            self._load(name, metadata)
        self._peers[name] = NixlPeer(name, metadata)

    def get(self, operation: str, peer: PeerAgent) -> NixlPeer:
        """The peer.

        Raises:
            PeerLost: it is unknown, removed, or known to be dead.
        """
        return self.check(operation, self._peers.get(peer), peer)

    def check(
        self, operation: str, entry: NixlPeer | None, peer: PeerAgent
    ) -> NixlPeer:
        """As `get`, for an entry that was looked up before: a later peer of the same name is another one."""
        if entry is None or entry.removed:
            raise PeerLost(operation, "the peer was removed or never added", peer)
        if entry.lost is not None:
            raise PeerLost(
                operation, f"the peer is known to be dead: {entry.lost}", peer
            )
        return entry

    def remove(self, peer: PeerAgent) -> None:
        """Remove a peer, once the last of its transfers has ended. Idempotent."""
        entry = self._peers.get(peer)
        if entry is None or entry.removed:
            return
        entry.removed = True
        self.leaving += 1
        self._finish_removal(entry)

    def ended(self, transfer: NixlTransfer) -> None:
        """A transfer has ended, or was released."""
        transfer.entry.in_flight.discard(transfer)
        self._finish_removal(transfer.entry)

    def clear(self) -> None:
        """Remove all of them from NIXL, once their transfers have ended."""
        for name in list(self._peers):
            self.remove(name)
        for retained in list(self._retained):
            self._drop(retained)

    def _finish_removal(self, entry: NixlPeer) -> None:
        """End a removed peer's life here, unless reads from it are in flight or it has ended already."""
        if not entry.removed or entry.in_flight:
            return
        if self._peers.get(entry.name) is not entry:
            return
        del self._peers[entry.name]
        self.leaving -= 1
        if not entry.is_sound:
            # It may be dead. Then there is no connection to save, and what NIXL keeps of it could
            # make a successor of the same name fail.
            self._forget(entry.name)
            return
        self._retained[entry.name] = entry.metadata
        if len(self._retained) > self._max_retained:
            longest_removed = next(iter(self._retained))
            self._drop(longest_removed)

    def _drop(self, name: str) -> None:
        del self._retained[name]
        self._forget(name)
