"""The results that the transfer thread hands back to the step thread, and the watchdog of loads on the step thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.record import LoadRecord
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.staging.buffer import Staging

logger = logging.getLogger(__name__)


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
        load_records: records of the loads, good and bad, that have ended.
        handshake_s: durations of the first contacts that succeeded.
        gauges: the worker's values; None when they have not changed.
        alive: failed requests whose blocks may still be written; None when that has not changed.
        counts: increments of the other counters, by the metrics' keys (`kvferry.connector.metrics.tables`).
    """

    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    load_records: list[LoadRecord] = field(default_factory=list)
    handshake_s: list[float] = field(default_factory=list)
    gauges: WorkerGauges | None = None
    alive: frozenset[str] | None = None
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def good_loads(self) -> list[LoadRecord]:
        """The records of the loads that did not fail."""
        return [load for load in self.load_records if load.reason is None]


class ResultBox:
    """Holds results until the next step takes them; a step can also wait here for results."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._results = StepResults()

    def __enter__(self) -> StepResults:
        self._lock.acquire()
        return self._results

    def __exit__(self, *exc: object) -> None:
        if self._has_load():
            self._load_ended.notify_all()
        self._lock.release()

    def wait_for_load(self, timeout_s: float) -> None:
        """Wait until a load has ended, well or badly, but no longer than `timeout_s`."""
        with self._lock:
            self._load_ended.wait_for(self._has_load, timeout_s)

    def take(self) -> StepResults:
        """Return the results since the last call."""
        with self._lock:
            taken, self._results = self._results, StepResults()
        return taken

    def _has_load(self) -> bool:
        return bool(self._results.loaded or self._results.failed)


class GaugeReporter:
    """Reports the gauges. Used on the transfer thread, the only one that changes their values."""

    def __init__(self, registry: PeerRegistry, staging: Staging | None, results: ResultBox) -> None:
        self._registry = registry
        self._pool = staging.pool if staging is not None else None
        self._results = results
        self._reported = (-1, -1)

    def poll(self) -> None:
        """Report the values if they have changed; a later report replaces an earlier one."""
        used = self._pool.used_bytes if self._pool is not None else 0
        now = (self._registry.num_ready, used)
        if now == self._reported:
            return
        self._reported = now
        capacity = self._pool.capacity if self._pool is not None else 0
        with self._results as results:
            results.gauges = WorkerGauges(*now, capacity)


SLACK_S = 1.0
"""How much later than the transfer thread the watchdog fails a load."""


class LoadWatchdog:
    """The loads that are ordered and not reported. Used on the step thread.

    Each load is reported once, and in time. The transfer thread itself fails loads that are late, unless it is stuck in
    a call of the fabric. Then the watchdog fails them, a little later, and their blocks count as alive until the
    transfer thread reports the load.

    Args:
        timeout_s: after which a load has failed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ordered_s: dict[str, float] = {}  # the oldest is first
        self._given_up: set[str] = set()
        self._alive: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Whether a load that was ordered has not been reported yet."""
        return bool(self._ordered_s)

    def ordered(self, request_ids: Iterable[str]) -> None:
        """Start the deadline of these loads."""
        now_s = time.monotonic()
        self._ordered_s.update(dict.fromkeys(request_ids, now_s))

    def poll(self, results: StepResults) -> None:
        """Remove loads that were reported already, and add those that are overdue."""
        over = results.loaded | results.failed.keys()
        for request_id in over & self._given_up:
            results.loaded.discard(request_id)
            results.failed.pop(request_id, None)
        self._given_up -= over
        for request_id in over:
            self._ordered_s.pop(request_id, None)
        self._give_up(results, time.monotonic() - self._timeout_s - SLACK_S)
        if results.alive is not None:
            self._alive = results.alive
        alive = self._alive | self._given_up
        results.alive = alive if alive != self._reported else None
        self._reported = alive

    def _give_up(self, results: StepResults, overdue_s: float) -> None:
        while self._ordered_s:
            request_id, ordered_s = next(iter(self._ordered_s.items()))
            if ordered_s > overdue_s:
                return
            del self._ordered_s[request_id]
            self._given_up.add(request_id)
            results.failed[request_id] = FailureReason.DEADLINE
            results.counts["quarantined_loads"] += 1
            logger.error("req=%s load failed (deadline): the transfer thread is stuck in a call", request_id)
