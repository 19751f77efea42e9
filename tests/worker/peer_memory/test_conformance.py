"""Memory that one process exports and another opens, with every implementation of `PeerMemory`.

The exporter is a process of its own, which can be killed; the importer is this one. CUDA IPC runs with a fake driver
everywhere, and with the real one where there is a GPU, real or emulated.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvferry.protocol.handshake import (
    DeviceAllocation,
    SharedAllocation,
    SharedMemory,
)
from kvferry.worker.device import Device
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.peer_memory.cuda_driver import CudaIpcDriver
from kvferry.worker.peer_memory.cuda_ipc import (
    CudaIpcMemory,
    DriverAllocation,
    IpcDriver,
)
from kvferry.worker.peer_memory.host_memory import FileMemory
from kvferry.worker.peer_memory.port import (
    PROOF_BYTES,
    DeviceBytes,
    NotMappable,
    OpenedMemory,
    PeerMemory,
)
from kvferry.worker.peer_memory.shared_file import SharedFile
from tests.fakes.cuda import FakeCuda
from tests.fakes.ipc_driver import FakeIpcDriver
from tests.forkserver import forkserver

SIZES = (10_000, 1 << 20)

Part = NDArray[np.uint8] | DeviceBytes
Described = SharedAllocation | DeviceAllocation


def export_files(pipe: Connection) -> None:
    """A process that exports files, and fills those that it is told with a value."""
    files = [SharedFile(size) for size in SIZES]
    regions = [Region(file.address, file.num_bytes, MemoryKind.DRAM) for file in files]
    pipe.send(FileMemory(files).export(regions))
    while True:
        number, value = pipe.recv()
        files[number].tensor[:-PROOF_BYTES] = value
        pipe.send("filled")


def export_of_device(
    pipe: Connection, device: Device, driver: IpcDriver, memory: list[torch.Tensor]
) -> None:
    """The same with memory of a device, and a file as a lease table would have."""
    file = SharedFile(100)
    shared = CudaIpcMemory(device, driver)
    shared.add_file(file)
    regions = [Region(part.data_ptr(), part.nbytes, MemoryKind.VRAM) for part in memory]
    pipe.send(shared.export([file.region, *regions]))
    while True:
        number, value = pipe.recv()
        memory[number].fill_(value)
        device.synchronize()
        pipe.send("filled")


def export_fake(pipe: Connection) -> None:
    device = FakeCuda().device
    driver = FakeIpcDriver(device)
    memory = [driver.allocate((size,)) for size in SIZES]
    export_of_device(pipe, device, driver, memory)


def export_cuda(pipe: Connection) -> None:
    device = Device(torch.device("cuda", 0))
    driver = CudaIpcDriver(device)
    memory = [
        torch.zeros(size, dtype=torch.uint8, device=device.where) for size in SIZES
    ]
    export_of_device(pipe, device, driver, memory)


class FileImporter:
    """The importer's side.

    Attributes:
        LIST, SIZE: the fields of a description that list what was exported, and that say how large an allocation is.
    """

    LIST = "allocations"
    SIZE = "num_bytes"

    def __init__(self) -> None:
        self.memory: PeerMemory = FileMemory()

    def parts(self, opened: OpenedMemory) -> Sequence[Part]:
        """What was exported, but for what proves it."""
        return opened.allocations

    def contents(self, part: Part) -> NDArray[np.uint8]:
        """The bytes of a part now, without a proof."""
        assert isinstance(part, np.ndarray)
        return part[:-PROOF_BYTES]

    def described(self, shared: SharedMemory) -> Sequence[Described]:
        """The parts as they are described."""
        described: Sequence[Described] = getattr(shared, self.LIST)
        return described

    def resized(self, shared: SharedMemory, number: int, change: int) -> SharedMemory:
        """A description in which an allocation has another size."""
        allocations = list(self.described(shared))
        size = getattr(allocations[number], self.SIZE) + change
        allocations[number] = msgspec.structs.replace(
            allocations[number], **{self.SIZE: size}
        )
        return msgspec.structs.replace(shared, **{self.LIST: tuple(allocations)})

    def proof(self, opened: OpenedMemory) -> bytes:
        """What tells this exporter from the one before."""
        return opened.allocations[0][-PROOF_BYTES:].tobytes()

    def mappings(self, shared: SharedMemory) -> int:
        """How many mappings all of it needs."""
        return len(shared.allocations)

    def maps(self, shared: SharedMemory) -> int:
        """How often a part of what was exported is mapped in this process."""
        maps = Path("/proc/self/maps").read_text()
        return sum(maps.count(allocation.name) for allocation in shared.allocations)


class CountedDriver:
    """A driver, and the handles that are open."""

    def __init__(self, driver: IpcDriver) -> None:
        self.device = driver.device
        self.handles: dict[int, bytes] = {}
        self.allocation_at = driver.allocation_at
        self.export = driver.export
        self.read = driver.read
        self._driver = driver

    def open(self, handle: bytes, device: str) -> DriverAllocation:
        opened = self._driver.open(handle, device)
        assert opened.start not in self.handles, "it was open"
        self.handles[opened.start] = handle
        return opened

    def close(self, start: int) -> None:
        del self.handles[start]
        self._driver.close(start)


class DeviceImporter(FileImporter):
    """The same of a device."""

    LIST = "device_allocations"
    SIZE = "allocation_bytes"

    def __init__(self, device: Device, driver: IpcDriver) -> None:
        self.driver = CountedDriver(driver)
        self.memory = CudaIpcMemory(device, self.driver)

    def parts(self, opened: OpenedMemory) -> Sequence[Part]:
        return opened.device_allocations

    def contents(self, part: Part) -> NDArray[np.uint8]:
        assert isinstance(part, DeviceBytes)
        return np.frombuffer(
            self.driver.read(part.address, part.num_bytes), dtype=np.uint8
        )

    def mappings(self, shared: SharedMemory) -> int:
        return len({each.handle for each in shared.device_allocations})

    def maps(self, shared: SharedMemory) -> int:
        exported = {each.handle for each in shared.device_allocations}
        return sum(handle in exported for handle in self.driver.handles.values())


def import_fake() -> DeviceImporter:
    device = FakeCuda().device
    return DeviceImporter(device, FakeIpcDriver(device))


def import_cuda() -> DeviceImporter:
    device = Device(torch.device("cuda", 0))
    return DeviceImporter(device, CudaIpcDriver(device))


@dataclass(frozen=True, slots=True)
class Implementation:
    """An implementation of the port, in two processes.

    Attributes:
        export: what an exporting process runs.
        importer: makes the importer's side.
        context: of the exporting process.
    """

    export: Callable[[Connection], None]
    importer: Callable[[], FileImporter]
    context: Callable[[], BaseContext] = forkserver


IMPLEMENTATIONS = {
    "host": Implementation(export_files, FileImporter),
    "stand-in": Implementation(export_fake, import_fake),
    # The server that processes are forked from may have used CUDA, which then does without forks.
    "cuda": Implementation(
        export_cuda, import_cuda, partial(multiprocessing.get_context, "spawn")
    ),
}


class Exporter:
    """A process that has exported memory."""

    def __init__(self, implementation: Implementation) -> None:
        context: Any = implementation.context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=implementation.export, args=(theirs,), daemon=True
        )
        self._process.start()
        theirs.close()
        self.shared: SharedMemory = self._pipe.recv()

    def fill(self, number: int, value: int) -> None:
        """Have an allocation filled, but for its proof."""
        self._pipe.send((number, value))
        assert self._pipe.recv() == "filled"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Scene:
    """An implementation, with what was started of it."""

    def __init__(self, implementation: Implementation) -> None:
        self.importer = implementation.importer()
        self.memory = self.importer.memory
        self.maps = self.importer.maps
        self._implementation = implementation
        self._exporters: list[Exporter] = []

    def exporter(self) -> Exporter:
        exporter = Exporter(self._implementation)
        self._exporters.append(exporter)
        return exporter

    def kill_all(self) -> None:
        for exporter in self._exporters:
            exporter.kill()


@pytest.fixture(params=IMPLEMENTATIONS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE: memory of a device was not mapped on this machine")
    scene = Scene(IMPLEMENTATIONS[request.param])
    yield scene
    scene.kill_all()


def test_what_is_exported_is_read_and_what_is_written_later_too(scene: Scene) -> None:
    exporter = scene.exporter()
    opened = scene.memory.open(exporter.shared)
    parts = scene.importer.parts(opened)
    assert len(parts) == len(SIZES)
    for number, (part, size) in enumerate(zip(parts, SIZES, strict=True)):
        assert len(scene.importer.contents(part)) >= size
        assert not scene.importer.contents(part).any()
        for value in (3 + number, 200 + number):
            exporter.fill(number, value)
            assert (scene.importer.contents(part) == value).all()
    assert not opened.has_exited()


def test_what_is_opened_of_a_file_cannot_be_written(scene: Scene) -> None:
    opened = scene.memory.open(scene.exporter().shared)
    assert opened.allocations
    for allocation in opened.allocations:
        with pytest.raises(ValueError, match="read-only"):
            allocation[0] = 1


def test_an_allocation_is_mapped_once_for_all_its_users_until_the_last_one_is_gone(
    scene: Scene,
) -> None:
    exporter = scene.exporter()
    exporter.fill(0, 9)
    first = scene.memory.open(exporter.shared)
    second = scene.memory.open(exporter.shared)
    mappings = scene.importer.mappings(exporter.shared)
    assert scene.maps(exporter.shared) == mappings
    addresses = list(map(address_of, scene.importer.parts(first)))
    assert list(map(address_of, scene.importer.parts(second))) == addresses
    first.close()
    del first
    assert scene.maps(exporter.shared) == mappings
    kept = scene.importer.parts(second)[0]
    second.close()
    del second
    assert scene.maps(exporter.shared) == 1, "a load reads through it"
    assert (scene.importer.contents(kept) == 9).all()
    del kept
    assert scene.maps(exporter.shared) == 0
    opened = scene.memory.open(exporter.shared)
    part = scene.importer.parts(opened)[0]
    assert (scene.importer.contents(part) == 9).all()


def address_of(part: Part) -> int:
    if isinstance(part, DeviceBytes):
        return part.address
    return int(part.ctypes.data)


def test_it_may_be_closed_twice(scene: Scene) -> None:
    opened = scene.memory.open(scene.exporter().shared)
    opened.close()
    opened.close()
    assert opened.has_exited(), "what was closed is not asked"


def test_the_end_of_a_killed_exporter_is_seen_and_it_is_not_opened_again(
    scene: Scene,
) -> None:
    exporter = scene.exporter()
    opened = scene.memory.open(exporter.shared)
    assert not opened.may_be_freed()
    exporter.kill()
    assert opened.has_exited()
    assert opened.may_be_freed() == bool(exporter.shared.device_allocations)
    opened.close()
    del opened
    assert scene.maps(exporter.shared) == 0
    with pytest.raises(
        NotMappable, match=f"process {exporter.shared.pid} is not found"
    ):
        scene.memory.open(exporter.shared)


@pytest.mark.parametrize("scene", ["host"], indirect=True)
def test_a_file_of_a_killed_exporter_keeps_its_bytes(scene: Scene) -> None:
    """Of a device nobody knows: docs/gpu-check.md has the experiment."""
    exporter = scene.exporter()
    exporter.fill(0, 5)
    opened = scene.memory.open(exporter.shared)
    exporter.kill()
    assert (opened.allocations[0][:-PROOF_BYTES] == 5).all()


def test_the_next_exporter_is_not_taken_for_the_one_before(scene: Scene) -> None:
    """Another life of an engine may have the same addresses and numbers; its proofs differ."""
    former = scene.exporter()
    of_former = scene.memory.open(former.shared)
    proof = scene.importer.proof(of_former)
    former.kill()
    following = scene.exporter()
    following.fill(0, 2)
    of_following = scene.memory.open(following.shared)
    assert scene.importer.proof(of_following) != proof
    part = scene.importer.parts(of_following)[0]
    assert (scene.importer.contents(part) == 2).all()
    stale = msgspec.structs.replace(former.shared, pid=following.shared.pid)
    with pytest.raises(NotMappable):
        scene.memory.open(stale)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another host": ({"machine": "0" * 36}, "on another host"),
    "another PID namespace": ({"pid_namespace": "pid:[1]"}, "--pid=host"),
    "no such process": ({"pid": 2**22 + 1}, "is not found"),
    "nothing is shared": (
        {"allocations": (), "why_not": "they are private"},
        "they are private",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_of_elsewhere_is_refused_with_the_reason(
    scene: Scene, case: str
) -> None:
    fields, said = WRONG[case]
    with pytest.raises(NotMappable, match=said):
        scene.memory.open(msgspec.structs.replace(scene.exporter().shared, **fields))


@pytest.mark.parametrize("change", [-4096, 4096])
def test_an_allocation_of_another_size_is_refused_and_nothing_stays_open(
    scene: Scene, change: int
) -> None:
    """Also if the same allocation is open under its own size."""
    shared = scene.exporter().shared
    opened = scene.memory.open(shared)
    for number in range(len(SIZES)):
        resized = scene.importer.resized(shared, number, change)
        with pytest.raises(NotMappable, match=r"described as \d+"):
            scene.memory.open(resized)
    assert scene.maps(shared) == scene.importer.mappings(shared)
    del opened
    assert scene.maps(shared) == 0


def test_memory_that_cannot_be_exported_says_why(scene: Scene) -> None:
    private = np.zeros(4096, dtype=np.uint8)
    region = Region(private.ctypes.data, private.nbytes, MemoryKind.DRAM)
    shared = scene.memory.export([region])
    assert shared.allocations == ()
    assert shared.why_not == "the engine has its caches in memory of its own process"


def test_host_memory_is_not_opened_as_a_device_s_nor_the_other_way_round() -> None:
    in_files = Scene(IMPLEMENTATIONS["host"])
    on_device = Scene(IMPLEMENTATIONS["stand-in"])
    try:
        with pytest.raises(NotMappable, match="caches are in host memory, this"):
            on_device.memory.open(in_files.exporter().shared)
        with pytest.raises(NotMappable, match="caches are on a device, this"):
            in_files.memory.open(on_device.exporter().shared)
    finally:
        in_files.kill_all()
        on_device.kill_all()
    region = Region(1 << 32, 4096, MemoryKind.VRAM)
    assert FileMemory().export([region]).why_not == "caches on a device are not mapped"
