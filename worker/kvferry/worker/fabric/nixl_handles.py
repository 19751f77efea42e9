"""The state that `NixlFabric` keeps of its peers, prepared lists and transfers, and the index arrays of a read.

Index arrays are checked before NIXL sees them. Peers that were removed while they lived are still connected: UCX closes
a connection when both ends do, and NIXL closes only the end that asked for it. So a peer that is added, removed and
added again would leave a connection in both processes each time, for as long as both live (over shared memory three
attached segments, permanently). Living peers are therefore removed from NIXL only when there are too many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.worker.fabric.port import (
    FabricError,
    Indices,
    InvalidRequest,
    LocalDescriptors,
    PeerAgent,
    RemoteDescriptors,
    Transfer,
    TransferState,
)


def check_index_pairs(
    local: LocalDescriptors, local_indices: Indices, remote: RemoteDescriptors, remote_indices: Indices
) -> None:
    """Raise `InvalidRequest` unless both are C-contiguous int32[n] of one n and every index is inside its list.

    NIXL would check the ranges as well, but without naming the index, and it converts other dtypes with a copy.
    """
    _check_side("local", local.count, local_indices)
    _check_side("remote", remote.count, remote_indices)
    if len(local_indices) != len(remote_indices):
        raise InvalidRequest("post read", f"{len(local_indices)} local indices, {len(remote_indices)} remote ones")


def _is_inside(indices: Indices, count: int) -> bool:
    if len(indices) == 1:  # a lease's slot, read twice for each load
        return 0 <= int(indices[0]) < count
    # One pass: as unsigned numbers, negative ones are larger than any count.
    return bool(indices.view(np.uint32).max() < count)


def _check_side(side: str, count: int, indices: Indices) -> None:
    if indices.dtype != np.int32 or indices.ndim != 1 or not indices.flags.c_contiguous:
        found = f"{indices.dtype}{list(indices.shape)}"
        raise InvalidRequest("post read", f"{side} indices are {found}; expected a contiguous int32[n]")
    if len(indices) and not _is_inside(indices, count):
        outside = indices[(indices < 0) | (indices >= count)]
        raise InvalidRequest("post read", f"{side} index {outside[0]} is outside [0, {count})")


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


MOST_PARTED = 256
"""Each costs about half a megabyte for as long as its process lives, whether NIXL has removed it or not."""


class PartedPeers:
    """Living peers that were removed here and that NIXL still knows, by the name of their agent.

    Args:
        forget: removes a peer from NIXL.
    """

    def __init__(self, forget: Callable[[str], None], most: int = MOST_PARTED) -> None:
        self._forget = forget
        self._most = most
        self._metadata: dict[str, bytes] = {}  # the one left first is first

    def add(self, name: str, metadata: bytes) -> None:
        """Add a peer that is no longer used; the one added first is removed from NIXL if there are too many."""
        self._metadata[name] = metadata
        if len(self._metadata) > self._most:
            self._drop(next(iter(self._metadata)))

    def take(self, name: str, metadata: bytes) -> bool:
        """Whether NIXL still knows a peer by exactly this metadata; if by other metadata, remove it from NIXL."""
        if self._metadata.get(name) == metadata:
            del self._metadata[name]
            return True
        if name in self._metadata:
            self._drop(name)
        return False

    def clear(self) -> None:
        """Forget all of them."""
        for name in list(self._metadata):
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._metadata[name]
        self._forget(name)
