"""Whose blocks are free, by what the workers say: a request is over when each of them has said so."""

from __future__ import annotations

from collections.abc import Iterable


class Confirmations:
    """Counts distinct workers, so that a report which comes twice counts once.

    Args:
        workers: of this engine, in all its pipeline stages and with all replicas; they are numbered from 0.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._missing: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Requests that some workers, but not all, have confirmed."""
        return len(self._missing)

    def requests(self) -> set[str]:
        """These requests."""
        return set(self._missing)

    def take(self, worker: int, request_ids: Iterable[str]) -> list[str]:
        """A worker says that it has cleared the slots of these requests. Returns those that are over now.

        A worker that this engine does not have is nobody.
        """
        if not 0 <= worker < self.workers:
            return []
        if self.workers == 1:
            return list(request_ids)
        over = []
        for request_id in request_ids:
            missing = self._missing.setdefault(request_id, set(range(self.workers)))
            missing.discard(worker)
            if not missing:
                del self._missing[request_id]
                over.append(request_id)
        return over
