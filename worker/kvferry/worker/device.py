"""The device of a worker's caches: everything that kvferry does with `torch.cuda` goes through `Device`.

A mark is reached when the work launched before it has finished. The step thread sets marks, the transfer thread polls
them. Neither waits. A thread of kvferry that uses the device calls `Device.use` first; the step thread is the engine's,
which has set it. Streams, memory and kernels are made when the caches are registered, never later: afterwards the
engine captures CUDA graphs, and a call that is unsafe during a capture breaks it, whichever thread makes it.

`tests/worker/device` holds a real device and the stand-in of the other tests to the same behaviour.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from kvferry.protocol.errors import InvalidConfig


class CudaStream(Protocol):
    """What is used of `torch.cuda.Stream`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class CudaEvent(Protocol):
    """What is used of `torch.cuda.Event`. One that was never recorded counts as passed."""

    def record(self, stream: CudaStream, /) -> None: ...
    def query(self) -> bool: ...


class Cuda(Protocol):
    """What is used of `torch.cuda`."""

    def set_device(self, device: torch.device, /) -> None: ...
    def current_stream(self, device: torch.device, /) -> CudaStream: ...
    def stream(self, stream: CudaStream, /) -> AbstractContextManager[object]: ...
    def cudart(self) -> Any: ...
    def Stream(self, device: torch.device, /) -> CudaStream: ...  # noqa: N802 (torch's name)
    def Event(self) -> CudaEvent: ...  # noqa: N802 (torch's name)


class DeviceMark(Protocol):
    """A point in the device's work."""

    def reached(self) -> bool:
        """True if everything launched before the mark has finished. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class _EventMark:
    """An event as a mark.

    Attributes:
        reached: whether torch's event has passed.
    """

    reached: Callable[[], bool]


class Device:
    """One device. One that is not CUDA is assumed to be synchronous: it has no streams, and every mark is reached.

    Args:
        where: torch's name of it, with an index.
        cuda: of which a stand-in is used in tests; `torch.cuda` by default.
    """

    def __init__(self, where: torch.device, cuda: Cuda | None = None) -> None:
        self.where = where
        self._cuda: Cuda | None = None
        if where.type == "cuda":
            self._cuda = cuda or cast("Cuda", torch.cuda)

    @property
    def is_cuda(self) -> bool:
        return self._cuda is not None

    @property
    def index(self) -> int:
        """The device in NIXL's counting: the ordinal of a GPU, 0 for host memory."""
        if not self.is_cuda:
            return 0
        return self.where.index or 0

    def use(self) -> None:
        """Make it the calling thread's current device; to be called before the thread uses it in any way."""
        if self._cuda is None:
            return
        # A thread begins with GPU 0: its first call, even an event's query, would create a context
        # there, of hundreds of megabytes for each worker of the node.
        self._cuda.set_device(self.where)
        # On GPU 0 itself `set_device` changes nothing and leaves the thread without a context, and
        # UCX, when it connects a peer on such a thread, does without NVLink. The query binds one.
        self._cuda.current_stream(self.where).query()

    def mark(self) -> DeviceMark:
        """Mark everything launched so far on the calling thread's current stream."""
        if self._cuda is None:
            # An event of the CPU has always passed.
            return _EventMark(torch.cpu.Event().query)
        # An event that was never recorded counts as passed, so it is recorded before it is given
        # out.
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self.where))
        return _EventMark(event.query)

    def synchronize(self) -> None:
        """Wait for the calling thread's current stream; it blocks, so call it only while the caches are registered."""
        if self._cuda is not None:
            self._cuda.current_stream(self.where).synchronize()

    def new_stream(self) -> CudaStream | None:
        """A stream that waits for no other; None where there are none."""
        if self._cuda is None:
            return None
        return self._cuda.Stream(self.where)

    def on(self, stream: CudaStream | None) -> AbstractContextManager[object]:
        """A context in which this stream is the calling thread's current one; None changes nothing."""
        if self._cuda is None or stream is None:
            return nullcontext()
        return self._cuda.stream(stream)

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory of the device, uint8.

        torch's allocator gives memory out while work that was launched earlier on the calling thread's current stream
        may still use it: wait for that before another stream does.
        """
        return torch.empty(shape, dtype=torch.uint8, device=self.where)

    def empty_pinned(self, *shape: int) -> torch.Tensor:
        """Host memory that the device copies from while the host goes on, uint8."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.is_cuda)

    def pin(self, memory: torch.Tensor, num_bytes: int) -> int:
        """Pin whole pages of host memory. Returns CUDA's error, 0 for none."""
        if self._cuda is None:
            return 0
        return int(
            self._cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        )

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`; waits for the device."""
        if self._cuda is not None:
            self._cuda.cudart().cudaHostUnregister(memory.data_ptr())


HOST = Device(torch.device("cpu"))


class HostMemory:
    """Host memory of an exact size: whole pages of private memory, zero at first and pinned until `unpin`.

    Args:
        num_bytes: at least 1; rounded up to whole pages.
        device: the device that copies from and to it; nothing is pinned for the CPU.

    Attributes:
        tensor: uint8 `[num_bytes]`, the memory without the rounding.

    Raises:
        InvalidConfig: the system has too little memory, or CUDA refuses to pin it.
    """

    def __init__(self, num_bytes: int, device: Device) -> None:
        # Pages are mapped and registered here because torch rounds pinned memory up to a power of
        # two: 33 GiB would take 64.
        self._mapped_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(
                -1, self._mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError) as error:
            raise self._refused(f"the system's error: {error}") from None
        # With huge pages on both sides large reads over CMA went from 10 to 17.5 GB/s (measured).
        # A kernel without them refuses.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))[:num_bytes]
        code = device.pin(self.tensor, self._mapped_bytes)
        if code:
            raise self._refused(f"cudaHostRegister returned error {code}")
        self._pinned_by: Device | None = device

    def unpin(self) -> None:
        """Unregister the pages, once nothing copies from or to them any more. Idempotent."""
        device = self._pinned_by
        self._pinned_by = None
        if device is not None:
            device.unpin(self.tensor)

    def _refused(self, reason: str) -> InvalidConfig:
        return InvalidConfig(
            "kv_buffer_device",
            "cpu",
            f"room for {self._mapped_bytes} bytes of pinned host memory ({reason}): use a smaller KV cache, "
            "or raise the memory limits of the host or container (memlock included)",
        )
