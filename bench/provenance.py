"""The commit that a result was measured at: git is asked by a benchmark when it starts, and by `bench.report`.

A benchmark calls `begin` before it measures, and hands what it returns to `bench.figures.publish`. Only a result of one
clean commit, at the start and at the end, can be published.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CODE = ("protocol", "plan", "trace", "scheduler", "worker", "connector", "cli", "bench")
MEASURED = (*CODE, "tests", "requirements", "pyproject.toml", ":(exclude)bench/results")
"""Paths, for git, of what a figure depends on. Benchmarks use the engines of tests/; earlier results do not count."""
_ID = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class Checkout:
    """A working tree at one moment.

    Attributes:
        commit: of HEAD, 12 digits; empty where git cannot be asked.
        changes: lines of `git status` about `MEASURED`, untracked files among them.
    """

    commit: str
    changes: tuple[str, ...] = ()

    @property
    def problem(self) -> str | None:
        """Why a result of it cannot be published; None if it can."""
        if not self.commit:
            return "git does not say which commit this is"
        if self.changes:
            return f"the tree has changes beside commit {self.commit}: {', '.join(map(str.strip, self.changes[:5]))}"
        return None

    def __str__(self) -> str:
        return f"{self.commit}{' and changes' if self.changes else ''}" if self.commit else "unknown"


def checkout(root: Path = REPOSITORY) -> Checkout:
    """The working tree as it is now."""
    if _no_repository(root):
        return Checkout("")
    commit = _git(root, "rev-parse", "--short=12", "HEAD").stdout.strip()
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *MEASURED).stdout
    return Checkout(commit, tuple(status.splitlines()))


def begin(root: Path = REPOSITORY) -> Checkout:
    """The working tree at a benchmark's start; says on stderr if the run's results cannot be published."""
    found = checkout(root)
    if found.problem:
        text = f"the results of this run cannot be published, and go to results/quick: {found.problem}"
        print(text, file=sys.stderr, flush=True)
    return found


def blind_spot(root: Path = REPOSITORY) -> str | None:
    """Why git cannot say that a commit is not in the history of HEAD; None if it can."""
    if problem := _no_repository(root):
        return problem
    is_shallow = _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    return f"{root.name} is a shallow clone" if is_shallow else None


def is_in_history(commit: str, root: Path = REPOSITORY) -> bool:
    """Whether HEAD is this commit or descends from it; False as well where git cannot be asked, see `blind_spot`.

    Args:
        commit: as a result names it, of any content.
    """
    if not is_one_commit(commit) or _no_repository(root):
        return False
    return _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def is_one_commit(text: str) -> bool:
    """Whether a result's `commit` has the form of a clean one: 7 to 40 hexadecimal digits and nothing else."""
    return _ID.fullmatch(text) is not None


def _no_repository(root: Path) -> str | None:
    """Why git cannot be asked about `root`; None if it can. A repository around `root` is another one."""
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
    except OSError:
        return "git is not installed"
    if top.returncode or Path(top.stdout.strip()).resolve() != root.resolve():
        return f"{root.name} is not a git repository"
    return None


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
