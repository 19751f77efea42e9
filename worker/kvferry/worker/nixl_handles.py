"""What `NixlFabric` keeps of its peers, prepared lists and transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.worker.fabric import (
    FabricError,
    LocalDescriptors,
    PeerAgent,
    RemoteDescriptors,
    Transfer,
    TransferState,
)


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer from `add_peer` to its end. `removed` peers stay until the last of `in_flight` has ended.

    Attributes:
        metadata: NIXL's part of it.
        is_sound: nothing that was asked of it has failed, or was given up.
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
