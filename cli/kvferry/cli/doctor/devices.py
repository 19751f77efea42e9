"""The machine: its GPUs and NICs, found in sysfs; GPUs have the names of `nvidia-smi` if it is installed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.cli.doctor.findings import Finding, look, ok

_NVIDIA = "0x10de"
_DISPLAY = re.compile(r"0x030[02]00")


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device: `mlx5_0:1`; its state (`ACTIVE`, `DOWN`, …) and rate (`400 Gb/sec`)."""

    name: str
    state: str = ""
    rate: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that is checked.

    Attributes:
        environ: of the engines that will run here.
        ranks: data-parallel ranks of an engine on this machine.
        timeout_s: for all checks together.
        gpus, ports, interfaces: those that are visible here (or in this container); without `nvidia-smi` a GPU has its
            PCI address as name.
        peer_memory: whether the module `nvidia_peermem` is loaded.
        root: where `sys`, `proc` and `dev` are.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    timeout_s: float = 8.0
    gpus: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    interfaces: tuple[str, ...] = ()
    peer_memory: bool = False
    root: Path = Path("/")

    @property
    def active_ports(self) -> tuple[Port, ...]:
        """The ports that are up."""
        return tuple(port for port in self.ports if port.state == "ACTIVE")

    def text(self, path: str) -> str:
        """The content of a file below the root, `""` if there is none."""
        return _text(self.root / path)


def this_machine(
    environ: Mapping[str, str], ranks: int, timeout_s: float, root: Path = Path("/")
) -> Machine:
    """Find the devices; what cannot be read is missing."""
    names = _names_of_gpus()
    # A sandbox may hide their PCI bus.
    gpus = {address: address for address in _gpus(root)} | names
    return Machine(
        environ=environ,
        ranks=ranks,
        timeout_s=timeout_s,
        gpus=tuple(gpus.values()),
        ports=tuple(_ports(root)),
        interfaces=tuple(one.name for one in _inside(root / "sys/class/net")),
        peer_memory=(root / "sys/module/nvidia_peermem").exists(),
        root=root,
    )


def check_devices(machine: Machine) -> Iterator[Finding]:
    """GPUs and NICs."""
    yield ok("GPUs", ", ".join(machine.gpus) or "none found")
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


def _gpus(root: Path) -> Iterator[str]:
    """PCI addresses."""
    for folder in _inside(root / "sys/bus/pci/devices"):
        if _text(folder / "vendor") == _NVIDIA and _DISPLAY.fullmatch(_text(folder / "class")):
            yield folder.name


def _ports(root: Path) -> Iterator[Port]:
    for device in _inside(root / "sys/class/infiniband"):
        for port in _inside(device / "ports"):
            state = _text(port / "state").partition(":")[2].strip()
            yield Port(f"{device.name}:{port.name}", state, _text(port / "rate"))


def _names_of_gpus() -> dict[str, str]:
    """PCI address → `GPU 0 (NVIDIA H100 …)`. Empty if there is no `nvidia-smi`, or it hangs."""
    query = ["nvidia-smi", "--query-gpu=index,name,pci.bus_id", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(
            query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return {}
    try:
        printed, _ = asked.communicate(timeout=3)
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: in a driver's call not even a signal ends it
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
