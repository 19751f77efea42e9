"""Tells a worker's levels whenever they have changed."""

from __future__ import annotations

from kvferry.worker.loads.results import ResultBox, WorkerLevels
from kvferry.worker.peers.registry import PeerBook
from kvferry.worker.staging.buffer import Staging


class LevelWatch:
    """Used on the transfer thread, which alone changes what is watched."""

    def __init__(self, book: PeerBook, staging: Staging | None, results: ResultBox) -> None:
        self._book = book
        self._pool = staging.pool if staging is not None else None
        self._results = results
        self._told = (-1, -1)

    def look(self) -> None:
        """Tell what has changed; the latest word counts."""
        used = self._pool.used_bytes if self._pool is not None else 0
        now = (self._book.num_ready, used)
        if now == self._told:
            return
        self._told = now
        capacity = self._pool.capacity if self._pool is not None else 0
        with self._results as results:
            results.levels = WorkerLevels(*now, capacity)
