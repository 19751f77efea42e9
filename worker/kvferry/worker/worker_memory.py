"""All memory of a worker that the fabric reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.handshake import MAX_ALLOCATIONS, CacheGroup, SharedMemory
from kvferry.protocol.slots import (
    SLOT_BYTES,
)
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.port import Fabric, MemoryKind, Region
from kvferry.worker.fabric.reads import IdPages, SlotReads
from kvferry.worker.leases import LeaseTable, StreamRowTable, bytes_of_rows
from kvferry.worker.peer_memory.cuda_driver import CudaIpcDriver
from kvferry.worker.peer_memory.cuda_ipc import OFF_BY_DEFAULT, CudaIpcMemory
from kvferry.worker.peer_memory.host_memory import FileMemory
from kvferry.worker.peer_memory.port import NoPeerMemory, NotMappable, PeerMemory
from kvferry.worker.peer_memory.shared_file import SharedFile
from kvferry.worker.peer_memory.this_process import this_process
from kvferry.worker.peers.mapped_route import Mapper
from kvferry.worker.relayout.reference import ReferenceRelayout
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from kvferry.worker.staging.buffer import Staging
from kvferry.worker.staging.host_buffer import HostMirror
from kvferry.worker.staging.pool import StagingPool

STAGING_BYTES = 256 << 20
STAGING_BYTES_ON_HOST = 64 << 20
"""Default sizes of the staging pool, on a device and in host memory."""

MAPPED_TABLES = 4
"""Launches from mapped memory of a device that may be under way at once, each with a table of 2 MiB on both sides."""

_ENTRIES_PER_LOAD = 8
_MORE_ENTRIES = 4096
"""Entries for slot reads: one for each producer worker of each load that runs, more for the polls of parked ones."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The memory of one worker.

    Attributes:
        caches: the KV caches.
        mirror: the copy of the caches that peers read; None where they read the caches.
        table: the lease table, which peers read.
        rows: of prompts that peers read while they are computed.
        slot_reads, id_pages: where peers' lease slots, and the block ids of their rows, are read to.
        staging: the staging pool; None without one.
        regions: what the fabric registers.
        mapper: keeps what is shared, and maps what others share.
        shared: what processes of this host can map.
    """

    caches: KvCaches
    mirror: HostMirror | None
    table: LeaseTable
    rows: StreamRowTable
    slot_reads: SlotReads
    id_pages: IdPages
    staging: Staging | None
    regions: tuple[Region, ...]
    mapper: Mapper
    shared: SharedMemory

    @classmethod
    def allocate(
        cls, caches: KvCaches, groups: Sequence[CacheGroup], settings: WorkerSettings
    ) -> WorkerMemory:
        """Allocate all of it, pinned.

        Raises:
            InvalidConfig: the host memory that the settings require cannot be allocated.
        """
        # All of it, at registration: nothing is allocated once the engine has captured its graphs. First what pins
        # nothing, and so needs not be undone if the rest fails.
        peer_memory, lease_file, shared = _share(caches, settings)
        mapper = _mapper(caches, peer_memory)
        slot_reads = SlotReads(_ENTRIES_PER_LOAD * settings.max_loads + _MORE_ENTRIES)
        id_pages = IdPages()
        staging = _staging(caches, settings)
        mirror = None
        # Only engines that others read from have a copy: it is as large as the caches.
        if settings.host_buffer and settings.is_read_from:
            try:
                mirror = HostMirror(caches, groups)
            except BaseException:
                if staging is not None:
                    staging.unpin()
                raise
        if lease_file is None:
            rows = StreamRowTable(settings.row_blocks)
            table = LeaseTable(settings.lease_slots, mirror, rows)
            table_region = Region(
                table.address.address, table.num_bytes, MemoryKind.DRAM
            )
            regions = [table_region, *rows.regions()]
        else:
            memory = lease_file.tensor.numpy()
            table_bytes = settings.lease_slots * SLOT_BYTES
            slots, in_rows, _ = np.split(
                memory, np.cumsum((table_bytes, bytes_of_rows(settings.row_blocks)))
            )
            rows = StreamRowTable(settings.row_blocks, in_rows)
            slots = slots.view(np.uint64).reshape(-1, 2)
            table = LeaseTable(settings.lease_slots, mirror, rows, slots)
            # The whole file: its proof is read over the fabric too.
            regions = [lease_file.region]
        regions += [slot_reads.region(), id_pages.region()]
        # With a host buffer the fabric never accesses the caches themselves.
        if mirror is not None:
            regions += mirror.caches.regions()
        elif not settings.host_buffer:
            regions += caches.regions()
        if staging is not None:
            regions.append(staging.region())
        return cls(
            caches=caches,
            mirror=mirror,
            table=table,
            rows=rows,
            slot_reads=slot_reads,
            id_pages=id_pages,
            staging=staging,
            regions=tuple(regions),
            mapper=mapper,
            shared=shared,
        )

    @property
    def pool(self) -> StagingPool | None:
        """The pool of `staging`; None without one."""
        return self.staging.pool if self.staging is not None else None

    @property
    def exported(self) -> KvCaches:
        """The caches as peers read them."""
        if self.mirror is not None:
            return self.mirror.caches
        return self.caches

    def register(self, fabric: Fabric) -> None:
        """Register all of it.

        Raises:
            FabricError: the fabric refuses it.
        """
        fabric.register(self.regions)
        self.slot_reads.prepare(fabric)
        self.id_pages.prepare(fabric)

    def unpin(self) -> None:
        """Undo the pinning, once nothing reads or writes the memory any more. Idempotent."""
        if self.mirror is not None:
            for memory in self.mirror.memory:
                memory.unpin()
        if self.staging is not None:
            self.staging.unpin()


def _share(
    caches: KvCaches, settings: WorkerSettings
) -> tuple[PeerMemory, SharedFile | None, SharedMemory]:
    """What shares and maps memory, the file for the lease table and the rows, and what is shared; without a file
    nothing is, and the last says why.

    Raises:
        InvalidConfig: there is too little memory for the file.
    """
    memory = _peer_memory(caches, settings)
    why_not = memory.export(caches.regions()).why_not
    if why_not is None:
        why_not = _why_not_shared(caches, settings)
    if why_not is not None:
        return memory, None, msgspec.structs.replace(this_process(), why_not=why_not)
    table_bytes = settings.lease_slots * SLOT_BYTES
    try:
        lease_file = SharedFile(table_bytes + bytes_of_rows(settings.row_blocks))
    except OSError as error:
        raise InvalidConfig(
            "mapped_reads",
            settings.mapped_reads.value,
            f"memory for the lease table ({error.strerror}), or `off`",
        ) from None
    memory.add_file(lease_file)
    return memory, lease_file, memory.export((lease_file.region, *caches.regions()))


def _peer_memory(caches: KvCaches, settings: WorkerSettings) -> PeerMemory:
    if settings.mapped_reads is MappedReadsOption.OFF:
        return NoPeerMemory("mapped_reads is off")
    if not caches.device.is_cuda:
        return FileMemory(caches.shared)
    if settings.mapped_reads is not MappedReadsOption.CUDA_IPC:
        return NoPeerMemory(OFF_BY_DEFAULT)
    try:
        return CudaIpcMemory(caches.device, CudaIpcDriver(caches.device))
    except NotMappable as not_mappable:
        return NoPeerMemory(str(not_mappable))


def _why_not_shared(caches: KvCaches, settings: WorkerSettings) -> str | None:
    """Why caches that could be shared are not."""
    if settings.host_buffer:
        return "peers read a copy of the caches (kv_buffer_device)"
    allocations = len(caches.regions())
    # One more is the file of the lease table.
    if allocations >= MAX_ALLOCATIONS:
        return f"the caches lie in {allocations} allocations; expected less than {MAX_ALLOCATIONS}"
    return None


def _mapper(caches: KvCaches, peer_memory: PeerMemory) -> Mapper:
    """How this worker copies from what it maps."""
    if not isinstance(peer_memory, CudaIpcMemory):
        return Mapper(
            peer_memory, partial(ReferenceRelayout, destinations=caches.storages)
        )
    # Imported here: CPU engines have no Triton.
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    # One for all peers, now: nothing is allocated or compiled once the engine has captured its graphs.
    relayout = TritonRelayout((), caches.storages, caches.device, tables=MAPPED_TABLES)
    return Mapper(peer_memory, relayout.reading)


def _staging(caches: KvCaches, settings: WorkerSettings) -> Staging | None:
    """The staging pool of the settings; None if it has no bytes.

    Raises:
        InvalidConfig: there must be one.
    """
    capacity = settings.staging_pool_bytes
    if capacity is None:
        capacity = STAGING_BYTES if caches.device.is_cuda else STAGING_BYTES_ON_HOST
    if settings.host_buffer and not capacity:
        raise InvalidConfig(
            "staging_pool_bytes",
            0,
            "more than 0 with a host buffer: everything goes through the pool",
        )
    if not capacity:
        return None
    return Staging(caches, capacity, on_host=settings.host_buffer)
