"""GPUs, NICs, and their distances on PCIe.

Distances have the names of `nvidia-smi topo -m`: PIX (under one switch), PXB (several switches), PHB (one host bridge),
NODE (one NUMA node), SYS (between NUMA nodes). GPUs and NICs are found in sysfs, names of GPUs with `nvidia-smi` if it
is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.doctor.findings import Finding, look, ok

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""From the nearest to the farthest."""


@dataclass(frozen=True, slots=True)
class PciPlace:
    """A device's place on PCIe.

    Attributes:
        path: from the host bridge to the device, e.g. `("pci0000:16", "0000:16:01.0", …, "0000:1a:00.0")`.
        numa_node: -1 if unknown.
    """

    path: tuple[str, ...]
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU. `name` is its PCI address without `nvidia-smi`."""

    name: str
    place: PciPlace


@dataclass(frozen=True, slots=True)
class NicPort:
    """One port of an RDMA device, e.g. `mlx5_0:1`, with its state (`ACTIVE`, `DOWN`, …) and rate (`400 Gb/sec`)."""

    name: str
    place: PciPlace
    state: str
    rate: str = ""

    @property
    def active(self) -> bool:
        """Whether the port is up."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class Devices:
    """All devices of a machine. peer_memory: whether the module `nvidia_peermem` is loaded."""

    gpus: tuple[Gpu, ...] = ()
    ports: tuple[NicPort, ...] = ()
    interfaces: tuple[str, ...] = ()
    peer_memory: bool = False


def distance(one: PciPlace, other: PciPlace) -> str:
    """The distance of two devices, one of `DISTANCES`."""
    shared = 0
    for mine, theirs in zip(one.path, other.path):  # noqa: B905 - paths differ in length
        if mine != theirs:
            break
        shared += 1
    if shared >= 2:
        # Below a switch's upstream port a device has its downstream port and itself.
        return "PIX" if max(len(one.path), len(other.path)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    same_node = one.numa_node == other.numa_node and one.numa_node >= 0
    return "NODE" if same_node else "SYS"


def nearest(gpu: Gpu, ports: tuple[NicPort, ...]) -> tuple[str, tuple[NicPort, ...]]:
    """The smallest distance from a GPU to an active port, and the ports at it; `("", ())` if none is active."""
    by_distance = {
        word: tuple(p for p in ports if p.active and distance(gpu.place, p.place) == word) for word in DISTANCES
    }
    return next(((word, found) for word, found in by_distance.items() if found), ("", ()))


def judge_devices(devices: Devices) -> Iterator[Finding]:
    """GPUs, NICs, and for each GPU the NICs that are nearest to it."""
    yield ok("GPUs", ", ".join(gpu.name for gpu in devices.gpus) or "none found")
    yield from _ports(devices)
    active = [port for port in devices.ports if port.active]
    if devices.gpus and active and not devices.peer_memory:
        do = (
            "modprobe nvidia_peermem; not needed where driver and kernel do DMA-BUF (open driver, kernel 5.12 or newer)"
        )
        yield look("GPUDirect RDMA", "the module nvidia_peermem is not loaded", do)
    if active:
        yield from (_gpu(gpu, devices.ports) for gpu in devices.gpus)


def _ports(devices: Devices) -> Iterator[Finding]:
    active = [port for port in devices.ports if port.active]
    if not devices.ports:
        found = f"none found in /sys/class/infiniband; network interfaces: {', '.join(devices.interfaces) or 'none'}"
        if devices.gpus:
            do = "expected on one host; between hosts reads go over TCP: Docker: --device /dev/infiniband"
            yield look("NICs", found, do)
        else:
            yield ok("NICs", found)
        return
    if active:
        yield ok("NICs", ", ".join(f"{port.name} {port.rate}".strip() for port in active))
    for port in devices.ports:
        if not port.active:
            do = f"ibstat {port.name.partition(':')[0]}; check cable and switch, or leave it out of UCX_NET_DEVICES"
            yield look("NICs", f"{port.name} is {port.state or 'in an unknown state'}", do)


def _gpu(gpu: Gpu, ports: tuple[NicPort, ...]) -> Finding:
    word, found = nearest(gpu, ports)
    names = ", ".join(port.name for port in found)
    if word == "SYS":
        do = "compare nvidia-smi topo -m; in a virtual machine or container the NUMA nodes may be hidden"
        return look(f"NIC of {gpu.name}", f"the nearest, {names}, is on another NUMA node (SYS)", do)
    return ok(f"NIC of {gpu.name}", f"{names} ({word})")


_NVIDIA = "0x10de"
_DISPLAY = re.compile(r"0x030[02]00")
_STATE = re.compile(r"[0-9]+: *([A-Z_]+)")


def gather_devices(root: Path = Path("/")) -> Devices:
    """All devices that are visible on this machine (or in this container)."""
    names = _names()
    found = sorted(_gpus(root / "sys/bus/pci/devices"))
    gpus = [Gpu(names.get(address, address), _place(folder)) for address, folder in found]
    # A sandbox may hide their PCI bus.
    gpus += [Gpu(name, PciPlace(())) for address, name in names.items() if address not in dict(found)]
    return Devices(
        gpus=tuple(gpus),
        ports=tuple(_read_ports(root / "sys/class/infiniband")),
        interfaces=tuple(sorted(one.name for one in _inside(root / "sys/class/net"))),
        peer_memory=(root / "sys/module/nvidia_peermem").exists(),
    )


def _gpus(devices: Path) -> Iterator[tuple[str, Path]]:
    for folder in _inside(devices):
        if _text(folder / "vendor") == _NVIDIA and _DISPLAY.fullmatch(_text(folder / "class")):
            yield folder.name, folder


def _read_ports(devices: Path) -> Iterator[NicPort]:
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
    """PCI address → `GPU 0 (NVIDIA H100 …)`. Empty if there is no `nvidia-smi`, or it hangs."""
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
