"""Prometheus and promtool for the tests of the dashboard and the alerts, taken out of Debian's or Ubuntu's package.

Nothing is installed into the system, no service is started and no root is needed: apt fetches the package into a
temporary folder, with package lists of its own, and the two programs are copied beside the environment's Python.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

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
        PrometheusError: this is not Debian or Ubuntu, or their package cannot be fetched, or has not both of them.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        there = Path(name)
        for needed in ("lists/partial", "cache/archives/partial"):
            (there / needed).mkdir(parents=True)
        options = (f"Dir::State::lists={there}/lists", f"Dir::Cache={there}/cache", "APT::Sandbox::User=")
        apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
        _run([*apt, "update"], there)
        _run([*apt, "download", "prometheus"], there)
        for package in there.glob("prometheus_*.deb"):
            _run(["dpkg-deb", "--extract", package.name, "tree"], there)
        for program in PROGRAMS:
            try:
                (there / "tree" / "usr" / "bin" / program).rename(folder / program)
            except OSError as error:
                raise PrometheusError(f"no {program} in the package prometheus: {error.strerror}") from error


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_FETCH_S)
    except FileNotFoundError as error:
        raise PrometheusError(f"{command[0]} is not installed; only Debian's and Ubuntu's package is known") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {error.returncode}"]
        raise PrometheusError(f"{command[0]} failed: {said[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrometheusError(f"{command[0]}: {error}") from error
