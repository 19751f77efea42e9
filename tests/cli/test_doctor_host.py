"""Limits, processors, huge pages: findings from invented limits and files."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.cli.doctor import host
from kvferry.cli.doctor.devices import Machine, Port
from kvferry.cli.doctor.findings import Finding, Mark

MIB = 1 << 20
NO_LIMIT = resource.RLIM_INFINITY
GPUS = ("GPU",) * 8
CORES = len(os.sched_getaffinity(0))


def write(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def limit(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int = NO_LIMIT) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))


@pytest.mark.parametrize(
    ("locked", "capabilities", "ports", "mark"),
    [
        (NO_LIMIT, "0", 8, Mark.OK),
        (8 * MIB, "4000", 8, Mark.OK),
        (8 * MIB, "0", 0, Mark.OK),
        (8 * MIB, "a80425fb", 1, Mark.BROKEN),
    ],
)
def test_locked_memory_matters_where_an_rdma_device_locks_it(
    locked: int,
    capabilities: str,
    ports: int,
    mark: Mark,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CAP_IPC_LOCK is bit 14; a80425fb is Docker's default, without it."""
    limit(monkeypatch, locked)
    root = write(tmp_path, **{"proc/self/status": f"Name: x\nCapEff:\t{capabilities}\n"})
    (finding,) = host.check_locked_memory(Machine(ports=(Port("mlx5_0:1"),) * ports, root=root))
    assert finding.mark is mark


def files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int = NO_LIMIT) -> Finding:
    limit(monkeypatch, soft, hard)
    (finding,) = host.check_files(Machine())
    return finding


@pytest.mark.parametrize(
    ("soft", "mark", "room"),
    [
        (NO_LIMIT, Mark.OK, "no limit"),
        (65536, Mark.OK, "room for 32640 peer workers"),
        (1024, Mark.OK, "room for 384 peer workers"),
        (300, Mark.LOOK, "room for 22 peer workers"),
        (256, Mark.BROKEN, "room for 0 peer workers"),
    ],
)
def test_open_files_are_reported_as_a_number_of_peers(
    soft: int, mark: Mark, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = files(monkeypatch, soft)
    assert (finding.mark, room in finding.found) == (mark, True), finding


def test_the_suggested_limit_is_at_most_the_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files(monkeypatch, 256, 4096).do.startswith("ulimit -n 4096;")
    assert files(monkeypatch, 256, 256).do.startswith("raise the hard limit as root;")


@pytest.mark.parametrize(
    ("total", "free", "mark"),
    [
        (None, None, Mark.BROKEN),
        (64 * MIB, 64 * MIB, Mark.BROKEN),
        (64 << 30, 10 * MIB, Mark.BROKEN),
        (64 << 30, 512 * MIB, Mark.LOOK),
        (8 << 30, 8 << 30, Mark.OK),
    ],
)
def test_shared_memory_must_be_large_enough_and_dockers_default_is_not(
    total: int | None, free: int | None, mark: Mark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if total is not None and free is not None:
        (tmp_path / "dev/shm").mkdir(parents=True)
        size = SimpleNamespace(f_frsize=4096, f_blocks=total // 4096, f_bavail=free // 4096)
        monkeypatch.setattr(os, "statvfs", lambda _: size)
    (finding,) = host.check_shared_memory(Machine(root=tmp_path))
    assert finding.mark is mark


CGROUP = {"proc/self/cgroup": "0::/a/b\n"}
OWN, PARENT = "sys/fs/cgroup/a/b/cpu.max", "sys/fs/cgroup/a/cpu.max"
OLD = "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs"
OLD_CGROUP = {
    "proc/self/cgroup": "4:cpu,cpuacct:/job\n1:memory:/job\n",
    f"{OLD}_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("written", "quota"),
    [
        ({**CGROUP, OWN: "400000 100000\n"}, "a quota of 4"),
        ({**CGROUP, OWN: "max 100000\n", PARENT: "150000 100000\n"}, "a quota of 1.5"),
        ({**CGROUP, OWN: "400000 100000\n", PARENT: "150000 100000\n"}, "a quota of 1.5"),
        ({**CGROUP, OWN: "max 100000\n"}, "no quota"),
        (CGROUP, "no quota"),
        ({**OLD_CGROUP, f"{OLD}_quota_us": "250000\n"}, "a quota of 2.5"),
        ({**OLD_CGROUP, f"{OLD}_quota_us": "-1\n"}, "no quota"),
        ({}, "no quota"),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_its_parents_counts(
    written: dict[str, str], quota: str, tmp_path: Path
) -> None:
    (finding,) = host.check_processors(Machine(root=write(tmp_path, **written)))
    assert finding.found.startswith(f"{CORES} cores, {quota}")


@pytest.mark.parametrize(
    ("quota", "omp", "gpus", "mark", "said"),
    [
        (64, "64", 8, Mark.OK, "a quota of 64"),
        (4, "4", 8, Mark.LOOK, "8 GPU workers"),
        (16, "64", 8, Mark.LOOK, "64 threads compute"),
        (16, "16", 8, Mark.OK, "a quota of 16"),
        (0.5, "", 0, Mark.LOOK, "a quota of 0.5"),
    ],
)
def test_a_quota_below_the_threads_is_reported(
    quota: float, omp: str, gpus: int, mark: Mark, said: str, tmp_path: Path
) -> None:
    root = write(tmp_path, **CGROUP, **{OWN: f"{quota * 100000:.0f} 100000\n"})
    (finding,) = host.check_processors(
        Machine({"OMP_NUM_THREADS": omp}, gpus=GPUS[:gpus], root=root)
    )
    assert (finding.mark, said in finding.found) == (mark, True), finding


@pytest.mark.parametrize(
    ("setting", "environ", "gpus", "mark", "do"),
    [
        ("[always] madvise never", {"THP_MEM_ALLOC_ENABLE": "1"}, 0, Mark.OK, ""),
        ("always [madvise] never", {"THP_MEM_ALLOC_ENABLE": "1"}, 0, Mark.OK, ""),
        ("[always] madvise never", {}, 0, Mark.LOOK, "export THP_MEM_ALLOC_ENABLE=1"),
        ("always [madvise] never", {}, 0, Mark.LOOK, "export THP_MEM_ALLOC_ENABLE=1"),
        (
            "always [madvise] never",
            {"THP_MEM_ALLOC_ENABLE": "0"},
            0,
            Mark.LOOK,
            "export THP_MEM_ALLOC_ENABLE=1",
        ),
        ("always [madvise] never", {}, 8, Mark.OK, ""),
        ("always madvise [never]", {}, 0, Mark.LOOK, "echo madvise >"),
        ("always madvise [never]", {}, 8, Mark.OK, ""),
        (None, {}, 0, Mark.OK, ""),
    ],
)
def test_huge_pages_matter_for_caches_in_host_memory_where_torch_asks_for_them(
    setting: str | None, environ: dict[str, str], gpus: int, mark: Mark, do: str, tmp_path: Path
) -> None:
    if setting is not None:
        write(tmp_path, **{"sys/kernel/mm/transparent_hugepage/enabled": f"{setting}\n"})
    (finding,) = host.check_huge_pages(Machine(environ, gpus=GPUS[:gpus], root=tmp_path))
    assert (finding.mark, finding.do.startswith(do)) == (mark, True), finding
