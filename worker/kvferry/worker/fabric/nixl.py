"""`NixlFabric`: the port to the fabric (`fabric.port`), over NIXL. Nothing else in kvferry uses NIXL.

First come NIXL's raw agent, with its settings and the names of its errors; then the peers, prepared lists and transfers
that the fabric keeps account of, since NIXL's handles are bare numbers; then the fabric itself. A peer's life:

    add ─→ known ─remove─→ leaving ─its last read ends─→ retained ─added again─→ known
                                                      │         └─too many are retained─┐
                                                      └─a request to it has failed──────┴→ forgotten by NIXL
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

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

PROGRESS_INTERVAL_US = 20_000
"""The progress thread is event driven, and woken at least this often; 0.2 % of a core."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """How an agent is made.

    Attributes:
        backends: NIXL plugins, in order.
        progress_thread: serve peers, and send messages, also while the agent is not called. Without it a message that
            was sent before the connection stands leaves only while something is polled here (seen: never, on an idle
            sender).
        num_threads: extra threads of the UCX and LIBFABRIC backends, 0 for none (see NIXL).
    """

    backends: tuple[str, ...] = ("UCX",)
    progress_thread: bool = True
    num_threads: int = 0


def load_bindings() -> ModuleType:
    """NIXL's bindings, from the package (nixl_cu12, nixl_cu13 …) that the meta package `nixl` chose.

    Raises:
        FabricUnavailable: there is none.
    """
    try:
        api = importlib.import_module("nixl._api")
        # `nixl` re-exports the names of the package that it chose, so the module of one of them
        # tells which.
        package = sys.modules[api.nixl_agent.__module__].__package__
        return importlib.import_module(f"{package}._bindings")
    except (ImportError, AttributeError, KeyError) as error:
        reason = f"the Python package nixl is not usable: {error}; pip install 'kvferry[worker]'"
        raise FabricUnavailable("load NIXL", reason) from error


class NixlErrors:
    """The exceptions that a call into the bindings can raise, grouped by the port's errors."""

    def __init__(self, bindings: ModuleType) -> None:
        self.disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self.not_found: type[Exception] = bindings.nixlNotFoundError
        self.invalid: tuple[type[Exception], ...] = (
            bindings.nixlInvalidParamError,
            bindings.nixlMismatchError,
        )
        named = [
            error
            for name, error in vars(bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        ]
        # pybind11 raises the others for C++ exceptions (std::length_error is ValueError, and so on)
        # and for arguments and results that do not convert.
        self.every: tuple[type[Exception], ...] = (
            *named,
            RuntimeError,
            ValueError,
            IndexError,
            OverflowError,
            MemoryError,
            TypeError,
        )

    @staticmethod
    def describe(error: BaseException) -> str:
        """One line for a `FabricError`'s reason."""
        return f"{type(error).__name__}: {error}"


def make_agent(bindings: ModuleType, agent_name: str, config: AgentConfig) -> Any:
    """The raw agent, with its backends started.

    Raises:
        FabricUnavailable: a backend is not installed or does not start, as with `UCX_TLS` settings that leave it no
            transport.
    """
    # Not `nixl_agent`, the wrapper of NIXL's Python package: it fixes the delay of the progress
    # thread at zero. The thread then calls `poll(timeout=0)` for ever and takes a whole core, and
    # no environment variable changes it. The delay can only be set here, before the agent is made.
    raw = bindings.nixlAgentConfig()
    raw.useProgThread = config.progress_thread
    raw.pthrDelay = PROGRESS_INTERVAL_US
    raw.useListenThread = False
    # One thread owns a fabric, so the agent needs no locks. Two threads on one agent gain nothing
    # (measured).
    raw.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    raw.captureTelemetry = True
    try:
        agent = bindings.nixlAgent(agent_name, raw)
        installed = agent.getAvailPlugins()
        missing = [name for name in config.backends if name not in installed]
        if missing:
            raise FabricUnavailable(
                "make agent", f"NIXL has no backend {missing}; it has {installed}"
            )
        for name in config.backends:
            agent.createBackend(name, _backend_options(name, config))
    except NixlErrors(bindings).every as error:
        reason = f"backends {list(config.backends)}: {NixlErrors.describe(error)}"
        if isinstance(error, bindings.nixlNotFoundError):
            reason += "; a library that the plugin needs is missing: NIXL_LOG_LEVEL=INFO names it"
        raise FabricUnavailable("make agent", reason) from error
    return agent


def _backend_options(backend: str, config: AgentConfig) -> dict[str, str]:
    if config.num_threads > 0 and backend in ("UCX", "LIBFABRIC"):
        return {"num_threads": str(config.num_threads)}
    return {}


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
    sides = (
        ("local", local.count, local_indices),
        ("remote", remote.count, remote_indices),
    )
    for side, count, indices in sides:
        is_row = indices.ndim == 1 and indices.flags.c_contiguous
        if indices.dtype != np.int32 or not is_row:
            form = f"{indices.dtype}{list(indices.shape)}"
            reason = f"{side} indices are {form}; expected a contiguous int32[n]"
            raise InvalidFabricRequest("post read", reason)
        if not len(indices):
            continue
        # A lease's slot is a single index, read twice for each load: plain integers are faster there.
        if len(indices) == 1:
            is_inside = 0 <= int(indices[0]) < count
        else:
            # One pass: as unsigned numbers, negative ones are larger than any count.
            is_inside = bool(indices.view(np.uint32).max() < count)
        if not is_inside:
            outside = indices[(indices < 0) | (indices >= count)]
            reason = f"{side} index {outside[0]} is outside [0, {count})"
            raise InvalidFabricRequest("post read", reason)
    if len(local_indices) != len(remote_indices):
        raise InvalidFabricRequest(
            "post read",
            f"{len(local_indices)} local indices, {len(remote_indices)} remote ones",
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


@dataclass(slots=True, eq=False)
class NixlTransfer(Transfer):
    """`raw` is None for an empty read, which NIXL never sees."""

    raw: int | None
    entry: NixlPeer
    state: TransferState
    failure: FabricError | None = None


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
        if not entry.in_flight:
            self._finish_removal(entry)

    def ended(self, transfer: NixlTransfer) -> None:
        """A transfer has ended, or was released."""
        entry = transfer.entry
        entry.in_flight.discard(transfer)
        if entry.removed and not entry.in_flight:
            self._finish_removal(entry)

    def clear(self) -> None:
        """Remove all of them from NIXL, once their transfers have ended."""
        for name in list(self._peers):
            self.remove(name)
        for retained in list(self._retained):
            self._drop(retained)

    def _finish_removal(self, entry: NixlPeer) -> None:
        """End a removed peer's life here, unless it has ended already."""
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
        local = NixlLocal(raw, rows.count)
        self._handles.add(local)
        return local

    def prepare_remote(
        self, peer: PeerAgent, rows: DescriptorRows
    ) -> RemoteDescriptors:
        self._open("prepare remote")
        entry = self._peers.get("prepare remote", peer)
        raw = self._prepare("prepare remote", peer, rows, peer)
        remote = NixlRemote(raw, rows.count, entry)
        self._handles.add(remote)
        return remote

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
            empty = NixlTransfer(entry.name, None, entry, TransferState.DONE)
            self._handles.add(empty)
            return empty
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
            self._quietly(agent.releaseXferReq, raw)
            raise entry.failure("post read", error, self._errors) from error
        transfer = NixlTransfer(entry.name, raw, entry, TransferState.IN_FLIGHT)
        self._handles.add(transfer)
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
        if handle.raw is not None:
            self._quietly(self._agent.releaseXferReq, handle.raw)
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
            for message in messages:
                notifications.append((sender, message))
        return notifications

    def open_handles(self) -> OpenHandles:
        transfers = sum(isinstance(handle, NixlTransfer) for handle in self._handles)
        return OpenHandles(
            transfers=transfers,
            prepared=len(self._handles) - transfers,
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

    def _quietly(self, call: Any, argument: object) -> None:
        """Clean up: NIXL's errors, such as those about a dead peer, are logged and not raised."""
        try:
            call(argument)
        except self._errors.every as error:
            logger.debug(
                "agent=%s clean-up: %s", self.agent_name, self._errors.describe(error)
            )
