"""GPUs and NICs: findings from invented machines, and an invented sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.cli.doctor.devices import Machine, Port, check_devices, this_machine
from kvferry.cli.doctor.findings import Finding, Mark

UP, DOWN = Port("mlx5_0:1", "ACTIVE", "400 Gb/sec"), Port("mlx5_1:1", "DOWN")
GPU, NIC, AUDIO = "0000:19:00.0", "0000:1a:00.0", "0000:16:09.0"


def judged(gpus: int, *ports: Port, peer_memory: bool = True) -> list[Finding]:
    return list(check_devices(Machine(gpus=("GPU",) * gpus, ports=ports, peer_memory=peer_memory)))


@pytest.mark.parametrize(("gpus", "mark"), [(0, Mark.OK), (1, Mark.LOOK)])
def test_without_a_nic_a_machine_with_gpus_is_worth_a_look(gpus: int, mark: Mark) -> None:
    assert [(one.check, one.mark) for one in judged(gpus)] == [("GPUs", Mark.OK), ("NICs", mark)]


def test_a_port_that_is_down_is_named() -> None:
    findings = judged(1, UP, DOWN)
    assert [(one.mark, one.found) for one in findings[1:]] == [
        (Mark.OK, "mlx5_0:1 400 Gb/sec"),
        (Mark.LOOK, "mlx5_1:1 is DOWN"),
    ]


@pytest.mark.parametrize(
    ("gpus", "peer_memory", "asked"), [(1, False, True), (1, True, False), (0, False, False)]
)
def test_gpudirect_is_checked_only_with_gpus_and_active_nics(
    gpus: int, peer_memory: bool, asked: bool
) -> None:
    findings = judged(gpus, UP, peer_memory=peer_memory)
    assert ("GPUDirect RDMA" in {one.check for one in findings}) is asked


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with a GPU, its audio device, a NIC and a network interface."""
    kinds = {
        GPU: ("0x10de", "0x030200"),
        NIC: ("0x15b3", "0x020700"),
        AUDIO: ("0x10de", "0x040300"),
    }
    for address, (vendor, kind) in kinds.items():
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec\n")
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    return tmp_path


def test_gpus_and_nics_are_found_in_sysfs(root: Path) -> None:
    assert this_machine({}, 1, 1.0, root) == Machine(
        {}, 1, 1.0, (GPU,), (UP,), ("eth0",), root=root
    )


def test_gpus_have_the_names_of_nvidia_smi_and_those_that_a_sandbox_hides_are_there_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "1, NVIDIA H100, 00000000:19:00.0\n2, NVIDIA H200, 00000000:AB:00.0"
    (root / "nvidia-smi").write_text(f"#!/bin/sh\necho '{rows}'\n")
    (root / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    assert this_machine({}, 1, 1.0, root).gpus == ("GPU 1 (NVIDIA H100)", "GPU 2 (NVIDIA H200)")


def test_a_machine_without_sysfs_has_nothing(tmp_path: Path) -> None:
    assert this_machine({}, 1, 1.0, tmp_path) == Machine({}, 1, 1.0, root=tmp_path)
