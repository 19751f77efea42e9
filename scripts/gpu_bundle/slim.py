"""Takes out of an unpacked NIXL what its backend UCX does not load: the other backends' plugins, with the libraries
that only these need."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_MODULES = "nixl_cu13"
_LIBRARIES = "nixl_cu13.libs"
_PLUGINS = ".nixl_cu13.mesonpy.libs"
_UNUSED = ("nixl_cu13.scripts", "nixl_ep_cu13", "nixl_ep")


class NoReadelf(Exception):
    """readelf could not be run."""


def slim_nixl(site: Path) -> None:
    """Remove the libraries that nothing needs which stays.

    Raises:
        NoReadelf: binutils is not installed.
    """
    libraries: dict[str, list[Path]] = {}
    for folder in (site / _LIBRARIES, site / _PLUGINS):
        for path in folder.rglob("*.so*"):
            libraries.setdefault(path.name, []).append(path)
    needed: set[Path] = set()
    waiting = list(_roots(site))
    while waiting:
        path = waiting.pop()
        if path in needed:
            continue
        needed.add(path)
        for name in _needs(path):
            waiting += libraries.get(name, [])
    for paths in libraries.values():
        for path in paths:
            if path not in needed:
                path.unlink()
    for name in _UNUSED:
        shutil.rmtree(site / name, ignore_errors=True)


def _roots(site: Path) -> Iterator[Path]:
    """What is imported, or opened by name while it runs."""
    yield from (site / _MODULES).glob("*.so")
    yield from (site / _LIBRARIES).glob("nixl/libplugin_UCX.so")
    yield from (site / _PLUGINS).glob("plugins/libplugin_UCX.so")
    yield from (site / _PLUGINS).glob("*.so")
    for path in (site / _LIBRARIES).glob("ucx/*.so*"):
        if "perftest" not in path.name:
            yield path


def _needs(path: Path) -> Iterator[str]:
    command = ["readelf", "-d", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoReadelf(f"{' '.join(command)}: {error}; install binutils") from error
    for line in done.stdout.splitlines():
        if "(NEEDED)" in line:
            yield line.partition("[")[2].partition("]")[0]
