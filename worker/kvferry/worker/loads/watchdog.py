"""Watchdog of loads on the step thread: each is reported once, and in time, even if the transfer thread is stuck.

The transfer thread itself fails loads that are late, unless it is stuck in a call of the fabric. Then the watchdog
fails them, a little later, and their blocks count as alive until the transfer thread reports the load.
"""

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
