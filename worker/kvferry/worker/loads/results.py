"""The results that the transfer thread hands back to the step thread, and the watchdog of loads on the step thread."""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.port import TransferTelemetry
from kvferry.worker.peers.peer import PeerKey

logger = logging.getLogger(__name__)


class Stage(enum.Enum):
    """The stages of a load, in order. A stage begins when the one before it has ended.

    Attributes:
        QUEUED: it waits for its turn.
        CONNECTING: it waits until its producer is connected and the device is done with the blocks' last owner.
        FENCE: it reads the lease's slots until the producer is ready.
        POSTING: its reads are prepared and posted; where a post copies, it lasts until the bytes are here.
        READING: its reads are under way, and staged bytes are put in place.
        FENCE_AGAIN: it reads the slots once more, while what was not loaded is zeroed.
    """

    QUEUED = "queued"
    CONNECTING = "connecting"
    FENCE = "fence"
    POSTING = "posting"
    READING = "reading"
    FENCE_AGAIN = "fence_again"


class LoadRecord(msgspec.Struct, kw_only=True):
    """One load. The numbers of a failed one are those up to its failure.

    Attributes:
        request_id: of this engine.
        source: the producer.
        ordered_s: when the worker had the order, in seconds on its monotonic clock.
        stage: the present one, or that in which the load ended.
        ended_s: when each stage ended, on the same clock.
        reason: why it failed; None for a good load.
        planned_bytes, planned_descriptors: by the plan, which merges nothing; staged ones are more than arrive in the
            caches where whole blocks are read.
        transferred_bytes, descriptors: as counted by NIXL, which merges neighbours: a descriptor is a run of bytes
            that are contiguous on both sides.
        post_s, transfer_s: as measured by NIXL, summed over the reads.
        staged_bytes, waves: the part of the planned bytes that went through the staging pool, and its waves.
        relayout_s: from the end of each wave's read until it was found in place, summed; a part of `READING`.
        early_bytes: the part of the planned bytes that was read before the prefill had ended.
        restarts: times that it began anew, since the prefill was preempted.
        chunks: the reads of a prompt that was read while it was computed, at most 64: the token up to which each went,
            and its begin and end on the same clock.
    """

    request_id: str
    source: PeerKey
    ordered_s: float
    stage: Stage = Stage.QUEUED
    ended_s: dict[Stage, float] = {}
    reason: FailureReason | None = None
    planned_bytes: int = 0
    planned_descriptors: int = 0
    transferred_bytes: int = 0
    descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0
    staged_bytes: int = 0
    waves: int = 0
    relayout_s: float = 0.0
    early_bytes: int = 0
    restarts: int = 0
    chunks: tuple[tuple[int, float, float], ...] = ()

    def go_on(self, stage: Stage, now_s: float) -> None:
        """End the present stage and begin this one."""
        self.end(now_s)
        self.stage = stage

    def end(self, now_s: float) -> None:
        """End the present stage, the last one if the load has ended, well or badly."""
        self.ended_s[self.stage] = now_s

    def count(self, telemetry: TransferTelemetry | None) -> None:
        """Add a finished read; None where NIXL counted nothing."""
        if telemetry is not None:
            self.transferred_bytes += telemetry.bytes
            self.descriptors += telemetry.descriptors
            self.post_s += telemetry.post_us / 1e6
            self.transfer_s += telemetry.transfer_us / 1e6

    @property
    def load_s(self) -> float:
        """Seconds from the order to the last byte; 0 before the load has ended."""
        return self.ended_s.get(self.stage, self.ordered_s) - self.ordered_s

    def lasted_s(self) -> dict[Stage, float]:
        """Duration of each stage that has ended."""
        lasted_s, begun_s = {}, self.ordered_s
        for stage, ended_s in self.ended_s.items():
            lasted_s[stage] = ended_s - begun_s
            begun_s = ended_s
        return lasted_s


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
        ring: called when loads have ended.
        turned_s: when the transfer thread last finished a turn of its loop, in seconds on the monotonic clock.
    """

    def __init__(self) -> None:
        self.ring: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._results = StepResults()
        self.turned_s = -math.inf

    def __enter__(self) -> StepResults:
        self._lock.acquire()
        return self._results

    def __exit__(self, *exc: object) -> None:
        if self._has_load():
            self._load_ended.notify_all()
            self.ring()
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


SLACK_S = 1.0
"""How much later than the transfer thread the watchdog fails a load."""


class LoadWatchdog:
    """The loads that are ordered and not reported. Used on the step thread.

    Each load is reported once, and in time. The transfer thread itself fails loads that are late, unless it is stuck in
    a call of the fabric. Then the watchdog fails them, a little later, and their blocks count as alive until the
    transfer thread reports the load. It must have seen the thread stuck twice, `SLACK_S` apart: after a pause of the
    whole process, which no load must pay for, the step thread may well be the first to go on.

    Args:
        timeout_s: without progress, after which a load has failed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ordered_s: dict[str, float] = {}  # the oldest is first
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
        over = results.loaded | results.failed.keys()
        for request_id in over & self._given_up:
            results.loaded.discard(request_id)
            results.failed.pop(request_id, None)
        self._given_up -= over
        for request_id in over:
            self._ordered_s.pop(request_id, None)
        now_s = time.monotonic()
        overdue_s = now_s - self._timeout_s - SLACK_S
        if turned_s > overdue_s or not self._ordered_s:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        elif now_s >= self._stuck_since_s + SLACK_S:
            self._give_up(results, overdue_s)
        results.over_cancels = self._cancelled - self._ordered_s.keys()
        self._cancelled -= results.over_cancels
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
            logger.error(
                "req=%s load failed (deadline): the transfer thread is stuck in a call", request_id
            )
