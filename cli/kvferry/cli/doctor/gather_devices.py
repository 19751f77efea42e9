"""GPUs and NICs, from sysfs; names of GPUs from `nvidia-smi` where it is there."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvferry.cli.doctor.devices import Devices, Gpu, NicPort, PciPlace

_NVIDIA = "0x10de"
_DISPLAY = re.compile(r"0x030[02]00")
_STATE = re.compile(r"[0-9]+: *([A-Z_]+)")


def gather_devices(root: Path = Path("/")) -> Devices:
    """All that this machine (or container) shows."""
    names = _names()
    found = sorted(_gpus(root / "sys/bus/pci/devices"))
    gpus = [Gpu(names.get(address, address), _place(folder)) for address, folder in found]
    # A sandbox may hide the bus from which they hang.
    gpus += [Gpu(name, PciPlace(())) for address, name in names.items() if address not in dict(found)]
    return Devices(
        gpus=tuple(gpus),
        ports=tuple(_ports(root / "sys/class/infiniband")),
        interfaces=tuple(sorted(one.name for one in _inside(root / "sys/class/net"))),
        peer_memory=(root / "sys/module/nvidia_peermem").exists(),
    )


def _gpus(devices: Path) -> Iterator[tuple[str, Path]]:
    for folder in _inside(devices):
        if _text(folder / "vendor") == _NVIDIA and _DISPLAY.fullmatch(_text(folder / "class")):
            yield folder.name, folder


def _ports(devices: Path) -> Iterator[NicPort]:
    for device in sorted(_inside(devices)):
        place = _place(device / "device")
        for port in sorted(_inside(device / "ports")):
            state = _STATE.match(_text(port / "state"))
            yield NicPort(f"{device.name}:{port.name}", place, state[1] if state else "", _text(port / "rate"))


def _place(folder: Path) -> PciPlace:
    parts = Path(os.path.realpath(folder)).parts
    bridges = [index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]{2}", part)]
    node = _text(folder / "numa_node")
    path = parts[bridges[0] :] if bridges else parts
    return PciPlace(path, int(node) if re.fullmatch(r"-?[0-9]+", node) else -1)


def _names() -> dict[str, str]:
    """PCI address → `GPU 0 (NVIDIA H100 …)`. Empty where there is no `nvidia-smi`, or it hangs."""
    query = ["nvidia-smi", "--query-gpu=index,name,pci.bus_id", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=2, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines()]
    # nvidia-smi writes eight digits of the domain, sysfs four.
    return {row[2].lower()[-12:]: f"GPU {row[0]} ({row[1]})" for row in rows if len(row) == 3}


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
