"""What is reported of loads, from the transfer thread to the step thread: the record of each load, the results of a
step, the notification that there are some, and the watchdog, which reports the loads that the transfer thread is too
stuck to report.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvferry.link.load_listener import ADDRESS, INDEX_BYTES, datagram_socket
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.transitions import TableEnum
from kvferry.worker.fabric.port import TransferTelemetry
from kvferry.worker.loads.state import LoadEvent
from kvferry.worker.peers.peer import PeerKey

logger = logging.getLogger(__name__)


class Stage(TableEnum):
    """The stages of a load, in order. A stage begins when the one before it has ended."""

    QUEUED = "queued"
    """It waits for its turn."""
    CONNECTING = "connecting"
    """It waits until its producer is connected and the device is done with the blocks' last owner."""
    FENCE = "fence"
    """It reads the lease's slots until the producer is ready."""
    POSTING = "posting"
    """Its reads are prepared and posted; where a post copies, it lasts until the bytes are here."""
    READING = "reading"
    """Its reads are under way, and staged bytes are put in place."""
    FENCE_AGAIN = "fence_again"
    """It reads the slots once more, while what was not loaded is zeroed."""


MAX_CHUNKS = 64
"""Most chunks of one record; further ones lengthen the last. A chunk is a step of the producer: a long prompt has
hundreds."""


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
        mapped_bytes: the part of the planned bytes that was copied from the producer's mapped memory, without NIXL.
        relayout_s: from the end of each wave's read until it was found in place, summed; a part of `READING`.
        early_bytes: the part of the planned bytes that was read before the prefill had ended.
        restarts: times that it began anew, since the prefill was preempted.
        chunks: the reads of a prompt that was read while it was computed, at most `MAX_CHUNKS`: the token up to
            which each went, and its begin and end on the same clock.
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
    mapped_bytes: int = 0
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
        if telemetry is None:
            return
        self.transferred_bytes += telemetry.bytes
        self.descriptors += telemetry.descriptors
        self.post_s += telemetry.post_us / 1e6
        self.transfer_s += telemetry.transfer_us / 1e6

    def add_chunk(self, stop_token: int, begun_s: float, ended_s: float) -> None:
        """Add the read of a part of the prompt, up to this token."""
        if len(self.chunks) == MAX_CHUNKS:
            begun_s = self.chunks[-1][1]
        self.chunks = (*self.chunks[: MAX_CHUNKS - 1], (stop_token, begun_s, ended_s))

    @property
    def load_s(self) -> float:
        """Seconds from the order to the last byte; 0 before the load has ended."""
        return self.ended_s.get(self.stage, self.ordered_s) - self.ordered_s

    def lasted_s(self) -> dict[Stage, float]:
        """Duration of each stage that has ended."""
        lasted_s: dict[Stage, float] = {}
        begun_s = self.ordered_s
        for stage, ended_s in self.ended_s.items():
            lasted_s[stage] = ended_s - begun_s
            begun_s = ended_s
        return lasted_s


_STORY_EVENTS = 12
"""Transitions that a story keeps: a streamed load is parked once a step of its producer, hundreds of times in all."""


@dataclass(slots=True, eq=False)
class LoadStory:
    """The last events of one load and their times, for error texts and the log.

    The ends of stages are taken from the record when the story is told, so they cost nothing while the load runs.
    """

    record: LoadRecord
    _events: list[tuple[LoadEvent, float]] = field(default_factory=list)
    _forgotten: int = 0

    def add(self, event: LoadEvent, now_s: float) -> None:
        """An event has happened now, by the record's clock."""
        if len(self._events) == _STORY_EVENTS:
            del self._events[0]
            self._forgotten += 1
        self._events.append((event, now_s))

    def __str__(self) -> str:
        """For example `begin 0.1 ms, connecting ended 0.2 ms, park 0.9 ms, failed 60001.0 ms`, since the order."""
        ended_s = self.record.ended_s
        events = [(at_s, f"{stage.value} ended") for stage, at_s in ended_s.items()]
        events += [(at_s, event.value) for event, at_s in self._events]
        # By time alone: a stage that ends with a transition stands before it.
        events.sort(key=lambda event: event[0])
        parts = [
            f"{text} {(at_s - self.record.ordered_s) * 1e3:.1f} ms"
            for at_s, text in events
        ]
        if self._forgotten:
            parts.insert(0, f"{self._forgotten} earlier events")
        return ", ".join(parts) or "no event since its order"


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
        still_written: failed requests whose blocks may still be written; None when that has not changed.
        counts: increments of the other counters, by the metrics' keys (`kvferry.connector.metrics.tables`).
    """

    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    over_cancels: set[str] = field(default_factory=set)
    load_records: list[LoadRecord] = field(default_factory=list)
    handshake_s: list[float] = field(default_factory=list)
    gauges: WorkerGauges | None = None
    still_written: frozenset[str] | None = None
    counts: Counter[str] = field(default_factory=Counter)


class LoadNotifier:
    """A worker's end of `link/load_listener.py`: tells the scheduler that a load has ended. Thread-safe.

    Args:
        index: of the worker in its engine.

    Attributes:
        boot: the engine's, which comes with its orders; empty before the first.
    """

    def __init__(self, index: int) -> None:
        self.boot = ""
        self._index = index.to_bytes(INDEX_BYTES, "little")
        # Kept: to make and close one for each load takes twice as long as to send.
        self._socket = datagram_socket()

    def notify(self) -> None:
        """Tell the scheduler that a load has ended, if it can be reached."""
        if not self.boot:
            return
        # Errors are ignored: without a listener the scheduler finds out by steps, and a full queue of notifications is
        # as good as one more.
        with contextlib.suppress(OSError):
            self._socket.sendto(self._index, ADDRESS.format(boot=self.boot))

    def close(self) -> None:
        """Close the socket: further calls of `notify` do nothing. Idempotent."""
        self._socket.close()


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
        num_loads = len(self._results.loaded) + len(self._results.failed)
        # Once for each: other results came after a load in every other case, and to tell the scheduler takes a
        # tenth of the time that this thread needs for a load.
        has_ended = num_loads > self._notified_loads
        if has_ended:
            self._notified_loads = num_loads
            self._load_ended.notify_all()
        self._lock.release()
        # Without the lock: a step that waits for the load has its result before the scheduler is told.
        if has_ended:
            self.notify()

    def take(self, timeout_s: float = 0.0) -> StepResults:
        """Return the results since the last call.

        Args:
            timeout_s: where no load has ended since then, well or badly, wait at most this long until one has.
        """
        with self._lock:
            if timeout_s and not self._notified_loads:
                self._load_ended.wait(timeout_s)
            taken = self._results
            self._results = StepResults()
            self._notified_loads = 0
        return taken

    def snapshot(self) -> StepResults:
        """A copy of the results that the next `take` returns."""
        with self._lock:
            return copy.deepcopy(self._results)


SLACK_S = 1.0
"""How much later than the transfer thread the watchdog fails a load."""


class LoadWatchdog:
    """The loads that are ordered and not reported. Used on the step thread.

    Each load is reported once, and in time. The transfer thread itself fails loads that are late, unless it is stuck in
    a call of the fabric. Then the watchdog fails them, a little later, and their blocks count as still written until
    the transfer thread reports the load.

    Args:
        timeout_s: without progress, after which a load has failed.

    Attributes:
        ordered_s: when each of these loads was ordered, on the monotonic clock; the oldest is first.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.ordered_s: dict[str, float] = {}
        self._given_up: set[str] = set()
        self._cancelled: set[str] = set()
        self._still_written: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()
        self._stuck_since_s: float | None = None

    def ordered(self, request_ids: Iterable[str]) -> None:
        """Start the deadline of these loads."""
        now_s = time.monotonic()
        self.ordered_s.update(dict.fromkeys(request_ids, now_s))

    def cancelled(self, request_ids: Iterable[str]) -> None:
        """These loads are cancelled. When one is over, now or later, it is in `StepResults.over_cancels` once."""
        self._cancelled.update(request_ids)

    def poll(self, results: StepResults, turned_s: float) -> None:
        """Remove loads that were reported already, and add those that are overdue.

        Args:
            turned_s: when the transfer thread last finished a turn; as long as it turns, it fails late loads itself.
        """
        # A load is reported once. One that was given up may even turn out to be good: too late.
        over = results.loaded | results.failed.keys()
        for request_id in over & self._given_up:
            results.loaded.discard(request_id)
            results.failed.pop(request_id, None)
        self._given_up -= over
        for request_id in over:
            self.ordered_s.pop(request_id, None)
        overdue_s = time.monotonic() - self._timeout_s - SLACK_S
        if self.ordered_s and turned_s <= overdue_s:
            self._find_stuck(results, overdue_s)
        else:
            self._stuck_since_s = None
        results.over_cancels = self._cancelled - self.ordered_s.keys()
        self._cancelled -= results.over_cancels
        # The loads that were given up are among those whose blocks may be written.
        if results.still_written is not None:
            self._still_written = results.still_written
        still_written = self._still_written | self._given_up
        results.still_written = None
        if still_written != self._reported:
            results.still_written = still_written
        self._reported = still_written

    def _find_stuck(self, results: StepResults, overdue_s: float) -> None:
        """The transfer thread has not turned for as long as a load may take: fail the overdue ones."""
        # It must be seen stuck twice, `SLACK_S` apart: after a pause of the whole process, which no load must pay for,
        # the step thread may well be the first to go on.
        now_s = time.monotonic()
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
            return
        if now_s >= self._stuck_since_s + SLACK_S:
            self._give_up(results, overdue_s)

    def _give_up(self, results: StepResults, overdue_s: float) -> None:
        """Fail the loads that were ordered before this time."""
        while self.ordered_s:
            request_id, ordered_s = next(iter(self.ordered_s.items()))
            if ordered_s > overdue_s:
                return
            del self.ordered_s[request_id]
            self._given_up.add(request_id)
            results.failed[request_id] = FailureReason.DEADLINE
            results.counts["quarantined_loads"] += 1
            logger.error(
                "req=%s load failed (deadline): the transfer thread is stuck in a call",
                request_id,
            )
