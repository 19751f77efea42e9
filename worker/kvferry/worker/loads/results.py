"""The results of a step, which the transfer thread hands to the step thread."""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.record import LoadRecord


@dataclass(frozen=True, slots=True)
class WorkerGauges:
    """One worker's gauges.

    Attributes:
        peers: producers that are ready to be read from.
        staging_used_bytes: bytes of the staging pool that loads hold, quarantined ones included.
        staging_pool_bytes: bytes of the whole pool; 0 without one.
    """

    peers: int
    staging_used_bytes: int
    staging_pool_bytes: int


@dataclass(slots=True)
class StepResults:
    """The events since the last step.

    Attributes:
        sent: held requests that are over; each is reported once.
        loaded: requests whose blocks are complete.
        failed: requests whose blocks must not be used, with the reason.
        over_cancels: cancelled loads (`StepOrders.cancels`) that are over; each is reported once.
        load_records: records of the loads, good and bad, that have ended.
        handshake_s: durations of the first contacts that succeeded.
        gauges: the worker's values; None when they have not changed.
        alive: failed requests whose blocks may still be written; None when that has not changed.
        counts: increments of the other counters, by the metrics' keys (`kvferry.connector.metrics.tables`).
    """

    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    over_cancels: set[str] = field(default_factory=set)
    load_records: list[LoadRecord] = field(default_factory=list)
    handshake_s: list[float] = field(default_factory=list)
    gauges: WorkerGauges | None = None
    alive: frozenset[str] | None = None
    counts: Counter[str] = field(default_factory=Counter)


class ResultBox:
    """Holds results until the next step takes them; a step can also wait here for results.

    Attributes:
        notify: called when loads have ended.
        turned_s: when the transfer thread last finished a turn of its loop, in seconds on the monotonic clock.
    """

    def __init__(self) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        # One lock for both: a load that ends between a check and the wait must not be missed.
        self._load_ended = threading.Condition(self._lock)
        self._results = StepResults()
        self._notified_loads = 0
        self.turned_s = -math.inf

    def __enter__(self) -> StepResults:
        self._lock.acquire()
        return self._results

    def __exit__(self, *exc: object) -> None:
        # Also where the block has raised: what it had added is kept, and the lock must not be.
        try:
            num_loads = self._num_loads()
            # Once for each: other results came after a load in every other case, and to tell the scheduler takes a
            # tenth of the time that this thread needs for a load.
            if num_loads > self._notified_loads:
                self._notified_loads = num_loads
                self._load_ended.notify_all()
                self.notify()
        finally:
            self._lock.release()

    def wait_for_load(self, timeout_s: float) -> None:
        """Wait until a load has ended, well or badly, but no longer than `timeout_s`."""
        with self._lock:
            self._load_ended.wait_for(self._num_loads, timeout_s)

    def take(self) -> StepResults:
        """Return the results since the last call."""
        with self._lock:
            taken = self._results
            self._results = StepResults()
            self._notified_loads = 0
        return taken

    def snapshot(self) -> StepResults:
        """A copy of the results that the next `take` returns."""
        with self._lock:
            return copy.deepcopy(self._results)

    def _num_loads(self) -> int:
        """Loads that have ended, well or badly, and that no step has taken."""
        return len(self._results.loaded) + len(self._results.failed)
