"""The loads of a worker: those that wait for their turn, those that run, parked and quarantined ones.

A load is parked while it waits for its producer: until its slot changes it holds no place among those that run. A
failed load is quarantined while its blocks may still be written.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import FabricError, PeerLost, internal_errors
from kvferry.worker.loads.context import LoadContext, LoadFailed, Steps
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.results import LoadRecord, ResultBox, Stage
from kvferry.worker.loads.slot_watch import Look, SlotWatch, Wait
from kvferry.worker.loads.streamed_load import StreamedLoad
from kvferry.worker.peers.peer import PeerKey

logger = logging.getLogger(__name__)

_STRETCH_S = 100e-6
"""Loads are resumed for this long without a pause. A thousand loads take a millisecond and more, all of it under the
interpreter's lock, and the engine's step thread would wait that long for the lock. A post that has released the lock
for a while begins a new stretch, so that loads whose posts copy follow one another without a pause."""

_DEADLINE_CHECK_S = 10e-3
"""Interval of the checks of loads that do not run."""


class LoadRunner:
    """Runs loads. Used on the transfer thread.

    Args:
        results: where loads are reported.
        timeout_s: without progress, after which a load has failed.
        max_loads: loads that run at once.

    Attributes:
        quarantined: failed loads whose blocks may still be written, each with the time since when; the oldest is first.
        round_s: how long the last round took that resumed every load once, without posts that copied.
    """

    def __init__(self, context: LoadContext, results: ResultBox, timeout_s: float, max_loads: int) -> None:
        self.timeout_s = timeout_s
        self.quarantined: dict[Load, float] = {}
        self._context = context
        self._results = results
        self._max_loads = max_loads
        self._waiting: deque[Load] = deque()
        self._watch = SlotWatch(context.reader, context.slot_reads)
        self._parked: dict[Wait, tuple[Load, Steps]] = {}
        self._resumed: deque[Wait] = deque()
        self._running: dict[Load, Steps] = {}
        self._round: deque[Load] = deque()
        self._flushing: list[Load] = []
        self.round_s = self._stretched_s = self._checked_s = 0.0
        self._in_use: frozenset[PeerKey] | None = None

    def add(self, order: LoadOrder, mark: DeviceMark, ordered_s: float, boot: str) -> None:
        """Queue a load of this boot of the engine; it runs when it is its turn."""
        record = LoadRecord(request_id=order.request_id, source=PeerKey.of(order.source), ordered_s=ordered_s)
        kind = Load if order.source.kvferry.stream_row is None else StreamedLoad
        self._waiting.append(kind(order, mark, self._context, boot, record))

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
        yield from self._flushing
        yield from self.quarantined

    def looks(self) -> Iterator[Look]:
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
        return len(self._parked)

    def waiting(self) -> int:
        """Number of loads that have not begun."""
        return len(self._waiting)

    def step(self) -> bool:
        """Resume every load once, or as many as fit into a stretch: the next call continues with the others. Returns
        whether there was progress: a load that ended, or reached its next stage or wave. A poll alone is no progress.

        A load that has waited for its turn past its deadline fails when it begins.
        """
        begun_s = time.monotonic()
        over, moved = self._watch.step(begun_s)
        self._resumed.extend(over)
        ended = self._fail_late_parked(begun_s)
        while (self._resumed or self._waiting) and len(self._running) < self._max_loads:
            self._begin()
        if not self._round:
            self._round.extend(self._running)
        while self._round:
            load = self._round.popleft()
            place = _place(load)
            try:
                ended |= self._advance(load, self._running[load])
                moved |= _place(load) != place
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log(f"req={load.order.request_id}: other loads go on")
            if time.monotonic() >= max(begun_s, self._context.reader.let_go_s) + _STRETCH_S:
                break
        self._stretched_s += time.monotonic() - max(begun_s, self._context.reader.let_go_s)
        if not self._round:
            self.round_s, self._stretched_s = self._stretched_s, 0.0
            ended |= self._poll_quarantined() | self._end_flushes()
        if ended:
            self._in_use = None
        return ended or moved

    def stop(self) -> list[Load | Look]:
        """Stop all loads.

        Returns:
            The loads and looks whose reads may still write.
        """
        for steps in (*self._running.values(), *(steps for _, steps in self._parked.values())):
            steps.close()
        return [*self.alive(), *self.looks()]

    def _begin(self) -> None:
        """Give a place to the next load: resumed ones come first."""
        if self._resumed:
            load, steps = self._parked.pop(self._resumed.popleft(), (None, None))
        else:
            load = self._waiting.popleft()
            steps = load.steps()
            self._in_use = None
        if load is not None and steps is not None:  # else it has missed its deadline since it was resumed
            self._running[load] = steps

    def _fail_late_parked(self, now_s: float) -> bool:
        """Fail the parked loads that are past their deadline. Returns whether there were any."""
        if not self._parked or now_s < self._checked_s + _DEADLINE_CHECK_S:
            return False
        self._checked_s = now_s
        late = [wait for wait, (load, _) in self._parked.items() if now_s - load.progressed_s > self.timeout_s]
        for wait in late:
            self._watch.remove(wait)
            self._advance(*self._parked.pop(wait))
        return bool(late)

    def _advance(self, load: Load, steps: Steps) -> bool:
        """Resume one load. Returns whether it has ended, or gives up its place."""
        try:
            now_s = time.monotonic()
            if now_s - load.progressed_s > self.timeout_s:
                steps.close()
                raise LoadFailed(FailureReason.DEADLINE, f"no progress for {self.timeout_s:g} s")
            wait = next(steps)
            if wait is None:
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
            logger.exception("req=%s peer=%s: an internal error in a load", load.order.request_id, load.record.source)
            self._fail(load, FailureReason.TRANSFER, repr(error))
        return True

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
        """Report a failed load at once; it is quarantined while its blocks may still be written."""
        record = load.record
        record.reason = reason
        record.end(time.monotonic())
        self._running.pop(load, None)
        safe = load.settle()
        if not safe:
            self.quarantined[load] = time.monotonic()
        logger.warning(
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
                results.alive = frozenset(one.order.request_id for one in self.quarantined)
                results.counts["quarantined_loads"] += 1
                results.counts["quarantined_blocks"] += sum(map(len, load.order.local_blocks))

    def _end_flushes(self) -> bool:
        in_flight = [load for load in self._flushing if not load.settle()]
        ended = len(in_flight) < len(self._flushing)
        self._flushing = in_flight
        return ended

    def _poll_quarantined(self) -> bool:
        over = [load for load in self.quarantined if load.settle()]
        if over:
            since_s = [self.quarantined.pop(load) for load in over]
            logger.info(
                "%s: the blocks are out of quarantine, the oldest after %.1f s; %d loads are left in it",
                ", ".join(f"req={load.order.request_id}" for load in over[:8]),
                time.monotonic() - min(since_s),
                len(self.quarantined),
            )
            with self._results as results:
                results.alive = frozenset(one.order.request_id for one in self.quarantined)
        return bool(over)


def _place(load: Load) -> tuple[Stage, float, int]:
    """The progress of a load: its stage, and the changes of its waves."""
    return load.record.stage, load.progressed_s, load.staged.changes if load.staged is not None else 0
