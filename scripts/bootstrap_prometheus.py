"""Prometheus and promtool for the tests of the dashboard and the alerts, taken out of Debian's or Ubuntu's package.

Nothing is installed into the system, no service is started and no root is needed: apt fetches the package into a
temporary folder, with package lists of its own, and the two programs are copied beside the environment's Python.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

PROGRAMS = ("prometheus", "promtool")
_FETCH_S = 120.0


class PrometheusError(Exception):
    """It cannot be had here; the text says why."""


def missing(folder: Path) -> list[str]:
    """Which of the programs are neither in the folder nor installed."""
    return [name for name in PROGRAMS if not (folder / name).exists() and shutil.which(name) is None]


def fetch(folder: Path) -> None:
    """Put both programs into a folder, about 100 MB.

    Raises:
        PrometheusError: this is not Debian or Ubuntu, or their package cannot be fetched.
    """
    for needed in ("apt-get", "dpkg-deb"):
        if shutil.which(needed) is None:
            raise PrometheusError(f"{needed} is not installed, and only Debian's and Ubuntu's package is known here")
    with tempfile.TemporaryDirectory() as name:
        unpack(_download(Path(name)), folder)


def unpack(package: Path, folder: Path) -> None:
    """Copy the programs out of a Debian package.

    Raises:
        PrometheusError: it cannot be read, or has not both of them.
    """
    archive = package.with_suffix(".tar")
    with archive.open("wb") as file:
        _run(["dpkg-deb", "--fsys-tarfile", str(package)], package.parent, stdout=file)
    try:
        with tarfile.open(archive) as found:
            for name in PROGRAMS:
                program = found.extractfile(f"./usr/bin/{name}")
                if program is None:
                    raise PrometheusError(f"{package.name}: usr/bin/{name} is no file")
                partial = folder / f".{name}.partial"
                with program, partial.open("wb") as file:
                    shutil.copyfileobj(program, file)
                partial.chmod(0o755)
                partial.rename(folder / name)
    except (KeyError, tarfile.TarError) as error:
        raise PrometheusError(f"{package.name}: {error}") from error


def _download(folder: Path) -> Path:
    for needed in ("lists/partial", "cache/archives/partial"):
        (folder / needed).mkdir(parents=True)
    options = [f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache", "APT::Sandbox::User="]
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    _run([*apt, "update"], folder)
    _run([*apt, "download", "prometheus"], folder)
    packages = list(folder.glob("prometheus_*.deb"))
    if len(packages) != 1:
        raise PrometheusError(f"apt-get download prometheus: expected one package, found {len(packages)}")
    return packages[0]


def _run(command: Sequence[str], folder: Path, stdout: IO[bytes] | int = subprocess.PIPE) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
            timeout=_FETCH_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrometheusError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise PrometheusError(f"{command[0]} failed: {said[-1] if said else f'exit status {done.returncode}'}")
