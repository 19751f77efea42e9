"""AWS EFA, which NIXL reads over with its plugin LIBFABRIC in place of UCX.

The plugin is in NIXL's wheel, and needs libraries that are not: libfabric, hwloc and those of the GPU's driver. If one
is missing, NIXL says `NIXL_ERR_NOT_FOUND`; the system's loader names it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, broken, look, ok

CHECK = "EFA"
_PLUGIN = ("plugins", "libplugin_LIBFABRIC.so")
"""Where NIXL looks for it; the wheel has a second copy, which does not load."""
_BUILDS = ("nixl-cu12", "nixl-cu13")
_LOAD = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1])"
"""With torch, which brings the CUDA runtime along, as in an engine."""
_LOAD_S = 20.0
_KEY = '"backends": ["LIBFABRIC"] on both sides'


def check_efa(machine: Machine) -> Iterator[Finding]:
    """Whether NIXL can use the EFA devices of this machine, if it has any."""
    devices = ", ".join(efa_devices(machine))
    if not devices:
        yield ok(CHECK, "no EFA device")
        return
    failures = {name: load_error(plugin, machine) for name, plugin in plugins().items()}
    works = [name for name, failure in failures.items() if not failure]
    if works:
        found = f"{devices}; its plugin loads ({works[0]}), and kvferry was never run over EFA"
        yield look(CHECK, found, f"set {_KEY}")
    else:
        failed = (
            "; ".join(f"{name}: {failure}" for name, failure in failures.items())
            or "no build of NIXL has it"
        )
        do = f"install libfabric (AWS: the EFA installer), hwloc and the GPU's driver, and set {_KEY}"
        yield broken(CHECK, f"{devices}, and its plugin does not load ({failed})", do)


def efa_devices(machine: Machine) -> list[str]:
    """RDMA devices that the driver `efa` runs."""
    drivers = machine.root.glob("sys/class/infiniband/*/device/driver")
    return sorted(one.parents[1].name for one in drivers if one.resolve().name == "efa")


def plugins() -> dict[str, Path]:
    """The plugin's file by distribution, of the builds of NIXL that are installed."""
    found = {}
    for name in _BUILDS:
        try:
            files = metadata.files(name) or ()
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.parts[-2:] == _PLUGIN:
                found[name] = Path(str(file.locate()))
    return found


def load_error(plugin: Path, machine: Machine) -> str:
    """Load it in another process; the loader's error, empty if there is none."""
    command = [sys.executable, "-c", _LOAD, str(plugin)]
    try:
        done = subprocess.run(
            command,
            env=dict(machine.environ),
            capture_output=True,
            text=True,
            timeout=_LOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not loaded within {_LOAD_S:g} s"
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return last.removeprefix("OSError: ") if done.returncode else ""
