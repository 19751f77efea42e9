"""Memory of a device by CUDA IPC: what cannot be exported or opened says why, and what was opened is proven."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvferry.protocol.handshake import SharedMemory
from kvferry.worker.device import Device
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.peer_memory import cuda_ipc
from kvferry.worker.peer_memory.cuda_driver import CudaIpcDriver
from kvferry.worker.peer_memory.cuda_ipc import CudaIpcMemory
from kvferry.worker.peer_memory.port import NotMappable
from kvferry.worker.peer_memory.shared_file import SharedFile
from tests.fakes.cuda import FakeCuda
from tests.fakes.ipc_driver import FakeIpcDriver


class OneProcess:
    """A process that exports memory of a fake device, and opens it too."""

    def __init__(self) -> None:
        device = FakeCuda().device
        self.driver = FakeIpcDriver(device)
        self.memory = CudaIpcMemory(device, self.driver)
        self.file = SharedFile(100)
        self.memory.add_file(self.file)
        self.caches = [self.driver.allocate((size,)) for size in (4000, 9000)]

    def export(self) -> SharedMemory:
        regions = [
            Region(part.data_ptr(), part.nbytes, MemoryKind.VRAM)
            for part in self.caches
        ]
        return self.memory.export([self.file.region, *regions])


def test_a_part_of_an_allocation_is_found_within_it() -> None:
    """A caching allocator gives out parts of what it has of the driver."""
    process = OneProcess()
    process.caches = [process.caches[1][1024:5000], process.caches[1][5000:]]
    shared = process.export()
    assert [each.offset for each in shared.device_allocations] == [1024, 5000]
    process.caches[0].fill_(6)
    process.caches[1].fill_(7)
    opened = process.memory.open(shared)
    first, second = opened.device_allocations
    assert process.driver.read(first.address, first.num_bytes) == b"\x06" * 3976
    assert process.driver.read(second.address, second.num_bytes) == b"\x07" * 4000
    assert len(process.driver.mapped) == 1, "one handle, one map"


def test_what_opens_other_memory_than_the_producers_is_not_used() -> None:
    process = OneProcess()
    shared = process.export()
    process.driver.spoiled = True
    with pytest.raises(NotMappable, match="is not the producer's memory"):
        process.memory.open(shared)
    assert not process.driver.mapped


def test_what_the_driver_refuses_is_not_mapped_and_nothing_stays_open() -> None:
    process = OneProcess()
    shared = process.export()
    process.driver.refused = NotMappable("cuIpcOpenMemHandle: CUDA_ERROR_MAP_FAILED")
    with pytest.raises(NotMappable, match="CUDA_ERROR_MAP_FAILED"):
        process.memory.open(shared)
    assert not process.driver.mapped


def test_memory_without_a_handle_is_not_shared_nor_is_any_other() -> None:
    process = OneProcess()
    process.caches.append(torch.zeros(4096, dtype=torch.uint8))
    shared = process.export()
    assert shared.why_not == "its caches are not of the fake driver"
    assert not shared.allocations
    assert not shared.device_allocations
    with pytest.raises(NotMappable, match="not of the fake driver"):
        process.memory.open(shared)


def test_another_ipc_namespace_is_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = OneProcess()
    shared = process.export()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_ipc, "ipc_namespace", lambda: "ipc:[1]")
        with pytest.raises(NotMappable, match="--ipc=host"):
            process.memory.open(shared)
    unknown = msgspec.structs.replace(shared, ipc_namespace=None)
    assert process.memory.open(unknown).device_allocations


def test_a_process_without_its_open_files_may_have_freed_its_memory() -> None:
    """As it is while it dies, before its pidfd tells."""
    process = OneProcess()
    shared = process.export()
    opened = process.memory.open(shared)
    assert not opened.may_be_freed()
    fd = shared.allocations[0].fd
    kept = os.dup(fd)
    with open(os.devnull) as other:
        os.dup2(other.fileno(), fd)
    assert opened.may_be_freed()
    assert not opened.has_exited()
    os.dup2(kept, fd)
    os.close(kept)
    assert not opened.may_be_freed()


def test_a_device_out_of_reach_is_named() -> None:
    process = OneProcess()
    shared = process.export()
    far = msgspec.structs.replace(shared.device_allocations[0], device="f" * 32)
    with pytest.raises(NotMappable, match=f"no peer access to GPU {'f' * 32}"):
        process.memory.open(msgspec.structs.replace(shared, device_allocations=(far,)))


@pytest.mark.parametrize("change", ["beyond", "no proof", "a long proof"])
def test_descriptions_that_contradict_themselves_are_refused(change: str) -> None:
    process = OneProcess()
    shared = process.export()
    first = shared.device_allocations[0]
    assert shared.device_proof is not None
    beyond = msgspec.structs.replace(first, offset=first.allocation_bytes - 10)
    long_proof = msgspec.structs.replace(shared.device_proof, num_bytes=17)
    changed: dict[str, dict[str, Any]] = {
        "beyond": {"device_allocations": (beyond,)},
        "no proof": {"device_proof": None},
        "a long proof": {"device_proof": long_proof},
    }
    with pytest.raises(NotMappable):
        process.memory.open(msgspec.structs.replace(shared, **changed[change]))
    assert not process.driver.mapped


class Results(SimpleNamespace):
    """An enumeration of the driver."""


class Handle:
    """64 bytes, of which the package gives the address alone."""

    def __init__(self, value: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(value, 64)

    def getPtr(self) -> int:  # noqa: N802 (the package's name)
        return ctypes.addressof(self._buffer)

    @property
    def value(self) -> bytes:
        return self._buffer.raw


SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
UUIDS = {0: b"\x00" * 16, 1: b"\x01" * 16}


class Bindings(ModuleType):
    """`cuda.bindings.driver` as far as it is used: each function returns its error first.

    Attributes:
        calls: of all functions, with their arguments.
        errors: of a function, by its name.
        is_capable: what the driver says of memory of CUDA IPC.
        name: of the device.
        reaches: whether GPU 0 can access GPU 1.
    """

    CUresult = Results(CUDA_SUCCESS=SUCCESS)
    CUstream_flags = Results(CU_STREAM_NON_BLOCKING=1)
    CUipcMem_flags = Results(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUpointer_attribute = Results(
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE="capable",
        CU_POINTER_ATTRIBUTE_BUFFER_ID="id",
    )

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.errors: dict[str, str] = {}
        self.is_capable = True
        self.name = b"NVIDIA H100"
        self.reaches = 1
        answers: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuCtxGetCurrent": lambda: ("context",),
            "cuCtxPushCurrent": lambda context: (),
            "cuCtxPopCurrent": lambda: ("context",),
            "cuCtxGetDevice": lambda: (0,),
            "cuDeviceGetName": lambda length, device: (self.name,),
            "cuDeviceGetUuid": lambda device: (SimpleNamespace(bytes=UUIDS[device]),),
            "cuDeviceGetCount": lambda: (2,),
            "cuDeviceGet": lambda number: (number,),
            "cuDeviceCanAccessPeer": lambda own, other: (self.reaches,),
            "cuStreamCreate": lambda flags: ("stream",),
            "cuPointerGetAttribute": self._attribute,
            "cuMemGetAddressRange": lambda address: (address & ~0xFFFF, 1 << 20),
            "cuIpcGetMemHandle": lambda start: (Handle(b"h" * 64),),
            "cuIpcOpenMemHandle": lambda handle, flags: (0x7000_0000,),
            "cuIpcCloseMemHandle": lambda start: (),
            "cuMemcpyDtoHAsync": lambda *of: (),
            "cuStreamSynchronize": lambda stream: (),
        }
        for name, answer in answers.items():
            setattr(self, name, self._function(name, answer))

    def CUipcMemHandle(self) -> Handle:  # noqa: N802 (the driver's name)
        return Handle(b"")

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _attribute(self, attribute: str, address: int) -> tuple[Any, ...]:
        if attribute == "capable":
            return (self.is_capable,)
        return (77,)

    def _function(
        self, name: str, answer: Callable[..., tuple[Any, ...]]
    ) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name in self.errors:
                return (SimpleNamespace(name=self.errors[name]), None)
            return (SUCCESS, *answer(*arguments))

        return call


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    found = Bindings()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", found)
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    return found


def device() -> Device:
    return FakeCuda(0).device


def test_an_allocation_is_named_by_its_start_its_size_and_its_number(
    bindings: Bindings,
) -> None:
    driver = CudaIpcDriver(device())
    assert driver.device == "00" * 16
    found = driver.allocation_at(0x5_1234)
    assert found == (0x5_0000, 1 << 20, 77)
    assert driver.export(found.start) == b"h" * 64


def test_every_call_has_the_workers_context_and_leaves_the_thread_its_own(
    bindings: Bindings,
) -> None:
    """The last user of a map may be gone on any thread."""
    driver = CudaIpcDriver(device())
    opened = driver.open(b"h" * 64, driver.device)
    bindings.calls.clear()
    driver.close(opened.start)
    assert bindings.names() == [
        "cuCtxPushCurrent",
        "cuIpcCloseMemHandle",
        "cuCtxPopCurrent",
    ]
    bindings.errors["cuIpcCloseMemHandle"] = "CUDA_ERROR_UNKNOWN"
    bindings.calls.clear()
    driver.close(opened.start)
    assert bindings.names()[-1] == "cuCtxPopCurrent"


def test_what_is_read_goes_over_a_stream_of_its_own(bindings: Bindings) -> None:
    driver = CudaIpcDriver(device())
    assert len(driver.read(0x1000, 16)) == 16
    (copied,) = [of for name, of in bindings.calls if name == "cuMemcpyDtoHAsync"]
    assert copied[1:] == (0x1000, 16, "stream")


@pytest.mark.parametrize(
    ("setup", "variables", "said"),
    [
        ({"is_capable": False}, {}, "sleep mode's allocator"),
        (
            {"is_capable": False},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            r"expandable segments \(PYTORCH_CUDA_ALLOC_CONF\)",
        ),
        (
            {"is_capable": False},
            {"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:true"},
            r"expandable segments \(PYTORCH_ALLOC_CONF\)",
        ),
        ({"name": b"NVIDIA H100 80GB HBM3 MIG 1g.10gb"}, {}, "MIG"),
        (
            {"errors": {"cuMemGetAddressRange": "CUDA_ERROR_INVALID_VALUE"}},
            {},
            "cuMemGetAddressRange: CUDA_ERROR_INVALID_VALUE",
        ),
    ],
)
def test_what_cannot_be_exported_says_why(
    bindings: Bindings,
    monkeypatch: pytest.MonkeyPatch,
    setup: dict[str, Any],
    variables: dict[str, str],
    said: str,
) -> None:
    for name, value in setup.items():
        setattr(bindings, name, value)
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(NotMappable, match=said):
        CudaIpcDriver(device()).allocation_at(0x1000)


def test_a_device_without_peer_access_is_refused_and_one_that_is_not_visible_is_tried(
    bindings: Bindings,
) -> None:
    driver = CudaIpcDriver(device())
    bindings.reaches = 0
    with pytest.raises(NotMappable, match=f"no peer access to GPU {'01' * 16}"):
        driver.open(b"h" * 64, "01" * 16)
    assert "cuIpcOpenMemHandle" not in bindings.names()
    assert driver.open(b"h" * 64, "02" * 16).num_bytes == 1 << 20
    bindings.reaches = 1
    assert driver.open(b"k" * 64, "01" * 16).start == 0x7000_0000
    opened, _ = bindings.calls[bindings.names().index("cuIpcOpenMemHandle")][1]
    assert opened.value == b"h" * 64


def test_a_handle_that_the_driver_refuses_says_its_error(bindings: Bindings) -> None:
    driver = CudaIpcDriver(device())
    bindings.errors["cuIpcOpenMemHandle"] = "CUDA_ERROR_INVALID_CONTEXT"
    with pytest.raises(NotMappable, match="CUDA_ERROR_INVALID_CONTEXT"):
        driver.open(b"h" * 64, driver.device)


def test_a_map_of_unknown_size_is_closed_again(bindings: Bindings) -> None:
    driver = CudaIpcDriver(device())
    bindings.errors["cuMemGetAddressRange"] = "CUDA_ERROR_NOT_FOUND"
    with pytest.raises(NotMappable, match="CUDA_ERROR_NOT_FOUND"):
        driver.open(b"h" * 64, driver.device)
    assert ("cuIpcCloseMemHandle", (0x7000_0000,)) in bindings.calls


def test_without_the_bindings_nothing_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(NotMappable, match="cuda-bindings is missing"):
        CudaIpcDriver(device())
