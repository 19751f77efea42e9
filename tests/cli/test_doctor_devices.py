"""GPUs and NICs: distances and findings from invented machines, and an invented sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.doctor.devices import DISTANCES, Device, Machine, check_devices, distance, this_machine
from kvferry.cli.doctor.findings import Finding, Mark

HOST = "pci0000:16"
SWITCH = (HOST, "0000:16:01.0", "0000:17:00.0")
GPU = Device("GPU 0", (*SWITCH, "0000:18:00.0", "0000:19:00.0"), 0)


def place(*path: str, node: int = 0) -> Device:
    return Device("", path, node)


def port(name: str, where: Device, state: str = "ACTIVE") -> Device:
    return Device(name, where.path, where.numa_node, state, "400 Gb/sec")


def judged(*gpus: Device, ports: tuple[Device, ...] = (), peer_memory: bool = True) -> list[Finding]:
    return list(check_devices(Machine(gpus=gpus, ports=ports, interfaces=("eth0", "lo"), peer_memory=peer_memory)))


BESIDE = place(*SWITCH, "0000:18:01.0", "0000:1a:00.0")
BELOW_ANOTHER = place(*SWITCH, "0000:18:02.0", "0000:1b:00.0", "0000:1c:00.0", "0000:1d:00.0")
ANOTHER_ROOT_PORT = place(HOST, "0000:16:05.0", "0000:20:00.0")
ANOTHER_BRIDGE = place("pci0000:38", "0000:38:01.0", "0000:39:00.0")
ANOTHER_NODE = place("pci0000:98", "0000:98:01.0", "0000:99:00.0", node=1)


@pytest.mark.parametrize(
    ("where", "word"),
    [
        (BESIDE, "PIX"),
        (BELOW_ANOTHER, "PXB"),
        (ANOTHER_ROOT_PORT, "PHB"),
        (ANOTHER_BRIDGE, "NODE"),
        (ANOTHER_NODE, "SYS"),
        (place("pci0000:38", "0000:39:00.0", node=-1), "SYS"),
    ],
)
def test_the_distance_is_named_as_nvidia_smi_names_it(where: Device, word: str) -> None:
    assert distance(GPU, where) == word
    assert distance(where, GPU) == word


_PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(tuple)
_PLACES = st.builds(Device, st.just(""), _PATHS, st.sampled_from([-1, 0, 1]))


@given(_PLACES, st.lists(_PLACES, min_size=1, max_size=6), st.sampled_from(["DOWN", "ACTIVE"]))
def test_the_nearest_ports_are_active_and_none_that_is_active_is_nearer(
    where: Device, there: list[Device], last: str
) -> None:
    ports = [port(f"mlx5_{n}:1", at) for n, at in enumerate(there)] + [port("mlx5_9:1", where, last)]
    found = judged(where, ports=tuple(ports))[-1].found
    far = {one.name: DISTANCES.index(distance(where, one)) for one in ports if one.state == "ACTIVE"}
    nearest = [name for name, length in far.items() if length == min(far.values())]
    assert DISTANCES[min(far.values())] in found
    assert all((name in found) is (name in nearest) for name in [one.name for one in ports])


def test_a_machine_without_devices_has_findings_that_say_so() -> None:
    found = [(one.check, one.mark, one.found.partition(" in ")[0]) for one in judged()]
    assert found == [("GPUs", Mark.OK, "none found"), ("NICs", Mark.OK, "none found")]


def test_gpus_without_a_nic_are_worth_a_look() -> None:
    assert [(one.check, one.mark) for one in judged(GPU)] == [("GPUs", Mark.OK), ("NICs", Mark.LOOK)]


def test_every_gpu_has_its_nearest_nics_and_a_far_one_is_worth_a_look() -> None:
    far = Device("GPU 1", ANOTHER_NODE.path, 1)
    ports = (port("mlx5_0:1", BESIDE), port("mlx5_1:1", ANOTHER_BRIDGE))
    findings = {one.check: one for one in judged(GPU, far, ports=ports)}
    assert (findings["NIC of GPU 0"].mark, findings["NIC of GPU 0"].found) == (Mark.OK, "mlx5_0:1 (PIX)")
    assert findings["NIC of GPU 1"].mark is Mark.LOOK
    assert "mlx5_0:1, mlx5_1:1" in findings["NIC of GPU 1"].found


def test_a_port_that_is_down_is_named_and_is_never_the_nearest() -> None:
    findings = judged(GPU, ports=(port("mlx5_0:1", BESIDE, "DOWN"), port("mlx5_1:1", ANOTHER_BRIDGE)))
    assert [one.found for one in findings if one.mark is Mark.LOOK] == ["mlx5_0:1 is DOWN"]
    assert findings[-1].found == "mlx5_1:1 (NODE)"


@pytest.mark.parametrize(("gpus", "peer_memory", "asked"), [(1, False, True), (1, True, False), (0, False, False)])
def test_gpudirect_is_checked_only_with_gpus_and_active_nics(gpus: int, peer_memory: bool, asked: bool) -> None:
    findings = judged(*(GPU,) * gpus, ports=(port("mlx5_0:1", BESIDE),), peer_memory=peer_memory)
    assert ("GPUDirect RDMA" in {one.check for one in findings}) is asked


def make_device(root: Path, path: str, node: int, **files: str) -> Path:
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True)
    for name, content in {"numa_node": str(node), **files}.items():
        (folder / name).write_text(content + "\n")
    return folder


def test_gpus_and_nics_are_found_in_sysfs(tmp_path: Path) -> None:
    gpu = make_device(tmp_path, "/".join(GPU.path), 0, vendor="0x10de", **{"class": "0x030200"})
    nic = make_device(tmp_path, "/".join(BESIDE.path), 0, vendor="0x15b3", **{"class": "0x020700"})
    audio = make_device(tmp_path, f"{HOST}/0000:16:09.0", 0, vendor="0x10de", **{"class": "0x040300"})
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    for folder in (gpu, nic, audio):
        (tmp_path / "sys/bus/pci/devices" / folder.name).symlink_to(folder)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").symlink_to(nic)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    found = this_machine({}, 1, 1.0, tmp_path)
    assert [(one.name, one.path, one.numa_node) for one in found.gpus] == [("0000:19:00.0", GPU.path, 0)]
    assert found.ports == (Device("mlx5_0:1", BESIDE.path, 0, "ACTIVE", "400 Gb/sec (4X NDR)"),)
    assert (found.interfaces, found.peer_memory) == (("eth0",), False)
    assert distance(found.gpus[0], found.ports[0]) == "PIX"


def test_gpus_have_the_names_of_nvidia_smi_and_those_that_a_sandbox_hides_are_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = make_device(tmp_path, "/".join(GPU.path), 0, vendor="0x10de", **{"class": "0x030200"})
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices" / gpu.name).symlink_to(gpu)
    rows = "1, NVIDIA H100, 00000000:19:00.0\n2, NVIDIA H200, 00000000:AB:00.0"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{rows}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = this_machine({}, 1, 1.0, tmp_path).gpus
    assert [(one.name, one.numa_node) for one in found] == [("GPU 1 (NVIDIA H100)", 0), ("GPU 2 (NVIDIA H200)", -1)]


def test_a_machine_without_sysfs_has_nothing(tmp_path: Path) -> None:
    assert this_machine({}, 1, 1.0, tmp_path) == Machine({}, 1, 1.0, root=tmp_path)
