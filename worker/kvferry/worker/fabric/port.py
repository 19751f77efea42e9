"""The port to the RDMA fabric: the operations that a worker needs, without their implementation.

`NixlFabric` (`kvferry.worker.fabric.nixl`) is the real one; `tests/fakes/memory_fabric.py` is a fake that copies
memory inside one process. One conformance suite, `tests/worker/fabric/test_conformance.py`, runs against both.

Order of use: `register` → `metadata` (sent to the peer) → `add_peer` (with what the peer sent) → `prepare_local`,
`prepare_remote` → `post_read` → `poll` until DONE → `release` … `remove_peer`, `close`. A fabric belongs to one
thread at a time; nothing here locks.

Errors are those of `kvferry.worker.fabric.errors`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.worker.fabric.errors import InvalidFabricRequest

PeerAgent = NewType("PeerAgent", str)
"""The name of a remote agent that this fabric knows."""

Indices: TypeAlias = npt.NDArray[np.int32]
"""[n] int32, C-contiguous: which descriptors of a prepared list take part, in order."""

MAX_DESCRIPTORS = 2**31 - 1
"""Descriptors that one prepared list can hold: they are picked by int32 indices."""

MAX_NOTIFICATION_BYTES = 64 * 1024
"""The longest message that `notify` takes."""

# Addresses are int64 in the arrays, although NIXL takes them as uint64.
_ADDRESS_END = 2**63 - 1


class MemoryKind(enum.Enum):
    """Where registered memory lies."""

    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory `[address, address + length)` of this process, in bytes, on `device` (0 for DRAM)."""

    address: int
    length: int
    kind: MemoryKind
    device: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorRows:
    """Descriptors in the compressed form that costs O(rows): row i stands for `count[i]` descriptors.

    `rows` is [R, 5] int64, columns `address, length, device, stride, count`, bytes. Descriptor j of a row is
    `[address + j·stride, address + j·stride + length)` on `device`. Descriptors are numbered row by row: with
    rows (1000, 16, 0, 64, 3) and (9000, 8, 0, 8, 2), descriptor 2 is [1128, 1144) and descriptor 3 is [9000, 9008).

    The array is copied and frozen.

    Raises:
        InvalidFabricRequest: no rows, another shape or dtype, a length or count below 1, a negative address, device or
            stride, a stride below the length where count > 1, an end beyond 2⁶³ − 1, or more than `MAX_DESCRIPTORS`
            descriptors.
    """

    kind: MemoryKind
    rows: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.ndim != 2 or rows.shape[1] != 5 or rows.dtype != np.int64:
            raise InvalidFabricRequest(
                "describe rows",
                f"rows are {rows.dtype}{list(rows.shape)}; expected int64[R, 5]",
            )
        if len(rows) == 0:
            raise InvalidFabricRequest("describe rows", "there are no rows")
        is_legal = _are_memory(rows)
        if not is_legal.all():
            row = int(np.argmin(is_legal))
            raise InvalidFabricRequest(
                "describe rows",
                f"row {row} (address, length, device, stride, count) = {tuple(rows[row].tolist())} is no memory",
            )
        # Python's sum, because numpy's would overflow: the counts come from a peer's description.
        count = sum(rows[:, 4].tolist())
        if count > MAX_DESCRIPTORS:
            raise InvalidFabricRequest(
                "describe rows", f"more than {MAX_DESCRIPTORS} descriptors in one list"
            )
        frozen = np.array(rows, order="C")
        frozen.setflags(write=False)
        object.__setattr__(self, "rows", frozen)

    @classmethod
    def from_tuples(
        cls, kind: MemoryKind, rows: Iterable[tuple[int, int, int, int, int]]
    ) -> DescriptorRows:
        """From `(address, length, device, stride, count)` tuples.

        Raises:
            InvalidFabricRequest: as the constructor does.
        """
        try:
            array = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
        except (OverflowError, ValueError, TypeError) as error:
            raise InvalidFabricRequest(
                "describe rows", f"not rows of five 64-bit integers: {error}"
            ) from error
        return cls(kind, array)

    @property
    def count(self) -> int:
        """Descriptors that the rows stand for."""
        return int(self.rows[:, 4].sum())


def _are_memory(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """bool[R]: all descriptors of the row lie in [0, 2⁶³ − 1)."""
    address, length, device, stride, count = rows.T
    is_legal: npt.NDArray[np.bool_] = (length >= 1) & (count >= 1)
    is_legal &= (address >= 0) & (device >= 0) & (stride >= 0)
    is_legal &= (count == 1) | (stride >= length)
    # The end of the last descriptor may overflow int64, so what is compared is the room behind the
    # first one. In this order nothing overflows for legal rows; illegal ones are refused whatever
    # comes out for them.
    room_after_address = _ADDRESS_END - address
    is_legal &= length <= room_after_address
    room_after_first = (
        _ADDRESS_END
        - np.maximum(address, 0)
        - np.minimum(np.maximum(length, 0), room_after_address)
    )
    is_legal &= count - 1 <= room_after_first // np.maximum(stride, 1)
    return is_legal


class LocalDescriptors:
    """Prepared descriptors of this process's memory: where reads land. Made by `prepare_local`."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


class RemoteDescriptors:
    """Prepared descriptors of a peer's memory: what reads fetch. Made by `prepare_remote`, valid with the peer."""

    __slots__ = ("count", "peer")

    def __init__(self, count: int, peer: PeerAgent) -> None:
        self.count = count
        self.peer = peer


@dataclass(slots=True, eq=False)
class Transfer:
    """A posted read. Made by `post_read`."""

    peer: PeerAgent


class TransferState(enum.Enum):
    """The states that `poll` returns; failures are raised."""

    IN_FLIGHT = "in flight"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class OpenHandles:
    """The handles of a fabric that have not been given back.

    Attributes:
        transfers: posted and not released.
        prepared: prepared lists, local and remote, that were not released.
        peers: added and not removed.
        leaving: removed peers that are still connected because reads from them are in flight.
    """

    transfers: int = 0
    prepared: int = 0
    peers: int = 0
    leaving: int = 0


@dataclass(frozen=True, slots=True)
class TransferTelemetry:
    """Size and times of a finished transfer. `descriptors` counts those that were posted, neighbours merged."""

    bytes: int
    descriptors: int
    post_us: float
    transfer_us: float


class Fabric(Protocol):
    """One agent on the fabric. Everything raises `FabricClosed` after `close`, except `release`, `open_handles` and
    `close`."""

    @property
    def agent_name(self) -> str:
        """The name under which peers know this agent and receive its notifications."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory reachable: as the destination of local reads, and for peers that get `metadata` afterwards.

        The memory stays registered until `close`; the caller keeps it mapped until then.

        Raises:
            FabricUnavailable: the fabric refuses a region. Then none of `regions` is registered.
        """
        ...

    def slow_within_host(self, kind: MemoryKind, *, shares_ipc: bool) -> str | None:
        """Why reads of such memory of another process of this host are slow, and what helps; None if they need not be.

        Args:
            shares_ipc: both processes are in one IPC namespace.
        """
        ...

    def metadata(self) -> bytes:
        """Bytes for the `add_peer` of peers: connection information and every region registered so far."""
        ...

    def add_peer(self, metadata: bytes) -> PeerAgent:
        """Add a peer by the bytes that its `metadata` returned. To replace a peer, call `remove_peer` first.

        Sends nothing; an unreachable peer is noticed by the first read. Damaged bytes are recognised, but bytes with a
        good checksum are parsed by the fabric's own library, and forged ones can crash it: take metadata from
        authenticated peers only.

        Raises:
            InvalidMetadata: the bytes are no metadata, or the agent is this one, or is known already (dead ones and
                those with a read in flight included).
            FabricUnavailable: this process has too many files open for another peer.
        """
        ...

    def remove_peer(self, peer: PeerAgent) -> None:
        """Forget a peer; its `RemoteDescriptors` are invalid from here on. Idempotent.

        Reads in flight go on and can be polled; the peer can be added again only when the last of them has ended or
        was released. The fabric decides whether it disconnects then.
        """
        ...

    def prepare_local(self, rows: DescriptorRows) -> LocalDescriptors:
        """Prepare local memory.

        Raises:
            DescriptorOutOfRange: a row does not lie in one registered region.
        """
        ...

    def prepare_remote(
        self, peer: PeerAgent, rows: DescriptorRows
    ) -> RemoteDescriptors:
        """Prepare a peer's memory.

        Raises:
            DescriptorOutOfRange: a row does not lie in one of the regions in the metadata that `add_peer` was given.
            PeerLost: the peer is unknown or known to be dead.
        """
        ...

    def post_read(
        self,
        local: LocalDescriptors,
        local_indices: Indices,
        remote: RemoteDescriptors,
        remote_indices: Indices,
    ) -> Transfer:
        """Start reading descriptor `remote_indices[i]` into `local_indices[i]`, for every i.

        The transfer may complete within the call, which then takes as long (the GIL is released). Neighbours are
        merged where both sides ascend and adjoin, so sort the pairs. Empty index arrays make a transfer that is DONE;
        nothing is sent.

        Raises:
            InvalidFabricRequest: arrays of another dtype, shape or unequal length, an index outside its list, a pair of
                descriptors of unequal length, or a released handle. Nothing was posted.
            PeerLost: the peer is gone. Parts may have been posted.
            TransferFailed: anything else, as for `poll`. Parts may have been posted.
        """
        ...

    def poll(self, transfer: Transfer) -> TransferState:
        """Advance a transfer and return its state; never waits. A transfer is sure to advance only if polled.

        What it raises it raises again on every later call. The contents of its local descriptors are then undefined.
        For a frozen peer nothing is raised: the caller sets deadlines.

        Raises:
            PeerLost: the peer is gone. Nothing more is written to the local descriptors.
            TransferFailed: anything else; something may still be written, see there. Once the peer is known to be dead,
                later calls raise `PeerLost` instead.
        """
        ...

    def telemetry(self, transfer: Transfer) -> TransferTelemetry | None:
        """Telemetry of a transfer that is DONE and not released.

        None before, for an empty transfer, or if NIXL has none.
        """
        ...

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        """Give a handle back. Idempotent; raises nothing, also for a lost peer or a closed fabric.

        Releasing a transfer that is in flight does **not** stop it: its bytes may still be written, seconds later,
        even after `remove_peer`. So release one only when `poll` returned DONE or raised, or its peer is known to be
        dead; until then its local memory must not be used for anything else. A prepared list may be released while
        transfers that were posted from it are in flight.
        """
        ...

    def notify(self, peer: PeerAgent, message: bytes) -> None:
        """Send up to `MAX_NOTIFICATION_BYTES` to a peer, without waiting.

        A message to a peer that has died unnoticed is lost without an error.

        Raises:
            PeerLost: the peer is unknown or known to be dead.
            InvalidFabricRequest: the message is longer.
            TransferFailed: anything else.
        """
        ...

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """(name of the sending agent, message) of everything that arrived since the last call.

        In order for each sender. The sender may be any agent, peer or not: the content cannot be trusted, and no
        content makes this raise.
        """
        ...

    def open_handles(self) -> OpenHandles:
        """The handles that have not been given back; in constant time. Raises nothing, not even after `close`."""
        ...

    def close(self) -> None:
        """Drop handles and peers, deregister the memory, end the agent. Idempotent.

        Its own transfers must have ended before. Reads by peers are not reliably stopped: over shared memory they
        succeed for as long as the memory stays mapped, so unmap nothing that peers may still read.
        """
        ...
