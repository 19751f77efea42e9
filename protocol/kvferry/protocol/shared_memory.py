"""The part of a worker's description by which processes of its host map its memory, and need not read it over NIXL."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import Address, Hex128, Positive, Text

MAX_ALLOCATIONS = 256
"""Most allocations of one worker. Who maps them has a file descriptor for each, and proves each by a read."""


class SharedAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation: a sealed memory file of the worker's process (memfd).

    Attributes:
        address: of its first byte in the worker's process; the addresses of tensors and of the lease table count so.
        num_bytes: size of the file. Its last 16 bytes are random: what is read there over NIXL, and through a map, must
            be the same.
        fd: number of the file descriptor in the worker's process.
        name: of the file, new for each: a number that the process has used again is not mistaken for it.
    """

    address: Address
    num_bytes: Positive
    fd: Annotated[int, Meta(ge=0, lt=2**31)]
    name: Hex128


class DeviceAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a device, which others open with CUDA IPC: a part of one allocation of the driver's.

    An allocator that caches, such as PyTorch's, gives out parts of what it has from the driver, and a handle is of the
    whole.

    Attributes:
        address: of its first byte in the worker's process; the addresses of tensors count so.
        num_bytes: its size.
        offset: of its first byte in the driver's allocation.
        allocation_bytes: size of the driver's allocation.
        handle: that the driver opens it by.
        generation: the driver's number of the allocation; another one at the same address has another number.
        device: UUID of the device. Its number differs from process to process, with `CUDA_VISIBLE_DEVICES`.
    """

    address: Address
    num_bytes: Positive
    offset: Address
    allocation_bytes: Positive
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    generation: Address
    device: Hex128


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What other processes of a worker's host can map.

    Attributes:
        machine: the boot id of its kernel.
        pid_namespace: in which `pid` counts.
        pid: of the worker's process.
        ipc_namespace: its IPC namespace, in which UCX's shared memory is found; None if it is not known.
        allocations: files: the lease table's, and the caches' if they lie in host memory. All of them, or none.
        why_not: why there are none.
        device_allocations: the caches' if they lie on a device.
        device_proof: a copy of the last 16 bytes of the first file on that device: whoever reads the same there has
            opened memory of this process.
    """

    machine: Text
    pid_namespace: Text
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    allocations: Annotated[
        tuple[SharedAllocation, ...], Meta(max_length=MAX_ALLOCATIONS)
    ] = ()
    why_not: Text | None = None
    ipc_namespace: Text | None = None
    device_allocations: Annotated[
        tuple[DeviceAllocation, ...], Meta(max_length=MAX_ALLOCATIONS)
    ] = ()
    device_proof: DeviceAllocation | None = None
