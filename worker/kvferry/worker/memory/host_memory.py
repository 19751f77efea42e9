"""Host memory of an exact size that a device can copy from and to.

torch rounds pinned memory up to a power of two: 33 GiB would take 64. So this module maps pages, huge ones where the
system has them, and registers them with CUDA.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from kvferry.protocol.errors import InvalidConfig


class HostMemory:
    """Whole pages of private memory, zero at first and pinned until `unpin`.

    Args:
        num_bytes: at least 1; rounded up to whole pages.
        device: the device that copies from and to it; nothing is pinned for the CPU.

    Attributes:
        tensor: uint8 `[num_bytes]`, the memory without the rounding.

    Raises:
        InvalidConfig: the system has too little memory, or CUDA refuses to pin it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._mapped_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, self._mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise self._refused(f"the system's error: {error}") from None
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))[:num_bytes]
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(self.tensor.data_ptr(), self._mapped_bytes, 0))
            if code:
                raise self._refused(f"cudaHostRegister returned error {code}")

    def unpin(self) -> None:
        """Unregister the pages, once nothing copies from or to them any more. Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.tensor.data_ptr())

    def _refused(self, reason: str) -> InvalidConfig:
        return InvalidConfig(
            "kv_buffer_device",
            "cpu",
            f"room for {self._mapped_bytes} bytes of pinned host memory ({reason}): use a smaller KV cache, "
            "or raise the memory limits of the host or container (memlock included)",
        )
