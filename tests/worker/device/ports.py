"""A real device and the stand-in, behind one face for the conformance suite. Both are GPU 0, where threads begin."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Protocol, cast

import torch

from kvferry.worker.device import Cuda, Device
from tests.fakes.cuda import FakeCuda
from tests.fakes.cuda_memory import FakeDevice, kernels

_CYCLES = 1_000_000_000
"""Of a kernel that does nothing: half a second."""


class Port(Protocol):
    """A device, and what only its tests do with it."""

    device: Device

    @property
    def cuda(self) -> Cuda: ...

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread's current stream has work to do until the block ends, or longer."""
        ...

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the relayout's kernel runs there."""
        ...

    def has_context(self) -> bool:
        """Whether the calling thread has a CUDA context."""
        ...

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether host memory is pinned."""
        ...


class StandIn:
    """The stand-in, late: work is carried out when it is asked for."""

    def __init__(self) -> None:
        self.cuda = FakeCuda(0, is_late=True)
        self.device: Device = self.cuda.device

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        stream = self.cuda.current_stream()
        stream.hold()
        yield
        stream.release()

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        return kernels()

    def has_context(self) -> bool:
        return self.cuda.has_context()

    def is_pinned(self, memory: torch.Tensor) -> bool:
        assert isinstance(self.device, FakeDevice)
        return self.device.is_pinned(memory)


class Gpu:
    """GPU 0."""

    def __init__(self) -> None:
        self.cuda = cast("Cuda", torch.cuda)
        self.device = Device(torch.device("cuda", 0))
        self.device.use()
        self.device.synchronize()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        yield

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def has_context(self) -> bool:
        context = ctypes.c_void_p()
        assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
        return bool(context.value)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned()
