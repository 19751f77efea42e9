"""Dockerfile and .dockerignore, read as far as the one at the top of the repository needs it."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One instruction: its word, and what follows it, on one line."""

    word: str
    text: str

    def exec_form(self) -> list[str]:
        """The argument list of `ENTRYPOINT ["…"]` or `HEALTHCHECK … CMD ["…"]`."""
        words = json.loads(self.text[self.text.index("[") :])
        assert isinstance(words, list)
        return [str(word) for word in words]


@dataclass
class Stage:
    """A build stage: the lines from one `FROM` to the next."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)

    def all(self, word: str) -> list[Step]:
        """Its instructions of one kind."""
        return [step for step in self.steps if step.word == word]

    def one(self, word: str) -> Step:
        """Its only instruction of a kind."""
        (step,) = self.all(word)
        return step

    def copies(self) -> list[tuple[list[str], str]]:
        """Paths of the context that are copied, and where to."""
        found = []
        for step in self.all("COPY"):
            words = shlex.split(step.text)
            if not any(word.startswith("--from=") for word in words):
                paths = [word for word in words if not word.startswith("--")]
                found.append((paths[:-1], paths[-1]))
        return found


def read_dockerfile(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Arguments before the first stage, with their defaults, and the stages."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base))
        elif stages:
            stages[-1].steps.append(Step(word, " ".join(rest.split())))
        else:
            name, _, default = rest.partition("=")
            arguments[name] = default
    return arguments, stages


class Context:
    """The build context of `docker build`: all files that .dockerignore does not exclude."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._patterns = [
            line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
        ]

    def has(self, path: Path) -> bool:
        """Whether a file, named from the root, is in it: the last pattern that fits it or a folder of it decides."""
        names = [path.as_posix(), *(parent.as_posix() for parent in path.parents if parent.name)]
        kept = True
        for pattern in self._patterns:
            glob = pattern.removeprefix("!")
            fits = any(fnmatchcase(name, glob) or fnmatchcase(f"/{name}", f"/{glob}") for name in names)
            deep = glob.startswith("**/") and any(fnmatchcase(part, glob[3:]) for part in path.parts)
            if fits or deep:
                kept = pattern.startswith("!")
        return kept

    def copy(self, paths: list[str], to: Path) -> None:
        """`COPY`: contents of folders, or files, into a folder.

        Raises:
            AssertionError: a path brings nothing.
        """
        for path in paths:
            source = self._root / path
            files = [source] if source.is_file() else [file for file in _files(source) if file.is_file()]
            kept = [file for file in files if self.has(file.relative_to(self._root))]
            assert kept, f"COPY {path}: nothing of it is in the context"
            for file in kept:
                target = to / (file.name if source.is_file() else file.relative_to(source))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)


def _files(folder: Path) -> list[Path]:
    hidden = {".git", ".venv", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache", "logs"}
    found: list[Path] = []
    for path in folder.iterdir():
        if path.is_dir() and path.name not in hidden:
            found += _files(path)
        elif path.is_file():
            found.append(path)
    return found
