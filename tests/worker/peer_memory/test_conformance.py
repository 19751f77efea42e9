"""Memory that one process exports and another opens, with every implementation of `PeerMemory`.

The exporter is a process of its own, which can be killed; the importer is this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.protocol.shared_memory import SharedMemory
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.peer_memory.host_memory import FileMemory
from kvferry.worker.peer_memory.port import PROOF_BYTES, NotMappable, PeerMemory
from kvferry.worker.peer_memory.shared_file import SharedFile
from tests.forkserver import forkserver

SIZES = (10_000, 1 << 20)


def export_files(pipe: Connection) -> None:
    """A process that exports files, and fills those that it is told with a value."""
    files = [SharedFile(size) for size in SIZES]
    regions = [Region(file.address, file.num_bytes, MemoryKind.DRAM) for file in files]
    pipe.send(FileMemory(files).export(regions))
    while True:
        number, value = pipe.recv()
        files[number].tensor[:-PROOF_BYTES] = value
        pipe.send("filled")


@dataclass(frozen=True, slots=True)
class Implementation:
    """Attributes:
    export: what an exporting process runs.
    importer: makes the importer's side.
    maps: how often a part of what was exported is mapped in this process.
    """

    export: Callable[[Connection], None]
    importer: Callable[[], PeerMemory]
    maps: Callable[[SharedMemory], int]


def maps_of_files(shared: SharedMemory) -> int:
    maps = Path("/proc/self/maps").read_text()
    return sum(maps.count(allocation.name) for allocation in shared.allocations)


IMPLEMENTATIONS = {"host": Implementation(export_files, FileMemory, maps_of_files)}


class Exporter:
    """A process that has exported memory."""

    def __init__(self, export: Callable[[Connection], None]) -> None:
        context = forkserver()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=export, args=(theirs,), daemon=True)
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
        self.memory = implementation.importer()
        self.maps = implementation.maps
        self._export = implementation.export
        self._exporters: list[Exporter] = []

    def exporter(self) -> Exporter:
        exporter = Exporter(self._export)
        self._exporters.append(exporter)
        return exporter

    def kill_all(self) -> None:
        for exporter in self._exporters:
            exporter.kill()


@pytest.fixture(params=IMPLEMENTATIONS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(IMPLEMENTATIONS[request.param])
    yield scene
    scene.kill_all()


def test_what_is_exported_is_read_and_what_is_written_later_too(scene: Scene) -> None:
    exporter = scene.exporter()
    opened = scene.memory.open(exporter.shared)
    sizes = [allocation.num_bytes for allocation in exporter.shared.allocations]
    assert [allocation.nbytes for allocation in opened.allocations] == sizes
    for number, allocation in enumerate(opened.allocations):
        usable = allocation[:-PROOF_BYTES]
        assert not usable.any()
        for value in (3 + number, 200 + number):
            exporter.fill(number, value)
            assert (usable == value).all()
    assert not opened.has_exited()


def test_what_is_opened_cannot_be_written(scene: Scene) -> None:
    opened = scene.memory.open(scene.exporter().shared)
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
    assert scene.maps(exporter.shared) == len(SIZES)
    addresses = [allocation.ctypes.data for allocation in first.allocations]
    assert [allocation.ctypes.data for allocation in second.allocations] == addresses
    first.close()
    del first
    assert scene.maps(exporter.shared) == len(SIZES)
    kept = second.allocations[0][100:200]
    second.close()
    del second
    assert scene.maps(exporter.shared) == 1, "a load reads through it"
    assert (kept == 9).all()
    del kept
    assert scene.maps(exporter.shared) == 0
    opened = scene.memory.open(exporter.shared)
    assert (opened.allocations[0][:-PROOF_BYTES] == 9).all()


def test_it_may_be_closed_twice(scene: Scene) -> None:
    opened = scene.memory.open(scene.exporter().shared)
    opened.close()
    opened.close()
    assert opened.has_exited(), "what was closed is not asked"


def test_the_memory_of_a_killed_exporter_keeps_its_bytes_and_its_end_is_seen(
    scene: Scene,
) -> None:
    exporter = scene.exporter()
    exporter.fill(0, 5)
    opened = scene.memory.open(exporter.shared)
    exporter.kill()
    assert opened.has_exited()
    assert (opened.allocations[0][:-PROOF_BYTES] == 5).all()
    opened.close()
    del opened
    assert scene.maps(exporter.shared) == 0
    with pytest.raises(
        NotMappable, match=f"process {exporter.shared.pid} is not found"
    ):
        scene.memory.open(exporter.shared)


def test_the_next_exporter_is_not_taken_for_the_one_before(scene: Scene) -> None:
    """Another life of an engine may have the same addresses and numbers; its proofs differ."""
    former = scene.exporter()
    former.fill(0, 1)
    of_former = scene.memory.open(former.shared)
    proof = bytes(of_former.allocations[0][-PROOF_BYTES:])
    former.kill()
    following = scene.exporter()
    following.fill(0, 2)
    of_following = scene.memory.open(following.shared)
    assert bytes(of_following.allocations[0][-PROOF_BYTES:]) != proof
    assert (of_following.allocations[0][:-PROOF_BYTES] == 2).all()
    assert (of_former.allocations[0][:-PROOF_BYTES] == 1).all()
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
    first, last = shared.allocations
    resized = msgspec.structs.replace(last, num_bytes=last.num_bytes + change)
    for allocations in ((first, resized), (resized, first)):
        with pytest.raises(NotMappable, match=f"described as {resized.num_bytes}"):
            scene.memory.open(msgspec.structs.replace(shared, allocations=allocations))
    assert scene.maps(shared) == len(SIZES)
    del opened
    assert scene.maps(shared) == 0


def test_memory_that_cannot_be_exported_says_why(scene: Scene) -> None:
    private = np.zeros(4096, dtype=np.uint8)
    region = Region(private.ctypes.data, private.nbytes, MemoryKind.DRAM)
    shared = scene.memory.export([region])
    assert shared.allocations == ()
    assert shared.why_not == "the engine has its caches in memory of its own process"
    on_device = Region(1 << 32, 4096, MemoryKind.VRAM)
    assert (
        scene.memory.export([on_device]).why_not == "caches on a device are not mapped"
    )
