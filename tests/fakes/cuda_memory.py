"""The memory of the fake device, and the relayout's kernel there, in numpy and without conversions."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvferry.worker.device import Device
from kvferry.worker.fabric.port import Fabric
from tests.fakes.cuda import FakeCuda, Rule

_ALIGNMENT = 512
_FORMER = 0xCD
_LOWER = 0xFFFFFFFF
_VIEWS = {
    "__get__",
    "__getitem__",
    "__iter__",
    "__repr__",
    "data_ptr",
    "dim",
    "numel",
    "unbind",
    "untyped_storage",
    "view",
}
_READS = {"__bool__", "__float__", "__int__", "cpu", "item", "numpy", "to", "tolist"}


class FakeDevice(Device):
    """The port to a fake device. New memory has the bytes that work of its former owner still writes there.

    Attributes:
        allocate: makes memory of a shape; in files where other processes are to open it (`tests.fakes.ipc_driver`).
        mapped: memory of other processes that is mapped, length by address.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda.where, cuda)
        self.cuda = cuda
        self._type = type("FakeTensor", (_FakeTensor,), {"device_memory": self})
        self._pinned: list[torch.Tensor] = []
        self._fresh: list[torch.Tensor] = []
        self._variants: set[tuple[object, ...]] = set()
        self._memory: list[torch.Tensor] = []
        self.allocate: Callable[[tuple[int, ...]], torch.Tensor] = _aligned
        self.mapped: dict[int, int] = {}

    def own(self, storages: Sequence[torch.Tensor]) -> None:
        """These are in the device's memory too."""
        self._memory += storages

    def empty(self, *shape: int) -> torch.Tensor:
        self.cuda.record("empty", makes=True)
        memory = self.allocate(shape)
        self._fresh.append(memory)
        self._memory.append(memory)

        def end_former() -> None:
            memory.fill_(_FORMER)
            self._fresh[:] = [other for other in self._fresh if other is not memory]

        self.cuda.current_stream().add(end_former)
        return memory.as_subclass(self._type)

    def empty_pinned(self, *shape: int) -> torch.Tensor:
        self.cuda.record("empty_pinned", makes=True, waits=True)
        self._pinned.append(_aligned(shape))
        return self._pinned[-1]

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether the device copies from and to this memory without the host's help."""
        ranges = [(one.data_ptr(), one.nbytes) for one in self._pinned] + list(
            self.cuda.registered.items()
        )
        return any(
            start <= host.data_ptr() and host.data_ptr() + host.nbytes <= start + of
            for start, of in ranges
        )

    def check_fresh(self, memories: Sequence[torch.Tensor]) -> None:
        """Work begins that uses this memory."""
        for memory in memories:
            first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes
            if any(
                first < one.data_ptr() + one.nbytes and one.data_ptr() < last
                for one in self._fresh
            ):
                self.cuda.record("work", breaks=Rule.MEMORY)

    def copy(
        self, to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool
    ) -> None:
        """What `Tensor.copy_` does."""
        hosts = [
            memory for memory in (to, source) if not isinstance(memory, _FakeTensor)
        ]
        is_async = non_blocking and all(map(self.is_pinned, hosts))
        self.cuda.record("copy", works=True, waits=not is_async)
        stream, there, here = (
            self.cuda.current_stream(),
            to.as_subclass(torch.Tensor),
            source.as_subclass(torch.Tensor),
        )

        def work() -> None:
            self.check_fresh([there, here])
            there.copy_(here)

        stream.add(work)
        if not is_async:
            stream.run()

    def fill(self, to: torch.Tensor) -> None:
        """What `Tensor.zero_` does."""
        self.cuda.record("zero", works=True)
        self.cuda.current_stream().add(to.as_subclass(torch.Tensor).zero_)

    def launch(
        self, *, num_programs: int, converts: bool, tile: int, **tables: torch.Tensor
    ) -> None:
        """The relayout's kernel. A variant is compiled and loaded when it is first launched."""
        plain = {
            name: table.as_subclass(torch.Tensor) for name, table in tables.items()
        }
        variant = (
            converts,
            tile,
            *(table.data_ptr() % 16 == 0 for table in plain.values()),
        )
        self.cuda.record("launch", works=True, makes=variant not in self._variants)
        self._variants.add(variant)

        def work() -> None:
            self.check_fresh(list(plain.values()))
            if not converts:
                programs, pieces, shapes, units = (
                    plain[name].numpy()
                    for name in ("programs", "pieces", "shapes", "units")
                )
                try:
                    for piece in np.unique(programs[:num_programs] & _LOWER).tolist():
                        self._move(pieces[4 * piece : 4 * piece + 4], shapes, units)
                except (
                    IndexError,
                    ValueError,
                ):  # a table that is not that of this launch
                    self.cuda.record("kernel", breaks=Rule.ADDRESS)

        self.cuda.current_stream().add(work)

    def _move(
        self,
        piece: NDArray[np.int64],
        shapes: NDArray[np.int64],
        units: NDArray[np.int64],
    ) -> None:
        """Every chunk of a piece, by the columns that `device_table` describes."""
        chunks, row, first_unit = (
            int(piece[2] & _LOWER),
            int(piece[2] >> 32),
            int(piece[3] & _LOWER),
        )
        if chunks >> 31:
            raise IndexError
        shape = shapes[12 * row : 12 * row + 12]
        rest, here, there = (
            np.arange(chunks),
            np.full(chunks, piece[0]),
            np.full(chunks, piece[1]),
        )
        for divisor, strides in shape[2:].reshape(-1, 2):
            rest, index = np.divmod(rest, -divisor & _LOWER)
            here += index * (strides & _LOWER)
            there += index * (strides >> 32 & _LOWER)
        offsets = units[
            2 * first_unit : 2 * (first_unit + int(rest.max()) + 1)
        ].reshape(-1, 2)[rest]
        here, there, width = (
            here + offsets[:, 0],
            there + offsets[:, 1],
            int(shape[0] & 31),
        )
        ranges = [(one.data_ptr(), one.nbytes) for one in self._memory]
        ranges += [*self.cuda.registered.items(), *self.mapped.items()]
        starts, lengths = np.array(ranges).T
        for addresses in (here, there):
            offsets = addresses[:, None] - starts
            if not ((offsets >= 0) & (offsets + width <= lengths)).any(axis=1).all():
                raise IndexError
        for come, go in zip(here.tolist(), there.tolist(), strict=True):
            ctypes.memmove(go, come, width)


class _FakeTensor(torch.Tensor):
    """A tensor in the fake device's memory, on whichever thread it is used."""

    device_memory: FakeDevice

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs, memory = func.__name__, kwargs or {}, cls.device_memory
        with torch._C.DisableTorchFunctionSubclass():
            if name in _READS:
                memory.cuda.record(name, waits=True)
                memory.cuda.current_stream().run()
            elif name == "copy_":
                to, source, *rest = args
                memory.copy(
                    to,
                    source,
                    non_blocking=kwargs.get("non_blocking", bool(rest and rest[0])),
                )
                return to
            elif name == "zero_":
                memory.fill(args[0])
                return args[0]
            elif name not in _VIEWS:
                raise AssertionError(
                    f"the stand-in does not know {name} of device memory"
                )
            found = func(*args, **kwargs)
            if name in _READS:
                return (
                    found.as_subclass(torch.Tensor).clone()
                    if isinstance(found, torch.Tensor)
                    else found
                )
            return (
                tuple(map(cls._there, found)) if name == "unbind" else cls._there(found)
            )

    @classmethod
    def _there(cls, found: Any) -> Any:
        return found.as_subclass(cls) if isinstance(found, torch.Tensor) else found


def launch_relayout(*, programs: torch.Tensor, **tables: Any) -> None:
    """In the place of Triton's kernel, on the device of its tables; see `kernels`."""
    assert isinstance(programs, _FakeTensor)
    programs.device_memory.launch(programs=programs, **tables)


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """On fake devices the relayout's kernel runs in numpy."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "kvferry.worker.relayout.triton_relayout.launch_relayout", launch_relayout
        )
        yield


def watched(cuda: FakeCuda, fabric: Fabric) -> Fabric:
    """The fabric, whose calls that may reach the device need a thread with a context."""

    def checked(name: str, call: Any) -> Any:
        def with_context(*args: Any) -> Any:
            if not cuda.has_context():
                cuda.record(name, breaks=Rule.CONTEXT)
            return call(*args)

        return with_context

    for name in (
        "register",
        "add_peer",
        "prepare_local",
        "prepare_remote",
        "post_read",
        "poll",
    ):
        setattr(fabric, name, checked(name, getattr(fabric, name)))
    return fabric


def _aligned(shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape))
    memory = torch.empty(count + _ALIGNMENT, dtype=torch.uint8)
    first = -memory.data_ptr() % _ALIGNMENT
    return memory[first : first + count].view(shape)
