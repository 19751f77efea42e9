"""A stand-in for what kvferry uses of `torch.cuda`: device memory is the host's, and every call is recorded.

As in CUDA, each thread has a current device, 0 until it sets another one, and streams are carried out in their order:
here at once. The kernel of the relayout is carried out in numpy, without conversions.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

DEFAULT_STREAM = "default"


class Call(NamedTuple):
    """One call: of what, by which thread, with which current device, on which stream."""

    name: str
    thread: str
    device: int
    stream: str


class FakeCuda:
    """One device; the thread that makes the stand-in is the engine's, whose device is set.

    Attributes:
        calls: in their order, those that set a device apart.
        pinned_bytes: of each allocation that was asked of torch in pinned memory.
        registered: host memory that is registered now, length by address.
        host_error: what `cudaHostRegister` returns; 0 for success.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[Call] = []
        self.pinned_bytes: list[int] = []
        self.registered: dict[int, int] = {}
        self.host_error = 0
        self._local = threading.local()
        self._local.device = self._index(device)
        self._streams = 0

    def names(self, stream: str | None = None) -> list[str]:
        """The calls' names, of all streams or of one."""
        return [call.name for call in self.calls if stream in (None, call.stream)]

    def strays(self) -> list[Call]:
        """Calls by threads whose current device was another one: each makes a context on that device."""
        return [call for call in self.calls if call.device != self._index(self.device)]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of `torch.cuda` until the test ends."""
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(self))
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr("kvferry.worker.relayout.triton_relayout.launch_relayout", self.launch_relayout)

    def memory(self) -> TorchFunctionMode:
        """A context in which this thread's allocations on the device are the host's."""
        return _OnHost(self)

    def record(self, name: str, stream: str | None = None) -> None:
        """A call of the current thread."""
        thread = threading.current_thread().name
        self.calls.append(Call(name, thread, self.current_device, stream or self.current_stream().name))

    @property
    def current_device(self) -> int:
        """Of the current thread."""
        return int(getattr(self._local, "device", 0))

    def set_device(self, device: torch.device | int) -> None:
        self._local.device = self._index(device)

    def new_stream(self, device: torch.device) -> _Stream:
        self.record("Stream")
        self._streams += 1
        return _Stream(self, f"stream {self._streams}")

    @contextlib.contextmanager
    def on_stream(self, stream: _Stream) -> Iterator[None]:
        before = (self.current_stream(), self.current_device)
        self._local.stream, self._local.device = stream, self._index(self.device)
        try:
            yield
        finally:
            self._local.stream, self._local.device = before

    def current_stream(self, device: torch.device | None = None) -> _Stream:
        found = getattr(self._local, "stream", None)
        return found if found is not None else _Stream(self, DEFAULT_STREAM)

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        self.record("cudaHostRegister")
        assert not any(start < address + length and address < start + of for start, of in self.registered.items())
        if not self.host_error:
            self.registered[address] = length
        return self.host_error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 (CUDA's name)
        self.record("cudaHostUnregister")
        del self.registered[address]
        return 0

    def launch_relayout(
        self,
        *,
        programs: torch.Tensor,
        pieces: torch.Tensor,
        shapes: torch.Tensor,
        units: torch.Tensor,
        scales: torch.Tensor,
        num_programs: int,
        converts: bool,
        tile: int,
    ) -> None:
        self.record("launch")
        if not converts:
            of_program = programs.numpy()[: 2 * num_programs].reshape(-1, 2)
            for piece in np.unique(of_program[:, 0]).tolist():
                _move(pieces.numpy()[6 * piece : 6 * piece + 6], shapes.numpy(), units.numpy())

    @staticmethod
    def _index(device: torch.device | int) -> int:
        return device if isinstance(device, int) else device.index or 0


@dataclass
class _Stream:
    cuda: FakeCuda
    name: str

    def synchronize(self) -> None:
        self.cuda.record("synchronize", self.name)


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._stream = DEFAULT_STREAM

    def record(self, stream: _Stream) -> None:
        self._stream = stream.name
        self._cuda.record("record", self._stream)

    def query(self) -> bool:
        self._cuda.record("query", self._stream)
        return True


class _OnHost(TorchFunctionMode):
    """Allocations on the device are made on the host, pinned ones unpinned."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == self._cuda.device:
            kwargs["device"] = torch.device("cpu")
        pins = kwargs.pop("pin_memory", False)
        made = func(*args, **kwargs)
        if pins:
            self._cuda.pinned_bytes.append(made.untyped_storage().nbytes())
        return made


def _move(piece: NDArray[np.int64], shapes: NDArray[np.int64], units: NDArray[np.int32]) -> None:
    """Every chunk of a piece, by the columns that `device_table` describes."""
    source, destination, row, first_unit, chunks = (int(number) for number in piece[:5])
    shape = shapes[39 * row : 39 * row + 39]
    rest, here, there = np.arange(chunks), np.full(chunks, source), np.full(chunks, destination)
    for level in range(5):
        rest, index = np.divmod(rest, shape[5 + level])
        here += index * shape[20 + level]
        there += index * shape[25 + level]
    places = units[: 4 * (first_unit + int(rest.max()) + 1)].reshape(-1, 4)[first_unit + rest].astype(np.int64)
    here += places[:, :2] @ shape[30:32]
    there += places[:, 2:] @ shape[32:34]
    for come, go in zip(here.tolist(), there.tolist(), strict=True):
        ctypes.memmove(go, come, int(shape[0]))
