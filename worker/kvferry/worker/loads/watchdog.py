"""The watchdog of loads: it reports those that the transfer thread is too stuck to report."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.results import StepResults

logger = logging.getLogger(__name__)

SLACK_S = 1.0
"""How much later than the transfer thread the watchdog fails a load."""


class LoadWatchdog:
    """The loads that are ordered and not reported. Used on the step thread.

    Each load is reported once, and in time. The transfer thread itself fails loads that are late, unless it is stuck in
    a call of the fabric. Then the watchdog fails them, a little later, and their blocks count as alive until the
    transfer thread reports the load.

    Args:
        timeout_s: without progress, after which a load has failed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The oldest is first.
        self._ordered_s: dict[str, float] = {}
        self._given_up: set[str] = set()
        self._cancelled: set[str] = set()
        self._alive: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()
        self._stuck_since_s: float | None = None

    def __bool__(self) -> bool:
        """Whether a load that was ordered has not been reported yet."""
        return bool(self._ordered_s)

    def ordered(self, request_ids: Iterable[str]) -> None:
        """Start the deadline of these loads."""
        now_s = time.monotonic()
        self._ordered_s.update(dict.fromkeys(request_ids, now_s))

    def cancelled(self, request_ids: Iterable[str]) -> None:
        """These loads are cancelled. When one is over, now or later, it is in `StepResults.over_cancels` once."""
        self._cancelled.update(request_ids)

    def poll(self, results: StepResults, turned_s: float) -> None:
        """Remove loads that were reported already, and add those that are overdue.

        Args:
            turned_s: when the transfer thread last finished a turn; as long as it turns, it fails late loads itself.
        """
        self._remove_reported(results)
        self._give_up_overdue(results, turned_s)
        results.over_cancels = self._cancelled - self._ordered_s.keys()
        self._cancelled -= results.over_cancels
        self._merge_alive(results)

    def _remove_reported(self, results: StepResults) -> None:
        """The transfer thread has reported loads. Those that were given up are not reported again."""
        # A load is reported once. One that was given up may even turn out to be good: too late.
        over = results.loaded | results.failed.keys()
        for request_id in over & self._given_up:
            results.loaded.discard(request_id)
            results.failed.pop(request_id, None)
        self._given_up -= over
        for request_id in over:
            self._ordered_s.pop(request_id, None)

    def _give_up_overdue(self, results: StepResults, turned_s: float) -> None:
        """Fail the overdue loads, if the transfer thread is stuck."""
        now_s = time.monotonic()
        overdue_s = now_s - self._timeout_s - SLACK_S
        if turned_s > overdue_s or not self._ordered_s:
            self._stuck_since_s = None
            return
        # It must be seen stuck twice, `SLACK_S` apart: after a pause of the whole process, which no load must pay for,
        # the step thread may well be the first to go on.
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
            return
        if now_s >= self._stuck_since_s + SLACK_S:
            self._give_up(results, overdue_s)

    def _merge_alive(self, results: StepResults) -> None:
        """Add the loads that were given up to those whose blocks may be written; None if the sum has not changed."""
        if results.alive is not None:
            self._alive = results.alive
        alive = self._alive | self._given_up
        results.alive = None
        if alive != self._reported:
            results.alive = alive
        self._reported = alive

    def _give_up(self, results: StepResults, overdue_s: float) -> None:
        """Fail the loads that were ordered before this time."""
        while self._ordered_s:
            request_id, ordered_s = next(iter(self._ordered_s.items()))
            if ordered_s > overdue_s:
                return
            del self._ordered_s[request_id]
            self._given_up.add(request_id)
            results.failed[request_id] = FailureReason.DEADLINE
            results.counts["quarantined_loads"] += 1
            logger.error(
                "req=%s load failed (deadline): the transfer thread is stuck in a call",
                request_id,
            )
