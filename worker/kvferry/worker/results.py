"""What the transfer thread hands back to the step thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvferry.protocol.orders import FailureReason
from kvferry.worker.load import LoadFigures


@dataclass(slots=True)
class StepResults:
    """What happened since the last step.

    Attributes:
        sent: held requests that are over; each is reported once.
        loaded: requests whose blocks are complete.
        failed: requests whose blocks are not to be used, with the reason.
        figures: of the good loads.
        undelivered: notifications that could not be sent.
        bad_notifications: notifications that were not ours, malformed, or about no lease.
        late_notifications: well-formed ones about a lease that is over.
        alive: failed requests whose blocks may still be written; None when that has not changed.
    """

    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    figures: list[LoadFigures] = field(default_factory=list)
    undelivered: int = 0
    bad_notifications: int = 0
    late_notifications: int = 0
    alive: frozenset[str] | None = None


class ResultBox:
    """Where results wait for the next step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results = StepResults()

    def __enter__(self) -> StepResults:
        self._lock.acquire()
        return self._results

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def take(self) -> StepResults:
        """Everything since the last call."""
        with self._lock:
            taken, self._results = self._results, StepResults()
        return taken
