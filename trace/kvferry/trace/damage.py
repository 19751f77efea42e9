"""What could not be read of recorded files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a file.

    Attributes:
        line: the first one that it was found in, from 1; 0 for the whole file.
        lines: how many.
    """

    path: str
    problem: str
    line: int = 0
    lines: int = 1

    def __str__(self) -> str:
        if not self.line:
            return f"{self.path}: {self.problem}"
        more = f" and {self.lines - 1} more" if self.lines > 1 else ""
        return f"{self.path}: line {self.line}{more}: {self.problem}"


class DamageReport:
    """Counts what is wrong, by file and problem."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, path: str, problem: str, line: int = 0) -> None:
        """One more."""
        first, lines = self._found.get((path, problem), (line, 0))
        self._found[path, problem] = (first, lines + 1)

    def as_tuple(self) -> tuple[Damage, ...]:
        """Everything, in the order in which it was found."""
        return tuple(Damage(path, problem, *counted) for (path, problem), counted in self._found.items())
