"""`NixlFabric`: the port to the fabric (`fabric.port`), over NIXL. Nothing else in kvferry uses NIXL."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvferry.worker.fabric.agent import (
    AgentConfig,
    NixlErrors,
    load_bindings,
    make_agent,
)
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
from kvferry.worker.fabric.nixl_handles import (
    NixlLocal,
    NixlPeers,
    NixlRemote,
    NixlTransfer,
    check_index_pairs,
)
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
from kvferry.worker.fabric.ucx_settings import apply_ucx_defaults, slow_within_host

logger = logging.getLogger(__name__)

_RDMA_DEVICES = Path("/sys/class/infiniband")

_Handle = TypeVar("_Handle", NixlLocal, NixlRemote, NixlTransfer)


class NixlFabric:
    """One NIXL agent. The methods are documented in `kvferry.worker.fabric.port.Fabric`.

    Args:
        agent_name: unique among all agents that ever connect to this one, so derive it from the boot and the rank.
        config: how the agent is made.
        environ: where `ucx_defaults` are looked up and set before the agent is made.

    Attributes:
        undecodable: batches of notifications that were lost, since a sender's name is not text.

    Raises:
        FabricUnavailable: NIXL or a backend cannot be used.
    """

    def __init__(
        self,
        agent_name: str,
        config: AgentConfig | None = None,
        *,
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        check_agent_name(agent_name)
        apply_ucx_defaults(environ)
        self.agent_name = agent_name
        self._nixl = load_bindings()
        self._kinds = {
            MemoryKind.DRAM: self._nixl.DRAM_SEG,
            MemoryKind.VRAM: self._nixl.VRAM_SEG,
        }
        self._errors = NixlErrors(self._nixl)
        self._environ = environ
        self._config = config or AgentConfig()
        self._agent: Any = make_agent(self._nixl, agent_name, self._config)
        self._peers = NixlPeers(self._load, self._forget)
        self._registered: list[Any] = []
        self._handles: set[NixlLocal | NixlRemote | NixlTransfer] = set()
        self._open_transfers = 0
        self.undecodable = 0

    def register(self, regions: Sequence[Region]) -> None:
        agent = self._open("register")
        registered: list[Any] = []
        try:
            # A list of NIXL's has memory of one kind only.
            for kind in MemoryKind:
                rows = [
                    (region.address, region.length, region.device)
                    for region in regions
                    if region.kind is kind
                ]
                if not rows:
                    continue
                descriptors = self._nixl.nixlRegDList(
                    self._kinds[kind], np.array(rows, dtype=np.uint64)
                )
                agent.registerMem(descriptors)
                registered.append(descriptors)
        except self._errors.every as error:
            # All or none, as the port promises: kinds that were registered before are taken back.
            for descriptors in registered:
                self._quietly(agent.deregisterMem, descriptors)
            reason = (
                f"{len(regions)} regions were refused: {self._errors.describe(error)}"
            )
            raise FabricUnavailable("register", reason) from error
        self._registered += registered

    def slow_within_host(self, kind: MemoryKind, *, shares_ipc: bool) -> str | None:
        # Other backends have settings of their own.
        if "UCX" not in self._config.backends:
            return None
        why_slow = slow_within_host(
            self._environ,
            is_device=kind is MemoryKind.VRAM,
            shares_ipc=shares_ipc,
            has_rdma=_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()),
        )
        if why_slow is None:
            return None
        return f"reads within this host go over loopback TCP: {why_slow}"

    def metadata(self) -> bytes:
        return wrap_metadata(self.agent_name, self._open("metadata").getLocalMD())

    def add_peer(self, metadata: bytes) -> PeerAgent:
        self._open("add peer")
        name, body = open_metadata(metadata)
        peer = PeerAgent(name)
        if name == self.agent_name:
            raise InvalidMetadata("add peer", "the agent is this agent", peer)
        self._peers.add(peer, body)
        return peer

    def remove_peer(self, peer: PeerAgent) -> None:
        self._open("remove peer")
        self._peers.remove(peer)

    def prepare_local(self, rows: DescriptorRows) -> LocalDescriptors:
        raw = self._prepare("prepare local", self._nixl.NIXL_INIT_AGENT, rows, None)
        return self._keep(NixlLocal(raw, rows.count))

    def prepare_remote(
        self, peer: PeerAgent, rows: DescriptorRows
    ) -> RemoteDescriptors:
        self._open("prepare remote")
        entry = self._peers.get("prepare remote", peer)
        raw = self._prepare("prepare remote", peer, rows, peer)
        return self._keep(NixlRemote(raw, rows.count, entry))

    def post_read(
        self,
        local: LocalDescriptors,
        local_indices: Indices,
        remote: RemoteDescriptors,
        remote_indices: Indices,
    ) -> Transfer:
        agent = self._open("post read")
        source = self._own(remote, NixlRemote)
        target = self._own(local, NixlLocal)
        entry = self._peers.check("post read", source.entry, source.peer)
        check_index_pairs(target, local_indices, source, remote_indices)
        if len(local_indices) == 0:
            return self._keep(NixlTransfer(None, entry, TransferState.DONE))
        try:
            # From prepared lists, because `initialize_xfer` never merges neighbours: 1,000 of
            # 4 KiB took 1,600 µs with it, and about 300 this way (measured).
            raw = agent.makeXferReq(
                self._nixl.NIXL_READ,
                target.raw,
                local_indices,
                source.raw,
                remote_indices,
            )
        except self._errors.invalid as error:
            # Ranges were checked above; only the lengths of the descriptors are left for NIXL to
            # refuse.
            raise InvalidFabricRequest(
                "post read", "a pair of descriptors differs in length", source.peer
            ) from error
        except self._errors.every as error:
            raise entry.failure("post read", error, self._errors) from error
        try:
            status = agent.postXferReq(raw)
        except self._errors.every as error:
            # Parts may have been posted, and releasing them stops nothing. The raised error says
            # so, and `Reads` keeps the memory out of use for a grace.
            self._release_raw(raw)
            raise entry.failure("post read", error, self._errors) from error
        transfer = self._keep(NixlTransfer(raw, entry, TransferState.IN_FLIGHT))
        entry.in_flight.add(transfer)
        try:
            self._advance(transfer, status)
        except FabricError:
            self.release(transfer)
            raise
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        agent = self._open("poll")
        mine = self._own(transfer, NixlTransfer)
        if mine.failure is not None:
            # A peer that another transfer found dead ends the doubt about this one's writes: its
            # owner need not wait for the grace any more.
            if isinstance(mine.failure, TransferFailed) and mine.entry.lost is not None:
                mine.failure = PeerLost(
                    "poll",
                    f"{mine.failure.reason}; and then: {mine.entry.lost}",
                    mine.peer,
                )
            # Raised once a poll for as long as the grace lasts: with its traceback the one error
            # would grow by a frame each time.
            raise mine.failure.with_traceback(None)
        if mine.state is not TransferState.IN_FLIGHT:
            return mine.state
        try:
            # Without this call an asynchronous transfer does not advance for certain, not even
            # with the progress thread on (measured: its notification was never sent).
            status = agent.getXferStatus(mine.raw)
        except self._errors.every as error:
            mine.failure = mine.entry.failure("poll", error, self._errors)
            self._peers.ended(mine)
            raise mine.failure from error
        self._advance(mine, status)
        return mine.state

    def telemetry(self, transfer: Transfer) -> TransferTelemetry | None:
        agent = self._open("telemetry")
        mine = self._own(transfer, NixlTransfer)
        is_empty = mine.raw is None
        has_its_data = mine.failure is None and mine.state is TransferState.DONE
        if is_empty or not has_its_data:
            return None
        try:
            raw = agent.getXferTelemetry(mine.raw)
        except self._nixl.nixlNoTelemetryError:
            return None
        return TransferTelemetry(
            bytes=raw.totalBytes,
            descriptors=raw.descCount,
            post_us=float(raw.postDuration),
            transfer_us=float(raw.xferDuration),
        )

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        if not isinstance(handle, (NixlLocal, NixlRemote, NixlTransfer)):
            return
        if handle not in self._handles:
            return
        self._handles.remove(handle)
        if not isinstance(handle, NixlTransfer):
            self._quietly(self._agent.releasedDlistH, handle.raw)
            return
        self._open_transfers -= 1
        self._release_raw(handle.raw)
        if handle.state is not TransferState.DONE:
            # It may still be under way, so the peer's connection is not kept for another time.
            handle.entry.is_sound = False
        self._peers.ended(handle)

    def notify(self, peer: PeerAgent, message: bytes) -> None:
        agent = self._open("notify")
        entry = self._peers.get("notify", peer)
        if len(message) > MAX_NOTIFICATION_BYTES:
            reason = f"the message has {len(message)} bytes; expected at most {MAX_NOTIFICATION_BYTES}"
            raise InvalidFabricRequest("notify", reason, peer)
        try:
            agent.genNotif(peer, message)
        except self._errors.every as error:
            raise entry.failure("notify", error, self._errors) from error

    def take_notifications(self) -> list[tuple[str, bytes]]:
        agent = self._open("take notifications")
        try:
            arrived: dict[str, list[bytes]] = agent.getNotifs({})
        except UnicodeDecodeError as error:
            # The bindings lose the whole batch if one sender's name is not UTF-8, and any agent can
            # send. kvferry's own names always are. Logged once: a sender could fill the log.
            self.undecodable += 1
            if self.undecodable == 1:
                logger.warning(
                    "agent=%s lost notifications: a sender has the name %s",
                    self.agent_name,
                    error,
                )
            return []
        except self._errors.every as error:
            raise FabricUnavailable(
                "take notifications", self._errors.describe(error)
            ) from error
        notifications: list[tuple[str, bytes]] = []
        for sender, messages in arrived.items():
            notifications += [(sender, message) for message in messages]
        return notifications

    def open_handles(self) -> OpenHandles:
        return OpenHandles(
            transfers=self._open_transfers,
            prepared=len(self._handles) - self._open_transfers,
            peers=len(self._peers),
            leaving=self._peers.leaving,
        )

    def close(self) -> None:
        agent = self._agent
        if agent is None:
            return
        # Handles before peers before memory: each refers to the next.
        for handle in list(self._handles):
            self.release(handle)
        self._peers.clear()
        for descriptors in self._registered:
            self._quietly(agent.deregisterMem, descriptors)
        self._registered.clear()
        self._agent = None

    def _open(self, operation: str) -> Any:
        if self._agent is None:
            raise FabricClosed(operation, f"agent {self.agent_name} is closed")
        return self._agent

    def _load(self, peer: PeerAgent, body: bytes) -> None:
        """Give a peer's metadata to NIXL.

        Raises:
            InvalidMetadata: NIXL refuses it, or it names another agent than the envelope.
        """
        agent = self._agent
        try:
            loaded: bytes = agent.loadRemoteMD(body)
        except self._errors.every as error:
            # NIXL keeps half of what it refused, which could make a successor of that name fail.
            self._quietly(agent.invalidateRemoteMD, peer)
            raise InvalidMetadata(
                "add peer", f"NIXL refused it: {self._errors.describe(error)}", peer
            ) from error
        if loaded != peer.encode():
            # By the envelope's name it was looked up among the known agents, so under another one
            # it may have replaced the entry of a peer that is in use.
            self._quietly(agent.invalidateRemoteMD, loaded)
            raise InvalidMetadata(
                "add peer",
                f"the envelope and NIXL's part ({loaded[:64]!r}) differ in name",
                peer,
            )

    def _forget(self, agent_name: str) -> None:
        self._quietly(self._agent.invalidateRemoteMD, agent_name)

    def _own(
        self,
        handle: Transfer | LocalDescriptors | RemoteDescriptors,
        kind: type[_Handle],
    ) -> _Handle:
        # NIXL's handles are bare numbers. Whose they are, and whether they were released, is known
        # only here.
        if not isinstance(handle, kind) or handle not in self._handles:
            raise InvalidFabricRequest(
                "use handle",
                f"{type(handle).__name__} was released or is not of this fabric",
            )
        return handle

    def _keep(self, handle: _Handle) -> _Handle:
        self._handles.add(handle)
        if isinstance(handle, NixlTransfer):
            self._open_transfers += 1
        return handle

    def _prepare(
        self, operation: str, owner: str, rows: DescriptorRows, peer: PeerAgent | None
    ) -> int:
        agent = self._open(operation)
        try:
            raw: int = agent.prepXferDlist(owner, self._kinds[rows.kind], rows.rows)
        except self._errors.not_found as error:
            reason = f"{len(rows.rows)} {rows.kind.value} rows do not lie in registered regions"
            raise DescriptorOutOfRange(operation, reason, peer) from error
        except self._errors.every as error:
            raise InvalidFabricRequest(
                operation, self._errors.describe(error), peer
            ) from error
        return raw

    def _advance(self, transfer: NixlTransfer, status: Any) -> None:
        """Record NIXL's status.

        Raises:
            TransferFailed: an error status. None has been seen: NIXL raises exceptions instead.
        """
        if status == self._nixl.NIXL_IN_PROG:
            return
        if status == self._nixl.NIXL_SUCCESS:
            transfer.state = TransferState.DONE
            self._peers.ended(transfer)
            return
        transfer.failure = TransferFailed(
            "transfer", f"NIXL's status is {status}", transfer.peer
        )
        transfer.entry.is_sound = False
        self._peers.ended(transfer)
        raise transfer.failure

    def _release_raw(self, raw: int | None) -> None:
        if raw is not None:
            self._quietly(self._agent.releaseXferReq, raw)

    def _quietly(self, call: Any, argument: object) -> None:
        """Clean up: NIXL's errors, such as those about a dead peer, are logged and not raised."""
        try:
            call(argument)
        except self._errors.every as error:
            logger.debug(
                "agent=%s clean-up: %s", self.agent_name, self._errors.describe(error)
            )
