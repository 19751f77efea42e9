"""The machine: GPUs, NICs, and their distances on PCIe.

Distances have the names of `nvidia-smi topo -m`: PIX (under one switch), PXB (several switches), PHB (one host bridge),
NODE (one NUMA node), SYS (between NUMA nodes). GPUs and NICs are found in sysfs, names of GPUs with `nvidia-smi` if it
is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from kvferry.cli.doctor.findings import Finding, look, ok

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""From the nearest to the farthest."""
_NVIDIA = "0x10de"
_DISPLAY = re.compile(r"0x030[02]00")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or one port of an RDMA device.

    Attributes:
        name: of a port `mlx5_0:1`; of a GPU its PCI address if there is no `nvidia-smi`.
        path: from the host bridge to the device, e.g. `("pci0000:16", "0000:16:01.0", …, "0000:1a:00.0")`.
        numa_node: -1 if unknown.
        state, rate: of a port: `ACTIVE`, `DOWN`, …; `400 Gb/sec`.
    """

    name: str
    path: tuple[str, ...] = ()
    numa_node: int = -1
    state: str = ""
    rate: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that is checked.

    Attributes:
        environ: of the engines that will run here.
        ranks: data-parallel ranks of an engine on this machine.
        timeout_s: for the start of the loopback transfer, and for one read of it.
        gpus, ports, interfaces: those that are visible here (or in this container).
        peer_memory: whether the module `nvidia_peermem` is loaded.
        root: where `sys`, `proc` and `dev` are.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    timeout_s: float = 30.0
    gpus: tuple[Device, ...] = ()
    ports: tuple[Device, ...] = ()
    interfaces: tuple[str, ...] = ()
    peer_memory: bool = False
    root: Path = Path("/")

    @property
    def active_ports(self) -> tuple[Device, ...]:
        """The ports that are up."""
        return tuple(port for port in self.ports if port.state == "ACTIVE")

    def text(self, path: str) -> str:
        """The content of a file below the root, `""` if there is none."""
        return _text(self.root / path)


def this_machine(environ: Mapping[str, str], ranks: int, timeout_s: float, root: Path = Path("/")) -> Machine:
    """Find the devices; what cannot be read is missing."""
    names = _names_of_gpus()
    gpus = list(_gpus(root, names))
    found = {gpu.path[-1] for gpu in gpus}
    # A sandbox may hide their PCI bus.
    gpus += [Device(name) for address, name in names.items() if address not in found]
    return Machine(
        environ=environ,
        ranks=ranks,
        timeout_s=timeout_s,
        gpus=tuple(gpus),
        ports=tuple(_ports(root)),
        interfaces=tuple(one.name for one in _inside(root / "sys/class/net")),
        peer_memory=(root / "sys/module/nvidia_peermem").exists(),
        root=root,
    )


def distance(one: Device, other: Device) -> str:
    """The distance of two devices, one of `DISTANCES`."""
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False))))
    if shared >= 2:
        # Below a switch's upstream port a device has its downstream port and itself.
        return "PIX" if max(len(one.path), len(other.path)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    return "NODE" if one.numa_node == other.numa_node >= 0 else "SYS"


def check_devices(machine: Machine) -> Iterator[Finding]:
    """GPUs, NICs, and for each GPU the NICs that are nearest to it."""
    yield ok("GPUs", ", ".join(gpu.name for gpu in machine.gpus) or "none found")
    active = machine.active_ports
    if not machine.ports:
        found = f"none found in /sys/class/infiniband; network interfaces: {', '.join(machine.interfaces) or 'none'}"
        do = "expected on one host; between hosts reads go over TCP: Docker: --device /dev/infiniband"
        yield look("NICs", found, do) if machine.gpus else ok("NICs", found)
    if active:
        yield ok("NICs", ", ".join(f"{port.name} {port.rate}".strip() for port in active))
    for port in machine.ports:
        if port not in active:
            do = f"ibstat {port.name.partition(':')[0]}; check cable and switch, or leave it out of UCX_NET_DEVICES"
            yield look("NICs", f"{port.name} is {port.state or 'in an unknown state'}", do)
    if machine.gpus and active and not machine.peer_memory:
        do = "modprobe nvidia_peermem; not needed where driver and kernel do DMA-BUF (open driver, kernel from 5.12)"
        yield look("GPUDirect RDMA", "the module nvidia_peermem is not loaded", do)
    if active:
        yield from (_nearest(gpu, active) for gpu in machine.gpus)


def _nearest(gpu: Device, active: tuple[Device, ...]) -> Finding:
    word = min((distance(gpu, port) for port in active), key=DISTANCES.index)
    names = ", ".join(port.name for port in active if distance(gpu, port) == word)
    if word == "SYS":
        do = "compare nvidia-smi topo -m; in a virtual machine or container the NUMA nodes may be hidden"
        return look(f"NIC of {gpu.name}", f"the nearest, {names}, is on another NUMA node (SYS)", do)
    return ok(f"NIC of {gpu.name}", f"{names} ({word})")


def _gpus(root: Path, names: Mapping[str, str]) -> Iterator[Device]:
    for folder in _inside(root / "sys/bus/pci/devices"):
        if _text(folder / "vendor") == _NVIDIA and _DISPLAY.fullmatch(_text(folder / "class")):
            yield Device(names.get(folder.name, folder.name), *_place(folder))


def _ports(root: Path) -> Iterator[Device]:
    for device in _inside(root / "sys/class/infiniband"):
        for port in _inside(device / "ports"):
            state = _text(port / "state").partition(":")[2].strip()
            yield Device(f"{device.name}:{port.name}", *_place(device / "device"), state, _text(port / "rate"))


def _place(folder: Path) -> tuple[tuple[str, ...], int]:
    """Path and NUMA node."""
    parts = Path(os.path.realpath(folder)).parts
    bridges = [index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]{2}", part)]
    node = _text(folder / "numa_node")
    return parts[bridges[0] :] if bridges else parts, int(node) if re.fullmatch(r"-?[0-9]+", node) else -1


def _names_of_gpus() -> dict[str, str]:
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
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
