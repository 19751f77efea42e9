"""`MemoryFabric`: the port to the fabric inside one process, without NIXL; memory is really copied.

It passes `tests/worker/fabric/test_conformance.py` like the real one, and `MemoryNetwork` breaks it on demand:

    network = MemoryNetwork()
    producer, consumer = MemoryFabric("p", network), MemoryFabric("c", network)
    network.freeze("p")          # … reads stay in flight
    network.thaw("p")            # … and land at the next poll
    network.kill("p")            # … poll and post raise PeerLost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.worker.fabric.errors import (
    DescriptorOutOfRange,
    FabricClosed,
    FabricError,
    FabricUnavailable,
    InvalidFabricRequest,
    InvalidMetadata,
    PeerLost,
    TransferFailed,
)
from kvferry.worker.fabric.metadata_envelope import (
    check_agent_name,
    open_metadata,
    wrap_metadata,
)
from kvferry.worker.fabric.nixl import check_index_pairs
from kvferry.worker.fabric.port import (
    MAX_NOTIFICATION_BYTES,
    DescriptorRows,
    Indices,
    LocalDescriptors,
    MemoryKind,
    OpenHandles,
    PeerAgent,
    Region,
    RemoteDescriptors,
    Transfer,
    TransferState,
    TransferTelemetry,
)
from tests.fakes.memory_network import (
    Agent,
    AgentBody,
    Copy,
    MemoryNetwork,
    expand,
    lies_within,
)

__all__ = ["MemoryFabric", "MemoryNetwork"]


@dataclass(slots=True, eq=False)
class _Peer:
    name: PeerAgent
    agent: Agent
    regions: list[Region]
    in_flight: set[_Transfer] = field(default_factory=set)
    removed: bool = False
    lost: bool = False


class _Local(LocalDescriptors):
    def __init__(self, rows: DescriptorRows) -> None:
        super().__init__(rows.count)
        self.descriptors: npt.NDArray[np.int64] = expand(rows)


class _Remote(RemoteDescriptors):
    def __init__(self, rows: DescriptorRows, entry: _Peer) -> None:
        super().__init__(rows.count, entry.name)
        self.entry = entry
        self.descriptors: npt.NDArray[np.int64] = expand(rows)


class _Transfer(Transfer):
    def __init__(self, entry: _Peer, copy: Copy) -> None:
        self.peer = entry.name
        self.entry = entry
        self.copy = copy
        self.failure: FabricError | None = None


_Handle = TypeVar("_Handle", _Local, _Remote, _Transfer)


class MemoryFabric:
    """One agent on a `MemoryNetwork`. See `kvferry.worker.fabric.port.Fabric` for what the methods promise."""

    def __init__(self, agent_name: str, network: MemoryNetwork) -> None:
        check_agent_name(agent_name)
        self.agent_name = agent_name
        self.network = network
        self._agent = network.join(agent_name)
        self.registered: list[Region] = []
        self._peers: dict[PeerAgent, _Peer] = {}
        self._handles: set[_Local | _Remote | _Transfer] = set()
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        self._open("register")
        refused = [
            region for region in regions if region.address <= 0 or region.length < 1
        ]
        if refused:
            raise FabricUnavailable("register", f"{refused[0]} was refused")
        self.registered += regions

    def slow_within_host(self, kind: MemoryKind, *, shares_ipc: bool) -> str | None:
        return None if shares_ipc else "the two are apart"

    def metadata(self) -> bytes:
        self._open("metadata")
        regions = tuple(
            (region.address, region.length, region.kind, region.device)
            for region in self.registered
        )
        return wrap_metadata(
            self.agent_name,
            msgspec.msgpack.encode(AgentBody(self._agent.incarnation, regions)),
        )

    def add_peer(self, metadata: bytes) -> PeerAgent:
        self._open("add peer")
        name, raw = open_metadata(metadata)
        peer = PeerAgent(name)
        if name == self.agent_name or peer in self._peers:
            raise InvalidMetadata(
                "add peer",
                "the agent is this agent or known already; remove it first",
                peer,
            )
        try:
            body = msgspec.msgpack.decode(raw, type=AgentBody)
        except msgspec.DecodeError as error:
            raise InvalidMetadata("add peer", str(error), peer) from error
        agent = self.network.agent_of(body)
        if agent is None or agent.name != name:
            raise InvalidMetadata("add peer", "no agent of this network made it", peer)
        self._peers[peer] = _Peer(
            peer, agent, [Region(*region) for region in body.regions]
        )
        return peer

    def remove_peer(self, peer: PeerAgent) -> None:
        self._open("remove peer")
        entry = self._peers.get(peer)
        if entry is not None:
            entry.removed = True
            self._forget_if_removed(entry)

    def prepare_local(self, rows: DescriptorRows) -> LocalDescriptors:
        self._open("prepare local")
        if not lies_within(rows, self.registered):
            raise DescriptorOutOfRange(
                "prepare local", "rows do not lie in registered regions"
            )
        return self._keep(_Local(rows))

    def prepare_remote(
        self, peer: PeerAgent, rows: DescriptorRows
    ) -> RemoteDescriptors:
        self._open("prepare remote")
        entry = self._peer("prepare remote", self._peers.get(peer), peer)
        if not lies_within(rows, entry.regions):
            raise DescriptorOutOfRange(
                "prepare remote", "rows do not lie in registered regions", peer
            )
        return self._keep(_Remote(rows, entry))

    def post_read(
        self,
        local: LocalDescriptors,
        local_indices: Indices,
        remote: RemoteDescriptors,
        remote_indices: Indices,
    ) -> Transfer:
        self._open("post read")
        source, target = self._own(remote, _Remote), self._own(local, _Local)
        entry = self._peer("post read", source.entry, source.peer)
        check_index_pairs(target, local_indices, source, remote_indices)
        into, out_of = (
            target.descriptors[local_indices],
            source.descriptors[remote_indices],
        )
        if (into[:, 1] != out_of[:, 1]).any():
            raise InvalidFabricRequest(
                "post read", "a pair of descriptors differs in length", source.peer
            )
        if len(local_indices) and not entry.agent.alive:
            entry.lost = True
            raise PeerLost("post read", "the peer is dead", entry.name)
        pieces = list(
            zip(
                into[:, 0].tolist(),
                out_of[:, 0].tolist(),
                into[:, 1].tolist(),
                strict=True,
            )
        )
        transfer = self._keep(_Transfer(entry, self.network.start(entry.agent, pieces)))
        if not transfer.copy.complete:
            entry.in_flight.add(transfer)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        self._open("poll")
        mine = self._own(transfer, _Transfer)
        if mine.failure is not None:
            if isinstance(mine.failure, TransferFailed) and mine.entry.lost:
                mine.failure = PeerLost(
                    "poll", "it had failed, and then the peer died", mine.peer
                )
            raise mine.failure
        copy = mine.copy
        if not copy.complete and not copy.owner.alive:
            mine.entry.lost = True
            mine.failure = PeerLost("poll", "the peer died", mine.peer)
        elif not copy.complete and not copy.owner.frozen:
            copy.advance()
            if copy.fails and copy.landed * 2 >= len(copy.pieces):
                mine.failure = TransferFailed("poll", "the test wanted it", mine.peer)
        if copy.complete or mine.failure is not None:
            self._end(mine)
        if mine.failure is not None:
            raise mine.failure
        return TransferState.DONE if copy.complete else TransferState.IN_FLIGHT

    def telemetry(self, transfer: Transfer) -> TransferTelemetry | None:
        self._open("telemetry")
        mine = self._own(transfer, _Transfer)
        if mine.failure is not None or not mine.copy.complete or not mine.copy.pieces:
            return None
        moved = sum(length for _, _, length in mine.copy.pieces)
        return TransferTelemetry(
            bytes=moved, descriptors=len(mine.copy.pieces), post_us=0.0, transfer_us=0.0
        )

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        if (
            not isinstance(handle, (_Local, _Remote, _Transfer))
            or handle not in self._handles
        ):
            return
        self._handles.remove(handle)
        if isinstance(handle, _Transfer):
            if not handle.copy.complete and handle.failure is None:
                self.network.released.append(handle.copy)
            self._end(handle)

    def notify(self, peer: PeerAgent, message: bytes) -> None:
        self._open("notify")
        entry = self._peer("notify", self._peers.get(peer), peer)
        if len(message) > MAX_NOTIFICATION_BYTES:
            raise InvalidFabricRequest(
                "notify", f"the message has {len(message)} bytes", peer
            )
        self.network.deliver(self.agent_name, entry.agent, bytes(message))

    def take_notifications(self) -> list[tuple[str, bytes]]:
        self._open("take notifications")
        inbox, arrived = self._agent.inbox, []
        while inbox:  # one by one: the sender may be on another thread
            arrived.append(inbox.popleft())
        return arrived

    def open_handles(self) -> OpenHandles:
        transfers = sum(isinstance(handle, _Transfer) for handle in self._handles)
        leaving = sum(peer.removed for peer in self._peers.values())
        return OpenHandles(
            transfers,
            len(self._handles) - transfers,
            len(self._peers) - leaving,
            leaving,
        )

    def close(self) -> None:
        if self._closed:
            return
        for handle in list(self._handles):
            self.release(handle)
        self._peers.clear()
        self._closed = True
        self._agent.alive = False

    def _open(self, operation: str) -> None:
        if self._closed:
            raise FabricClosed(operation, f"agent {self.agent_name} is closed")

    def _peer(self, operation: str, entry: _Peer | None, peer: PeerAgent) -> _Peer:
        if entry is None or entry.removed or entry.lost:
            raise PeerLost(
                operation,
                "the peer was removed, never added, or is known to be dead",
                peer,
            )
        return entry

    def _own(
        self,
        handle: Transfer | LocalDescriptors | RemoteDescriptors,
        kind: type[_Handle],
    ) -> _Handle:
        if not isinstance(handle, kind) or handle not in self._handles:
            raise InvalidFabricRequest(
                "use handle",
                f"{type(handle).__name__} was released or is not of this fabric",
            )
        return handle

    def _keep(self, handle: _Handle) -> _Handle:
        self._handles.add(handle)
        return handle

    def _end(self, transfer: _Transfer) -> None:
        transfer.entry.in_flight.discard(transfer)
        self._forget_if_removed(transfer.entry)

    def _forget_if_removed(self, entry: _Peer) -> None:
        if (
            entry.removed
            and not entry.in_flight
            and self._peers.get(entry.name) is entry
        ):
            del self._peers[entry.name]
