"""Host memory moves into huge pages: with its bytes, within its bounds, within the time, and where it is allowed."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench.transfer_memory import huge_bytes_at

from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.memory.huge_pages import Collapsed, use_huge_pages
from tests.worker.engine_rig import SETTINGS, Rig
from tests.worker.probe_fabric import ProbeFabric
from tests.worker.toy_caches import CacheShape

HUGE = 2 << 20
COLLAPSE = 25
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def require_huge_pages() -> None:
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        pytest.skip(f"NO TRANSPARENT HUGE PAGES: {SETTING} has switched them off on this machine")


def test_memory_in_use_moves_with_all_its_bytes() -> None:
    require_huge_pages()
    mapped = mmap.mmap(-1, 9 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(mapped, dtype=np.uint8)
    whole[:] = before = np.random.default_rng(1).integers(0, 256, 9 * HUGE, dtype=np.uint8)
    address = int(whole.ctypes.data)
    huge_before = huge_bytes_at(address)
    done = use_huge_pages([Region(address, whole.nbytes, MemoryKind.DRAM)], 30.0)
    assert huge_bytes_at(address) - huge_before >= done.huge_bytes, "mappings beside it may have joined it"
    assert 8 * HUGE <= done.asked_bytes == done.huge_bytes <= 9 * HUGE
    assert np.array_equal(whole, before)


def test_a_worker_moves_its_caches_and_its_staging_pool_before_they_are_registered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[set[int], float, int]] = []
    registered: list[set[int]] = []
    register = ProbeFabric.register

    def use(regions: Sequence[Region], budget_s: float) -> Collapsed:
        asked.append(({region.address for region in regions}, budget_s, len(registered)))
        return use_huge_pages(regions, budget_s)

    def note(fabric: ProbeFabric, regions: Sequence[Region]) -> None:
        registered.append({region.address for region in regions})
        register(fabric, regions)

    monkeypatch.setattr("kvferry.worker.worker.use_huge_pages", use)
    monkeypatch.setattr(ProbeFabric, "register", note)
    shape = CacheShape(cell_bytes=32 << 10)
    settings = replace(SETTINGS, huge_pages_s=30.0, staging_pool_bytes=4 * HUGE)
    producer, consumer = rig.engine("P", shape=shape, settings=settings), rig.engine("C", shape=shape)
    ((moved, budget_s, before), (_, none, _)), (all_of_it, _) = asked, registered
    assert (budget_s, before) == (30.0, 0)
    assert none == 0.0, "unless it is asked for"
    caches = {int(storage.ctypes.data) for storage in producer.caches.memory}
    assert caches < moved < all_of_it
    assert len(moved) == len(caches) + 1, "the pool; not the lease table and the entries for slot reads"
    load = consumer.load(producer.prefill(tokens=10, seed=7).params)
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=7)


class Kernel:
    """A fake kernel that records its calls. It refuses an advice with the errors in `refused`, and keeps the last one.
    Its clock takes a second for every part."""

    def __init__(self, folder: Path, *, enabled: str = "always [madvise] never", page: str = str(HUGE)) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.refused: dict[int, list[int]] = {}
        self.now_s = 0.0
        self.settings = folder
        (folder / "enabled").write_text(enabled)
        (folder / "hpage_pmd_size").write_text(page)

    def advise(self, address: int, length: int, advice: int) -> int:
        self.calls.append((address, length, advice))
        self.now_s += advice != mmap.MADV_HUGEPAGE
        errors = self.refused.get(advice, [0])
        return errors.pop(0) if len(errors) > 1 else errors[0]

    def use(self, regions: list[Region], budget_s: float = 1000.0) -> Collapsed:
        return use_huge_pages(regions, budget_s, advise=self.advise, clock=lambda: self.now_s, settings=self.settings)

    def collapsed(self) -> Iterator[tuple[int, int]]:
        return ((address, length) for address, length, advice in self.calls if advice != mmap.MADV_HUGEPAGE)


def test_only_whole_pages_within_a_region_are_touched(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    regions = [Region(HUGE - 1, 2 * HUGE, MemoryKind.DRAM), Region(9 * HUGE + 1, 2 * HUGE - 2, MemoryKind.DRAM)]
    assert kernel.use(regions) == Collapsed(HUGE, HUGE, 1.0)
    assert list(kernel.collapsed()) == [(HUGE, HUGE)]


def test_a_large_region_is_moved_part_by_part_and_no_part_is_begun_when_the_time_is_up(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    region = Region(HUGE, 1 << 30, MemoryKind.DRAM)
    assert kernel.use([region]).huge_bytes == 1 << 30
    parts = list(kernel.collapsed())
    assert [address for address, _ in parts] == list(np.cumsum([HUGE, *(length for _, length in parts[:-1])]))
    assert sum(length for _, length in parts) == 1 << 30
    again = Kernel(tmp_path)
    short = again.use([region, Region(2 << 30, 4 * HUGE, MemoryKind.DRAM)], 2.0)
    assert list(again.collapsed()) == parts[:2]
    assert short == Collapsed((1 << 30) + 4 * HUGE, sum(length for _, length in parts[:2]), 2.0)
    assert len([call for call in again.calls if call[2] == mmap.MADV_HUGEPAGE]) == 2, "the rest is left to the kernel"


@pytest.mark.parametrize(
    ("enabled", "page"), [("always madvise [never]", str(HUGE)), ("[always] madvise never", "?"), ("[madvise]", "0")]
)
def test_nothing_is_asked_where_there_are_none(tmp_path: Path, enabled: str, page: str) -> None:
    kernel = Kernel(tmp_path, enabled=enabled, page=page)
    assert kernel.use([Region(0, 1 << 30, MemoryKind.DRAM)]) == Collapsed()
    (tmp_path / "enabled").unlink()
    assert kernel.use([Region(0, 1 << 30, MemoryKind.DRAM)]) == Collapsed()
    assert kernel.calls == []


def test_nothing_is_asked_for_memory_of_a_gpu_or_without_time(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    assert kernel.use([Region(0, 1 << 30, MemoryKind.VRAM, 3)]) == Collapsed()
    assert kernel.use([Region(0, 1 << 30, MemoryKind.DRAM)], 0.0) == Collapsed()
    assert kernel.calls == []


def test_what_the_kernel_refuses_is_left_as_it_is(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.refused = {COLLAPSE: [errno.ENOMEM]}
    region = Region(0, 4 * HUGE, MemoryKind.DRAM)
    assert kernel.use([region]) == Collapsed(4 * HUGE, 0, 1.0)
    kernel.refused, kernel.calls = {mmap.MADV_HUGEPAGE: [errno.EINVAL]}, []
    assert kernel.use([region]).huge_bytes == 0
    assert len(kernel.calls) == 1


@pytest.mark.parametrize(("busy", "moved"), [(2, True), (3, False)])
def test_a_part_that_the_kernel_is_busy_with_is_tried_again_and_not_for_ever(
    tmp_path: Path, busy: int, moved: bool
) -> None:
    kernel = Kernel(tmp_path)
    kernel.refused = {COLLAPSE: [errno.EAGAIN] * busy + [0]}
    assert kernel.use([Region(0, 4 * HUGE, MemoryKind.DRAM)]).huge_bytes == 4 * HUGE * moved
    assert len(list(kernel.collapsed())) == 3
