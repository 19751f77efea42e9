"""Dockerfile and .dockerignore, read as far as the one at the top of the repository needs it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass
class Stage:
    """A build stage. `steps`: its instructions in order, each as its word and what follows it, on one line."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """The arguments of each instruction of one kind."""
        return [text for each, text in self.steps if each == word]

    def exec_form(self, word: str) -> list[str]:
        """The argument list of its only `ENTRYPOINT ["…"]` or `HEALTHCHECK … CMD ["…"]`."""
        (text,) = self.all(word)
        return [str(each) for each in json.loads(text[text.index("[") :])]

    def copies(self) -> list[tuple[list[str], str]]:
        """Paths of the context that are copied, and where to."""
        found = [shlex.split(text) for text in self.all("COPY") if "--from=" not in text]
        paths = [[word for word in words if not word.startswith("--")] for words in found]
        return [(each[:-1], each[-1]) for each in paths]


def read_dockerfile(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Arguments before the first stage, with their defaults, and the stages."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base))
        elif stages:
            stages[-1].steps.append((word, " ".join(rest.split())))
        else:
            name, _, arguments[name] = rest.partition("=")
    return arguments, stages


class Context:
    """The context of `docker build`: .dockerignore lists what is in it (`!name`) and what of it is not (`**/name`)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        lines = (root / ".dockerignore").read_text().splitlines()
        self._listed = {line[1:] for line in lines if line.startswith("!")}
        self._left_out = [line[3:] for line in lines if line.startswith("**/")]
        others = [line for line in lines if line and not line.startswith(("#", "!", "**/"))]
        assert others == ["*"], "only these two kinds of lines are understood here"

    def has(self, path: Path) -> bool:
        """Whether a file, named from the root, is in it."""
        left_out = any(
            fnmatchcase(part, pattern) for part in path.parts for pattern in self._left_out
        )
        return path.parts[0] in self._listed and not left_out

    def copy(self, paths: list[str], to: Path) -> None:
        """`COPY`: contents of folders, or files, into a folder.

        Raises:
            AssertionError: a path brings nothing.
        """
        for path in paths:
            source = self._root / path
            files = [source] if source.is_file() else list(_files(source))
            kept = [file for file in files if self.has(file.relative_to(self._root))]
            assert kept, f"COPY {path}: nothing of it is in the context"
            for file in kept:
                target = to / (file.name if source.is_file() else file.relative_to(source))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)


def _files(folder: Path) -> Iterator[Path]:
    """Without hidden folders, which have many files and are not needed."""
    for name, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        yield from (Path(name, each) for each in files)
