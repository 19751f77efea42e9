"""Memory of a device, by CUDA IPC: what one process has allocated there, opened in another one.

    exporter                                           importer
    region: the driver's allocation that it lies in →  opened by its handle, once a process; the region found in it
    a copy of the first file's proof, on the device →  read through what was opened, compared with the file's

The lease table and the rows lie in a file (`host_memory`), which the fence reads as everywhere else.

*Never run on a chip.* What becomes of an importer's context when the exporter dies while a kernel reads its memory is
not known, so it is opt-in (docs/gpu-check.md has the experiment).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import msgspec
import torch

from kvferry.protocol.handshake import DeviceAllocation, SharedMemory
from kvferry.worker.device import Device
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.peer_memory.host_memory import FileMemory, OpenedFileMemory
from kvferry.worker.peer_memory.port import PROOF_BYTES, DeviceBytes, NotMappable
from kvferry.worker.peer_memory.shared_file import SharedFile, has_begun_to_exit
from kvferry.worker.peer_memory.this_process import (
    check_near,
    ipc_namespace,
    this_process,
)

OFF_BY_DEFAULT = "CUDA IPC is off by default until it has been tried on a GPU (mapped_reads: cuda_ipc)"
"""Why caches on a device are not mapped unless an operator asks for it."""


class DriverAllocation(NamedTuple):
    """One allocation of the driver's, as its own process sees it. `generation`: its number in that process."""

    start: int
    num_bytes: int
    generation: int


class IpcDriver(Protocol):
    """CUDA's driver for one device: `CudaIpcDriver` (`cuda_driver`), and a fake (`tests/fakes/ipc_driver.py`).

    Attributes:
        device: its UUID, 32 hexadecimal digits.
    """

    device: str

    def allocation_at(self, address: int) -> DriverAllocation:
        """The allocation that an address of this process lies in.

        Raises:
            NotMappable: it cannot be exported; with the reason.
        """
        ...

    def export(self, start: int) -> bytes:
        """The handle of an allocation, 64 bytes.

        Raises:
            NotMappable: the driver refuses.
        """
        ...

    def open(self, handle: bytes, device: str) -> DriverAllocation:
        """Map an allocation of another process, which lies on the device of this UUID.

        Raises:
            NotMappable: the driver refuses, or this device does not reach that one.
        """
        ...

    def close(self, start: int) -> None:
        """Unmap it; raises nothing."""
        ...

    def read(self, address: int, num_bytes: int) -> bytes:
        """Bytes of the device's memory, or of what is mapped there. Waits for nothing but the copy.

        Raises:
            NotMappable: the driver refuses.
        """
        ...


class _MappedAllocation:
    """An allocation of another process while it is mapped here: until its last user is gone.

    Raises:
        NotMappable: the driver refuses, or it is not what was described.
    """

    def __init__(self, driver: IpcDriver, described: DeviceAllocation) -> None:
        self._driver = driver
        self._start: int | None = None
        self.mapped = driver.open(described.handle, described.device)
        self._start = self.mapped.start

    def __del__(self) -> None:
        if self._start is not None:
            self._driver.close(self._start)

    def part(self, described: DeviceAllocation) -> DeviceBytes:
        """What is described, in this allocation.

        Raises:
            NotMappable: it reaches out of it, or the allocation has another size.
        """
        if self.mapped.num_bytes != described.allocation_bytes:
            raise NotMappable(
                f"an allocation of the device has {self.mapped.num_bytes} bytes; "
                f"described as {described.allocation_bytes}"
            )
        if described.offset + described.num_bytes > self.mapped.num_bytes:
            raise NotMappable(
                f"{described.num_bytes} bytes at {described.offset} reach out of an allocation "
                f"of {self.mapped.num_bytes}"
            )
        return DeviceBytes(
            self.mapped.start + described.offset, described.num_bytes, self
        )


class OpenedDeviceMemory:
    """What one process shares of a device, and its files. See `OpenedMemory`."""

    def __init__(
        self,
        files: OpenedFileMemory,
        device_allocations: tuple[DeviceBytes, ...],
        shared: SharedMemory,
    ) -> None:
        self._files = files
        self._shared = shared
        self.allocations = files.allocations
        self.device_allocations = device_allocations

    def has_exited(self) -> bool:
        """See `OpenedMemory`."""
        return self._files.has_exited()

    def may_be_freed(self) -> bool:
        """See `OpenedMemory`."""
        return self.has_exited() or has_begun_to_exit(
            self._shared.pid, self._shared.allocations[0]
        )

    def close(self) -> None:
        """See `OpenedMemory`."""
        self._files.close()


class CudaIpcMemory:
    """`PeerMemory` of caches on a device.

    Args:
        device: that the caches lie on.
        driver: for this device.
    """

    def __init__(self, device: Device, driver: IpcDriver) -> None:
        self._device = device
        self._driver = driver
        self._files = FileMemory()
        self._proof: torch.Tensor | None = None
        # The generation beside the handle: the driver may give the next allocation at an address the same handle.
        self._mapped: WeakValueDictionary[tuple[int, bytes, int], _MappedAllocation] = (
            WeakValueDictionary()
        )

    def add_file(self, file: SharedFile) -> None:
        """See `PeerMemory`; waits for the device, so call it when the caches are registered."""
        self._files.add_file(file)
        if self._proof is None:
            self._proof = self._device.empty(PROOF_BYTES)
            self._proof.copy_(file.tensor[-PROOF_BYTES:])
            self._device.synchronize()

    def export(self, regions: Sequence[Region]) -> SharedMemory:
        """See `PeerMemory`."""
        in_files = [region for region in regions if region.kind is MemoryKind.DRAM]
        shared = self._files.export(in_files)
        if shared.why_not is not None:
            return shared
        try:
            allocations = tuple(
                self._described(region.address, region.length)
                for region in regions
                if region.kind is MemoryKind.VRAM
            )
            proof = None
            if self._proof is not None:
                proof = self._described(self._proof.data_ptr(), PROOF_BYTES)
        except NotMappable as not_mappable:
            return msgspec.structs.replace(this_process(), why_not=str(not_mappable))
        return msgspec.structs.replace(
            shared, device_allocations=allocations, device_proof=proof
        )

    def open(self, shared: SharedMemory) -> OpenedDeviceMemory:
        """See `PeerMemory`."""
        check_near(shared)
        if not shared.device_allocations or shared.device_proof is None:
            raise NotMappable(
                "the producer's caches are in host memory, this engine's on a device"
            )
        # What one of the two does not know is taken for the same: the driver refuses what it cannot open.
        if len({shared.ipc_namespace, ipc_namespace()} - {None}) > 1:
            raise NotMappable(
                "the producer is in another IPC namespace: start both containers with --ipc=host, or hostIPC"
            )
        files = self._files.open_files(shared)
        opened = tuple(
            self._part(shared.pid, each) for each in shared.device_allocations
        )
        proof = self._part(shared.pid, shared.device_proof)
        if proof.num_bytes != PROOF_BYTES:
            raise NotMappable(
                f"a proof of {proof.num_bytes} bytes; expected {PROOF_BYTES}"
            )
        found = self._driver.read(proof.address, PROOF_BYTES)
        if found != files.allocations[0][-PROOF_BYTES:].tobytes():
            raise NotMappable("what CUDA IPC has opened is not the producer's memory")
        return OpenedDeviceMemory(files, opened, shared)

    def _described(self, address: int, num_bytes: int) -> DeviceAllocation:
        """A part of this process's memory, for its description.

        Raises:
            NotMappable: it cannot be exported.
        """
        allocation = self._driver.allocation_at(address)
        return DeviceAllocation(
            address=address,
            num_bytes=num_bytes,
            offset=address - allocation.start,
            allocation_bytes=allocation.num_bytes,
            handle=self._driver.export(allocation.start),
            generation=allocation.generation,
            device=self._driver.device,
        )

    def _part(self, pid: int, described: DeviceAllocation) -> DeviceBytes:
        """Memory of another process, which is mapped if it is not yet.

        Raises:
            NotMappable: the driver refuses, or it is not what was described.
        """
        key = (pid, described.handle, described.generation)
        mapped = self._mapped.get(key)
        if mapped is None:
            mapped = _MappedAllocation(self._driver, described)
            self._mapped[key] = mapped
        return mapped.part(described)
