"""The cost of a step on an engine's thread in instructions, which does not depend on the machine's speed or load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any


class StepCount:
    """Counts the Python instructions that methods of some objects execute, on the calling thread.

    What is done in C counts as the one instruction that calls it.
    """

    def __init__(self) -> None:
        self._instructions = 0
        self._depth = 0

    def wrap(self, owner: Any, names: Iterable[str]) -> None:
        """Count these methods of an object from now on; missing ones are ignored."""
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, self._counted(getattr(owner, name)))

    def median(self, step: Callable[[], object], steps: int) -> float:
        """Instructions of one step, among so many."""
        counts = []
        for _ in range(steps):
            self._instructions = 0
            step()
            counts.append(self._instructions)
        return float(median(counts))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._tracing():
                return call(*args, **kwargs)

        return counted

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        self._depth += 1
        sys.settrace(self._trace if self._depth == 1 else before)
        try:
            yield
        finally:
            self._depth -= 1
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._instructions += event == "opcode"
        return self._trace
