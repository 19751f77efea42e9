"""Running commands of the documentation in a folder, with stand-ins for programs where that is asked for."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_STAND_IN = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


@dataclass(frozen=True)
class Shell:
    """Where commands run.

    Attributes:
        folder: their working directory.
        bin: programs that come before all others.
    """

    folder: Path
    bin: Path

    @classmethod
    def within(cls, folder: Path) -> Shell:
        """In a new folder."""
        shell = cls(folder / "here", folder / "bin")
        shell.folder.mkdir()
        shell.bin.mkdir()
        return shell

    @property
    def _log(self) -> Path:
        return self.bin / "started.jsonl"

    def stand_in(self, *names: str) -> None:
        """Programs that write down their arguments and do nothing."""
        for name in names:
            path = self.bin / name
            path.write_text(_STAND_IN.format(python=sys.executable, log=str(self._log)))
            path.chmod(0o755)

    def started(self) -> list[list[str]]:
        """Command lines of the started stand-ins, the name first."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    @property
    def environment(self) -> dict[str, str]:
        """Of everything that runs: stand-ins first, then the programs beside this Python."""
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path}

    def run(self, script: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a script, whatever its exit status."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


def succeeded(done: subprocess.CompletedProcess[str], *codes: int) -> str:
    """Its output, after a check of its exit status (0 unless other codes are given)."""
    assert done.returncode in (codes or (0,)), f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def value_of(words: Sequence[str], option: str) -> str:
    """The value of an option that occurs once, after `=` or as the next word."""
    found = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    found += [value for word, value in itertools.pairwise(words) if word == option]
    (value,) = found
    return value
