"""Memory of known content, in the host and on GPU 0. For the child processes only: it needs torch, which NIXL loads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cli.transfer.messages import Device, Kind, ReadsFailed
from kvferry.protocol.errors import KvferryError
from kvferry.worker.fabric.port import DescriptorRows, Fabric, MemoryKind, Region

Bytes = npt.NDArray[np.uint8]
_MAX_REASON = 400


def content(seed: int, length: int) -> Bytes:
    """`length` bytes, a multiple of 8; a prefix of every longer content of the same seed.

    The same on every machine and with every numpy, whose raw streams are fixed.
    """
    words = np.random.PCG64(seed).random_raw(length // 8)
    return words.astype("<u8", copy=False).view(np.uint8)


def count_wrong(read: Bytes, expected: Bytes) -> tuple[int, int]:
    """(bytes that differ, offset of the first of them or -1); the lengths are equal, and multiples of 8."""
    # By words first, since nearly every read is right.
    if np.array_equal(read.view(np.uint64), expected.view(np.uint64)):
        return 0, -1
    differs = read != expected
    return int(np.count_nonzero(differs)), int(np.argmax(differs))


class RegisteredMemory:
    """`length` bytes that are registered with a fabric.

    Raises:
        FabricUnavailable: they cannot be registered.
        RuntimeError: torch cannot allocate them.
    """

    def __init__(self, fabric: Fabric, kind: Kind, length: int) -> None:
        device = "cuda:0" if kind == "VRAM" else "cpu"
        self._bytes = torch.zeros(length, dtype=torch.uint8, device=device)
        self.kind = kind
        self.length = length
        self.address = self._bytes.data_ptr()
        fabric.register([Region(self.address, length, MemoryKind(kind))])

    def write(self, new: Bytes) -> None:
        """Replace the first bytes."""
        self._bytes[: len(new)].copy_(torch.from_numpy(new))

    def read(self, length: int) -> Bytes:
        """The first bytes; not a copy if they are in the host."""
        read: Bytes = self._bytes[:length].cpu().numpy()
        return read


def registered_memory(fabric: Fabric, device: Device, length: int) -> RegisteredMemory:
    """Registered memory; `auto`: on GPU 0 if torch sees one, else in the host.

    Raises:
        ReadsFailed: there is no GPU memory.
        FabricUnavailable: host memory could not be registered.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not has_gpu):
        return RegisteredMemory(fabric, "DRAM", length)
    if not has_gpu:
        raise _no_gpu_memory(f"torch {torch.__version__} sees no CUDA device")
    try:
        return RegisteredMemory(fabric, "VRAM", length)
    except (RuntimeError, KvferryError) as refused:
        raise _no_gpu_memory(str(refused)) from None


def _no_gpu_memory(why: str) -> ReadsFailed:
    reason = " ".join(why.split())[:_MAX_REASON]
    return ReadsFailed(f"no GPU memory here ({reason}); --device cpu does without")


def rows_of(kind: Kind, address: int, length: int, run_bytes: int) -> DescriptorRows:
    """`length` bytes at an address, in descriptors of `run_bytes`."""
    row = (address, run_bytes, 0, run_bytes, length // run_bytes)
    return DescriptorRows.from_tuples(MemoryKind(kind), [row])
