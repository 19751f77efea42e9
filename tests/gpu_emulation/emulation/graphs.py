"""CUDA graphs: what is launched while one is captured is noted, and launched again when it is replayed.

What the capture launches is also carried out, once: on a GPU it is not, but nobody reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Launch = Callable[[], object]

replays = 0
"""Graphs that this process has replayed."""

_of_thread = threading.local()
"""`launches`: those of the graph that the thread captures."""


def note(launch: Launch) -> None:
    """Called with everything that is launched: it belongs to the graph that this thread captures, if there is one."""
    launches: list[Launch] | None = getattr(_of_thread, "launches", None)
    if launches is not None:
        launches.append(launch)


def install() -> None:
    """Change torch's graphs."""
    begin, end, replay = (
        getattr(torch.cuda.CUDAGraph, name)
        for name in ("capture_begin", "capture_end", "replay")
    )

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        _of_thread.launches = graph.launches = []

    def capture_end(graph: Any) -> None:
        _of_thread.launches = None
        end(graph)

    def replay_all(graph: Any) -> None:
        global replays
        replay(graph)
        replays += 1
        for launch in graph.launches:
            launch()

    changed: Any = torch.cuda.CUDAGraph
    changed.capture_begin = capture_begin
    changed.capture_end = capture_end
    changed.replay = replay_all
