"""The loads of a worker: those that wait for their turn, those that run, parked and quarantined ones.

A load is parked while it waits for its producer: until its slot changes it holds no place among those that run. A
failed load is quarantined while its reads may still write. A load whose request was aborted is cancelled: it
fails at once, whatever it waits for.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator

from kvferry.protocol.awake_clock import LONGEST_TURN_S, AwakeClock
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import FabricError, PeerLost, internal_errors
from kvferry.worker.loads.context import LoadContext, LoadFailed, Steps
from kvferry.worker.loads.deadline import Deadline
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.results import LoadRecord, ResultBox
from kvferry.worker.loads.slot_watch import SlotPoll, SlotWatch, Wait
from kvferry.worker.loads.streamed_load import StreamedLoad
from kvferry.worker.peers.peer import PeerKey

logger = logging.getLogger(__name__)

_STRETCH_S = 100e-6
"""Loads are resumed for this long without a pause. A thousand loads take a millisecond and more, all of it under the
interpreter's lock, and the engine's step thread would wait that long for the lock. A post that has released the lock
for a while begins a new stretch, so that loads whose posts copy follow one another without a pause."""

_DEADLINE_CHECK_S = 10e-3
_DEADLINE_CHECKS = 100
"""Loads that do not run are checked at this interval, or so often in their time without progress."""

_NO_ROOM_S = 1.0
"""How long a load may wait for a part of the staging pool that failed reads may still write into. A cancelled read of a
live producer ends within this time; one of a producer that stands still does not, and would cost the load all of its
`load_timeout_s`."""


class LoadRunner:
    """Runs loads. Used on the transfer thread.

    Args:
        results: where loads are reported.
        timeout_s: without progress, after which a load has failed.
        max_loads: loads that run at once.

    Attributes:
        quarantined: failed loads with reads that may still write, each with the time since when; the oldest is first.
            Those that have read no data yet keep entries and pages from use, but not their blocks.
        round_s: how long the last round took that resumed every load once, without posts that copied.
    """

    def __init__(
        self, context: LoadContext, results: ResultBox, timeout_s: float, max_loads: int
    ) -> None:
        self.timeout_s = timeout_s
        self.quarantined: dict[Load, float] = {}
        self._context = context
        self._results = results
        self._max_loads = max_loads
        self._waiting: deque[Load] = deque()
        self._watch = SlotWatch(context.reader, context.slot_reads)
        self._parked: dict[Wait, tuple[Load, Steps]] = {}
        self._resumed: dict[Load, Steps] = {}
        self._running: dict[Load, Steps] = {}
        self._round: deque[Load] = deque()
        self._flushing: list[Load] = []
        self.round_s = self._stretched_s = self._checked_s = 0.0
        self._in_use: frozenset[PeerKey] | None = None
        self._clock = AwakeClock(LONGEST_TURN_S)

    def add(self, order: LoadOrder, mark: DeviceMark, ordered_s: float, boot: str) -> None:
        """Queue a load of this boot of the engine; it runs when it is its turn."""
        record = LoadRecord(
            request_id=order.request_id, source=PeerKey.of(order.source), ordered_s=ordered_s
        )
        kind = Load if order.source.kvferry.stream_row is None else StreamedLoad
        deadline = Deadline(self._clock.wind(time.monotonic()))
        self._waiting.append(kind(order, mark, self._context, boot, record, deadline))

    def cancel(self, request_ids: Collection[str]) -> None:
        """End these loads, whose requests were aborted: nobody wants them. Those that have ended are left alone.

        They post no more reads. Where none is in flight, as in one that waits for its producer, the blocks are free. A
        handshake that only they wait for is not begun any more.
        """
        wanted = frozenset(request_ids)
        contacts = set()
        waiting, self._waiting = self._waiting, deque()
        for load in waiting:
            if load.order.request_id in wanted:
                self._cancel(load, None)
            else:
                self._waiting.append(load)
        for wait, (load, steps) in list(self._parked.items()):
            if load.order.request_id in wanted:
                self._watch.remove(wait)
                del self._parked[wait]
                self._cancel(load, steps)
        for loads in (self._resumed, self._running):
            for load, steps in list(loads.items()):
                if load.order.request_id in wanted:
                    del loads[load]
                    if load.is_connecting:
                        contacts.add(load.record.source)
                    self._cancel(load, steps)
        if contacts:
            contacts.difference_update(
                load.record.source for load in self._running if load.is_connecting
            )
            self._context.registry.withdraw(contacts)
        self._in_use = None

    def busy(self) -> bool:
        """Whether `step` must be called again soon."""
        return bool(self._running or self._waiting or self._resumed or self._watch.busy())

    def next_s(self) -> float | None:
        """When `step` must be called at the latest while it is not busy; None if there is nothing to do."""
        return self._watch.next_s()

    def is_amid_round(self) -> bool:
        """Whether `step` has not resumed all loads of the present round yet."""
        return bool(self._round)

    def in_use(self) -> frozenset[PeerKey]:
        """Peers that reads may be in flight from, or that parked loads wait for."""
        if self._in_use is None:
            self._in_use = frozenset(load.record.source for load in self.alive())
        closing = self._watch.closing
        return self._in_use | {look.peer.key for look in closing} if closing else self._in_use

    def alive(self) -> Iterator[Load]:
        """Loads that have begun; except for parked ones, they may hold entries, waves or transfers."""
        yield from self._running
        yield from (load for load, _ in self._parked.values())
        yield from self._resumed
        yield from self._flushing
        yield from self.quarantined

    def looks(self) -> Iterator[SlotPoll]:
        """Reads of slots that loads wait for."""
        return self._watch.looks()

    def closing(self) -> bool:
        """Whether `step` must be called again, not urgently: reads are in flight that no load waits for."""
        return bool(self._flushing or self.quarantined or self._watch.closing)

    def flushing(self) -> int:
        """Number of loads that are over, with the reads behind their last messages still in flight."""
        return len(self._flushing)

    def parked(self) -> int:
        """Number of loads that wait for a change of their slot, or, since it has changed, for their turn."""
        return len(self._parked) + len(self._resumed)

    def waiting(self) -> int:
        """Number of loads that have not begun."""
        return len(self._waiting)

    def step(self) -> bool:
        """Resume every load once, or as many as fit into a stretch: the next call continues with the others. Returns
        whether there was progress: a load that ended, or reached its next stage or wave. A poll alone is no progress.

        Deadlines are judged after a load was resumed: what has ended while this process stood still counts.
        """
        begun_s = time.monotonic()
        awake_s = self._clock.wind(begun_s)
        over, moved = self._watch.step(begun_s)
        for wait in over:
            load, steps = self._parked.pop(wait)
            self._resumed[load] = steps
        ended = self._fail_late(begun_s, awake_s)
        while (self._resumed or self._waiting) and len(self._running) < self._max_loads:
            self._begin(awake_s)
        if not self._round:
            self._round.extend(self._running)
        while self._round:
            load = self._round.popleft()
            if load not in self._running:
                continue  # it was cancelled
            before = load.deadline.noted
            try:
                ended |= self._advance(load, self._running[load])
                moved |= load.deadline.noted is not before
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log(f"req={load.order.request_id}: other loads go on")
            if (
                time.monotonic()
                >= max(begun_s, self._context.reader.gil_released_at_s) + _STRETCH_S
            ):
                break
        self._stretched_s += time.monotonic() - max(begun_s, self._context.reader.gil_released_at_s)
        if not self._round:
            self.round_s, self._stretched_s = self._stretched_s, 0.0
            ended |= self._poll_quarantined() | self._end_flushes()
        if ended:
            self._in_use = None
        return ended or moved

    def stop(self) -> list[Load | SlotPoll]:
        """Stop all loads.

        Returns:
            The loads and looks whose reads may still write.
        """
        parked = (steps for _, steps in self._parked.values())
        for steps in (*self._running.values(), *self._resumed.values(), *parked):
            steps.close()
        return [*self.alive(), *self.looks()]

    def _begin(self, awake_s: float) -> None:
        """Give a place to the next load: resumed ones come first. What it has waited for a place does not count."""
        if self._resumed:
            load = next(iter(self._resumed))
            steps = self._resumed.pop(load)
        else:
            load = self._waiting.popleft()
            steps = load.steps()
            self._in_use = None
        load.deadline.excuse(awake_s)
        self._running[load] = steps

    def _fail_late(self, now_s: float, awake_s: float) -> bool:
        """Fail the loads without a place that are past their deadline. Returns whether there were any."""
        if now_s < self._checked_s + max(_DEADLINE_CHECK_S, self.timeout_s / _DEADLINE_CHECKS):
            return False
        self._checked_s = now_s
        late: list[tuple[Load, str]] = []
        suspects = [
            wait
            for wait, (load, _) in self._parked.items()
            if load.deadline.missed(awake_s, self.timeout_s)
        ]
        for wait in suspects:
            load, steps = self._parked[wait]
            # Only for these: a thousand parked loads would feel it in every check.
            load.deadline.note(load.progress(), awake_s)
            why = load.deadline.missed(awake_s, self.timeout_s)
            if why is not None:
                self._watch.remove(wait)
                del self._parked[wait]
                steps.close()
                late.append((load, why))
        # Those that only lack a place are given one, unless they have no time left at all.
        for load, steps in list(self._resumed.items()):
            why = load.deadline.longest_missed(awake_s, self.timeout_s)
            if why is not None:
                del self._resumed[load]
                steps.close()
                late.append((load, why))
        while self._waiting:  # the first was ordered first
            why = self._waiting[0].deadline.longest_missed(awake_s, self.timeout_s)
            if why is None:
                break
            late.append((self._waiting.popleft(), why))
        for load, why in late:
            self._fail(load, FailureReason.DEADLINE, why)
        return bool(late)

    def _advance(self, load: Load, steps: Steps) -> bool:
        """Resume one load. Returns whether it has ended, or gives up its place."""
        try:
            wait = next(steps)
            now_s = time.monotonic()
            awake_s = self._clock.wind(now_s)
            load.deadline.note(load.progress(), awake_s)
            if wait is None:
                self._check_deadline(load, steps, awake_s)
                return False
            del self._running[load]
            self._parked[wait] = load, steps
            self._watch.add(wait, now_s)
        except StopIteration:
            self._succeed(load)
        except LoadFailed as failed:
            self._fail(load, failed.reason, str(failed))
        except FabricError as error:
            self._fail(load, FailureReason.TRANSFER, str(error))
            if isinstance(error, PeerLost) and load.peer is not None:
                self._context.registry.lost(load.peer, str(error), time.monotonic())
        except Exception as error:
            logger.exception(
                "req=%s peer=%s: an internal error in a load",
                load.order.request_id,
                load.record.source,
            )
            self._fail(load, FailureReason.TRANSFER, repr(error))
        return True

    def _check_deadline(self, load: Load, steps: Steps, awake_s: float) -> None:
        """Check the deadline of a load that runs. Raises `LoadFailed`."""
        if load.is_connecting:
            load.deadline.excuse(awake_s)
        reason = FailureReason.DEADLINE
        why = load.deadline.missed(awake_s, self.timeout_s)
        if why is None and load.lacks_room and awake_s - load.deadline.progressed_s > _NO_ROOM_S:
            reason = FailureReason.STAGING
            why = "what failed reads may still write into leaves it no part of the staging pool"
        if why is not None:
            steps.close()
            raise LoadFailed(reason, why)

    def _cancel(self, load: Load, steps: Steps | None) -> None:
        """Fail a load that has been removed from its queue. `steps`: None if it has not begun."""
        if steps is not None:
            steps.close()
        self._fail(load, FailureReason.ABORTED, "its request was aborted")

    def _succeed(self, load: Load) -> None:
        record = load.record
        del self._running[load]
        with self._results as results:
            results.loaded.add(record.request_id)
            results.load_records.append(record)
        load.tell()  # after the report, which the engine waits for
        self._flushing.append(load)
        if load.undelivered:
            with self._results as results:
                results.counts["failed_notifications"] += load.undelivered
        logger.debug(
            "req=%s peer=%s loaded tokens %d…%d: %d B in %d descriptors (%d before merging), %.2f ms",
            record.request_id,
            record.source,
            load.order.first_token,
            load.order.stop_token,
            record.planned_bytes,
            record.descriptors,
            record.planned_descriptors,
            record.load_s * 1e3,
        )

    def _fail(self, load: Load, reason: FailureReason, detail: str) -> None:
        """Report a failed load at once; it is quarantined while its reads may still write."""
        record = load.record
        record.reason = reason
        record.end(time.monotonic())
        self._running.pop(load, None)
        is_over = load.settle()
        if not is_over:
            self.quarantined[load] = time.monotonic()
        safe = is_over or not load.has_read_data
        is_aborted = reason is FailureReason.ABORTED
        logger.log(
            logging.DEBUG if is_aborted else logging.WARNING,
            "req=%s peer=%s load failed (%s): %s%s",
            record.request_id,
            record.source,
            reason.value,
            detail,
            "" if safe else "; its blocks are quarantined",
        )
        with self._results as results:
            results.failed[record.request_id] = reason
            results.load_records.append(record)
            if not safe:
                results.alive = self._alive()
            if (
                not safe and not is_aborted
            ):  # reads of aborted loads are expected to end soon, and are not counted
                results.counts["quarantined_loads"] += 1
                results.counts["quarantined_blocks"] += sum(map(len, load.order.local_blocks))

    def _end_flushes(self) -> bool:
        in_flight = [load for load in self._flushing if not load.settle()]
        ended = len(in_flight) < len(self._flushing)
        self._flushing = in_flight
        return ended

    def _poll_quarantined(self) -> bool:
        over = [load for load in self.quarantined if load.settle()]
        since_s = {load: self.quarantined.pop(load) for load in over}
        kept_blocks = [load for load in over if load.has_read_data]
        if kept_blocks:
            logger.info(
                "%s: the blocks are out of quarantine, the oldest after %.1f s; %d loads are left in it",
                ", ".join(f"req={load.order.request_id}" for load in kept_blocks[:8]),
                time.monotonic() - min(since_s[load] for load in kept_blocks),
                len(self._alive()),
            )
            with self._results as results:
                results.alive = self._alive()
        return bool(over)

    def _alive(self) -> frozenset[str]:
        """Requests whose blocks may still be written after their load failed."""
        return frozenset(load.order.request_id for load in self.quarantined if load.has_read_data)
