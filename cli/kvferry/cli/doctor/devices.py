"""The machine: its GPUs and NICs, found in sysfs; GPUs have the names of `nvidia-smi` if it is installed.

NIXL reads over AWS EFA with its plugin LIBFABRIC in place of UCX.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from kvferry.cli.doctor.findings import Finding, broken, look, ok

_NVIDIA = "0x10de"
# A GPU's audio device has the same vendor and another class.
_DISPLAY = re.compile(r"0x030[02]00")

# Where NIXL looks for it; the wheel has a second copy, which does not load.
_PLUGIN = ("plugins", "libplugin_LIBFABRIC.so")
NIXL_BUILDS = ("nixl-cu12", "nixl-cu13")
# With torch, which brings the CUDA runtime along, as in an engine.
_LOAD = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1])"
_CHILD_TIMEOUT_S = 20.0


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
    gpus: dict[str, str] = {}
    for device in _found(root, "sys/bus/pci/devices/*"):
        is_nvidia = _text(device / "vendor") == _NVIDIA
        if is_nvidia and _DISPLAY.fullmatch(_text(device / "class")):
            gpus[device.name] = device.name
    # Also those that only nvidia-smi knows: a sandbox may hide their PCI bus.
    gpus |= _names_of_gpus()
    ports: list[Port] = []
    for port in _found(root, "sys/class/infiniband/*/ports/*"):
        name = f"{port.parents[1].name}:{port.name}"
        state = _text(port / "state").partition(":")[2].strip()
        ports.append(Port(name, state, _text(port / "rate")))
    return Machine(
        environ=environ,
        ranks=ranks,
        timeout_s=timeout_s,
        gpus=tuple(gpus.values()),
        ports=tuple(ports),
        interfaces=tuple(folder.name for folder in _found(root, "sys/class/net/*")),
        peer_memory=(root / "sys/module/nvidia_peermem").exists(),
        root=root,
    )


def check_devices(machine: Machine) -> Iterator[Finding]:
    """GPUs and NICs."""
    yield ok(", ".join(machine.gpus) or "none found", "GPUs")
    active = machine.active_ports
    if not machine.ports:
        interfaces = ", ".join(machine.interfaces) or "none"
        found = f"none found in /sys/class/infiniband; network interfaces: {interfaces}"
        nics = ok(found, "NICs")
        if machine.gpus:
            do = "expected on one host; between hosts reads go over TCP: Docker: --device /dev/infiniband"
            nics = look(found, do, "NICs")
        yield nics
    if active:
        yield ok(
            ", ".join(f"{port.name} {port.rate}".strip() for port in active), "NICs"
        )
    for port in machine.ports:
        if port not in active:
            found = f"{port.name} is {port.state or 'in an unknown state'}"
            device = port.name.partition(":")[0]
            do = f"ibstat {device}; check cable and switch, or leave it out of UCX_NET_DEVICES"
            yield look(found, do, "NICs")
    if machine.gpus and active and not machine.peer_memory:
        yield look(
            "the module nvidia_peermem is not loaded",
            "modprobe nvidia_peermem; not needed where driver and kernel do DMA-BUF (open driver, kernel from 5.12)",
            "GPUDirect RDMA",
        )


def check_efa(machine: Machine) -> Iterator[Finding]:
    """Whether NIXL can use the EFA devices of this machine, if it has any."""
    devices = ", ".join(efa_devices(machine))
    if not devices:
        yield ok("no EFA device")
        return
    key = '"backends": ["LIBFABRIC"] on both sides'
    failures = []
    for build, plugin in plugins().items():
        failure = load_error(plugin, machine)
        if not failure:
            found = f"{devices}; its plugin loads ({build}), but kvferry was never run over EFA"
            yield look(found, f"set {key}")
            return
        failures.append(f"{build}: {failure}")
    why = "; ".join(failures) or "no build of NIXL has it"
    yield broken(
        f"{devices}, but its plugin does not load ({why})",
        f"install libfabric (AWS: the EFA installer), hwloc and the GPU's driver, and set {key}",
    )


def efa_devices(machine: Machine) -> list[str]:
    """RDMA devices that the driver `efa` runs."""
    drivers = _found(machine.root, "sys/class/infiniband/*/device/driver")
    return [
        driver.parents[1].name for driver in drivers if driver.resolve().name == "efa"
    ]


def plugins() -> dict[str, Path]:
    """The plugin's file by distribution, of the builds of NIXL that are installed."""
    by_build = {}
    for build in NIXL_BUILDS:
        try:
            # By the list of its files: an import of NIXL would load what may be broken.
            files = metadata.files(build) or ()
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.parts[-2:] == _PLUGIN:
                by_build[build] = Path(str(file.locate()))
    return by_build


def load_error(plugin: Path, machine: Machine) -> str:
    """Load it in another process; the loader's error, empty if there is none."""
    # NIXL's wheel has the plugin, but not libfabric, hwloc and the libraries of the GPU's driver. If one is missing,
    # NIXL says only `NIXL_ERR_NOT_FOUND`; the system's loader names it.
    return error_of(_LOAD, str(plugin), environ=machine.environ)


def error_of(code: str, *arguments: str, environ: Mapping[str, str]) -> str:
    """Run this code in another Python; the error that ends it, empty if there is none."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHILD_TIMEOUT_S:g} s"
    if ran.returncode == 0:
        return ""
    lines = ran.stderr.strip().splitlines() or [f"status {ran.returncode}"]
    return lines[-1].removeprefix("OSError: ")


def _names_of_gpus() -> dict[str, str]:
    """PCI address → `GPU 0 (NVIDIA H100 …)`. Empty if there is no `nvidia-smi`, or it hangs."""
    command = [
        "nvidia-smi",
        "--query-gpu=index,name,pci.bus_id",
        "--format=csv,noheader",
    ]
    try:
        query = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return {}
    try:
        printed, _ = query.communicate(timeout=3)
    except subprocess.TimeoutExpired:
        # It is killed, and not waited for: in a driver's call not even a signal ends it.
        query.kill()
        return {}
    names = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            index, name, address = cells
            # nvidia-smi writes eight digits of the domain, sysfs four.
            names[address.lower()[-12:]] = f"GPU {index} ({name})"
    return names


def _found(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
