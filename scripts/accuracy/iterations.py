"""How many prompt tokens an engine really computed: what vLLM says of each step in its log.

`--enable-logging-iteration-details` logs, for every step, the requests whose prompt is being computed and how many of
their tokens are. The counters in `/metrics` say what was matched, this says what was run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(rb"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens")


@dataclass(frozen=True, slots=True)
class Computed:
    """Sums over steps: a prompt computed in one step counts once."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Computed) -> Computed:
        return Computed(self.requests + other.requests, self.tokens + other.tokens)


class IterationLog:
    """Reads a log from where it was read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def take(self) -> Computed:
        """Tokens computed since the last call, by the log so far. An incomplete line waits for the next call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = [(int(requests), int(tokens)) for requests, tokens in _LINE.findall(whole)]
        return Computed(sum(requests for requests, _ in found), sum(tokens for _, tokens in found))
