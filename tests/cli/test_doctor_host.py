"""Limits, processors, memory, clock: findings from invented facts, and gathering from invented files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.doctor.findings import Mark
from kvferry.cli.doctor.host import (
    Clock,
    ForeignMemory,
    HugePages,
    Processors,
    gather_clock,
    gather_foreign_memory,
    gather_huge_pages,
    gather_limits,
    gather_processors,
    gather_shared_memory,
    judge_clock,
    judge_foreign_memory,
    judge_huge_pages,
    judge_processors,
)
from kvferry.cli.doctor.limits import (
    FILES_OF_A_WORKER,
    Limits,
    SharedMemory,
    judge_files,
    judge_locked_memory,
    judge_shared_memory,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("locked", "may_lock", "ports", "mark"),
    [
        (None, False, 8, Mark.OK),
        (8 * MIB, True, 8, Mark.OK),
        (8 * MIB, False, 0, Mark.OK),
        (8 * MIB, False, 1, Mark.BROKEN),
    ],
)
def test_locked_memory_matters_where_an_rdma_device_locks_it(
    locked: int | None, may_lock: bool, ports: int, mark: Mark
) -> None:
    assert judge_locked_memory(Limits(locked, may_lock, None, None), ports).mark is mark


@pytest.mark.parametrize(
    ("files", "each", "mark", "room"),
    [
        (None, 8, Mark.OK, "no limit"),
        (65536, 8, Mark.OK, "room for 8160 peer workers"),
        (1024, 8, Mark.OK, "room for 96 peer workers"),
        (1024, 16, Mark.LOOK, "room for 48 peer workers"),
        (1024, None, Mark.OK, "at 2 files each"),
        (1024, 1, Mark.OK, "room for 384 peer workers"),
        (256, 8, Mark.BROKEN, "room for 0 peer workers"),
    ],
)
def test_open_files_are_reported_as_a_number_of_peers(
    files: int | None, each: int | None, mark: Mark, room: str
) -> None:
    finding = judge_files(Limits(None, False, files, 65536), each)
    assert (finding.mark, room in finding.found) == (mark, True), finding


def test_the_suggested_limit_is_at_most_the_hard_limit() -> None:
    assert judge_files(Limits(None, False, 256, 4096), 8).do.startswith("ulimit -n 4096;")
    assert judge_files(Limits(None, False, 256, 256), 8).do.startswith("raise the hard limit as root;")


@given(st.integers(0, 1 << 20), st.integers(0, 100))
def test_the_reported_number_of_peers_fits_and_one_more_does_not(files: int, each: int) -> None:
    reported = int(judge_files(Limits(None, False, files, None), each).found.split("room for ")[1].split()[0])
    spare = files - FILES_OF_A_WORKER
    assert reported * max(2, each) <= max(0, spare) < (reported + 1) * max(2, each)


@pytest.mark.parametrize(
    ("shm", "mark"),
    [
        (None, Mark.BROKEN),
        (SharedMemory(64 * MIB, 64 * MIB), Mark.BROKEN),
        (SharedMemory(64 << 30, 10 * MIB), Mark.BROKEN),
        (SharedMemory(64 << 30, 512 * MIB), Mark.LOOK),
        (SharedMemory(8 << 30, 8 << 30), Mark.OK),
    ],
)
def test_shared_memory_must_be_large_enough_and_dockers_default_is_not(shm: SharedMemory | None, mark: Mark) -> None:
    (finding,) = judge_shared_memory(shm)
    assert finding.mark is mark


@pytest.mark.parametrize(
    ("processors", "gpus", "mark", "said"),
    [
        (Processors(64, None, None), 8, Mark.OK, "no quota"),
        (Processors(64, 64.0, None), 8, Mark.OK, "a quota of 64"),
        (Processors(64, 4.0, 4), 8, Mark.LOOK, "8 GPU workers"),
        (Processors(64, 16.0, None), 8, Mark.LOOK, "64 threads compute"),
        (Processors(64, 16.0, 16), 8, Mark.OK, "a quota of 16"),
        (Processors(2, 0.5, None), 0, Mark.LOOK, "a quota of 0.5"),
    ],
)
def test_a_quota_below_the_threads_is_reported(processors: Processors, gpus: int, mark: Mark, said: str) -> None:
    finding = judge_processors(processors, gpus)
    assert (finding.mark, said in finding.found) == (mark, True), finding


@pytest.mark.parametrize(
    ("transparent", "gpus", "mark"),
    [
        ("always", 0, Mark.OK),
        ("madvise", 0, Mark.OK),
        ("never", 0, Mark.LOOK),
        ("never", 8, Mark.OK),
        (None, 0, Mark.OK),
    ],
)
def test_huge_pages_matter_for_caches_in_host_memory(transparent: str | None, gpus: int, mark: Mark) -> None:
    assert judge_huge_pages(HugePages(transparent, 0), gpus).mark is mark


@pytest.mark.parametrize(
    ("clock", "mark"),
    [
        (Clock(1e-9, True, "tsc"), Mark.OK),
        (Clock(1e-9, True, None), Mark.OK),
        (Clock(1e-9, True, "hpet"), Mark.LOOK),
        (Clock(4e-3, True, "tsc"), Mark.LOOK),
        (Clock(1e-9, False, "tsc"), Mark.BROKEN),
    ],
)
def test_the_clock_must_be_monotonic_and_fast_to_read(clock: Clock, mark: Mark) -> None:
    assert judge_clock(clock).mark is mark


def test_the_finding_explains_why_wall_clocks_do_not_matter() -> None:
    assert "only durations are sent" in judge_clock(Clock(1e-9, True, "tsc")).found


@pytest.mark.parametrize(
    ("memory", "mark", "do"),
    [
        (ForeignMemory("", None, False), Mark.OK, ""),
        (ForeignMemory("", 1, False), Mark.OK, ""),
        (ForeignMemory("EPERM", None, False), Mark.LOOK, "--cap-add SYS_PTRACE"),
        (ForeignMemory("EPERM", 1, True), Mark.LOOK, "--cap-add SYS_PTRACE"),
        (ForeignMemory("EPERM", 2, False), Mark.LOOK, "kernel.yama.ptrace_scope=1"),
        (ForeignMemory("ENOSYS", 0, False), Mark.LOOK, "--cap-add SYS_PTRACE"),
    ],
)
def test_refused_reads_between_processes_are_reported_with_the_permission_they_need(
    memory: ForeignMemory, mark: Mark, do: str
) -> None:
    finding = judge_foreign_memory(memory)
    assert finding.mark is mark
    assert do in finding.do


def write(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "400000 100000\n"}, 4.0),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/a/b/cpu.max": "400000 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({}, None),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_its_parents_counts(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    root = write(tmp_path, **{"proc/self/cgroup": "0::/a/b\n", **files})
    assert gather_processors({}, root).quota == quota


def test_the_older_cgroups_have_a_quota_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct/job"
    files = {f"{group}/cpu.cfs_quota_us": "250000\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    root = write(tmp_path, **{"proc/self/cgroup": "4:cpu,cpuacct:/job\n1:memory:/job\n", **files})
    assert gather_processors({"OMP_NUM_THREADS": "3"}, root) == Processors(
        gather_processors({}, root).allowed, 2.5, omp_threads=3
    )
    write(tmp_path, **{f"{group}/cpu.cfs_quota_us": "-1\n"})
    assert gather_processors({}, root).quota is None


def test_the_chosen_kind_of_huge_pages_is_the_one_in_brackets(tmp_path: Path) -> None:
    write(tmp_path, **{"proc/meminfo": "MemTotal: 5 kB\nHugePages_Total:      12\n"})
    assert gather_huge_pages(tmp_path) == HugePages(None, 12)
    write(tmp_path, **{"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"})
    assert gather_huge_pages(tmp_path) == HugePages("madvise", 12)


def test_a_missing_folder_of_shared_memory_is_no_error(tmp_path: Path) -> None:
    assert gather_shared_memory(str(tmp_path / "shm")) is None
    found = gather_shared_memory(str(tmp_path))
    assert found is not None
    assert 0 <= found.free_bytes <= found.total_bytes


def test_the_facts_of_this_machine_can_be_gathered() -> None:
    assert gather_clock().ahead
    limits = gather_limits()
    assert limits.files is None or limits.files_hard is None or limits.files <= limits.files_hard


def test_a_read_that_the_kernel_allows_returns_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused read is reported with its errno: here of a process that does not exist."""
    found = gather_foreign_memory()
    if found.refused:
        pytest.skip(f"this machine refuses process_vm_readv: {found.refused}")
    monkeypatch.setattr("kvferry.cli.doctor.host.os.getpid", lambda: 2**22 + 1)
    assert gather_foreign_memory().refused == errno.errorcode[errno.ESRCH]
