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


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What other processes of a worker's host can map.

    Attributes:
        machine: the boot id of its kernel.
        pid_namespace: in which `pid` counts.
        pid: of the worker's process.
        ipc_namespace: its IPC namespace, in which UCX's shared memory is found; None if it is not known.
        allocations: those of its caches and of its lease table: all of them, or none.
        why_not: why there are none.
    """

    machine: Text
    pid_namespace: Text
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    allocations: Annotated[
        tuple[SharedAllocation, ...], Meta(max_length=MAX_ALLOCATIONS)
    ] = ()
    why_not: Text | None = None
    ipc_namespace: Text | None = None
