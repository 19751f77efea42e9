"""The runner of a worker's loads: it gives them places, resumes them in turn, fails the late ones and reports the ends.

A load is parked while it waits for its producer: until its slot changes it holds no place among those that run. A
failed load is quarantined while its reads may still write. A load whose request was aborted is cancelled: it
fails at once, whatever it waits for. `loads/state.py` draws the states, and `LoadsByState` is the one place where they
change.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, KeysView

from kvferry.link.awake_clock import LONGEST_TURN_S, AwakeClock
from kvferry.protocol.errors import InvalidParams, LocalProtocolError
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.protocol.transitions import cannot_happen
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import FabricError, PeerLost, internal_errors
from kvferry.worker.loads.load import (
    Load,
    LoadContext,
    LoadParts,
    Reading,
    WholeRead,
)
from kvferry.worker.loads.results import ResultBox
from kvferry.worker.loads.slot_watch import SlotPoll, SlotWatch, Wait
from kvferry.worker.loads.state import (
    LOAD_TRANSITIONS,
    MAY_FAIL,
    Deadline,
    LoadEvent,
    LoadFailed,
    LoadState,
)
from kvferry.worker.loads.streamed_read import StreamedRead
from kvferry.worker.peers.peer import PeerKey

logger = logging.getLogger(__name__)


class LoadsByState:
    """All loads that are not over, each under its state, in the order in which they entered it."""

    def __init__(self) -> None:
        # Ordered dicts, not dicts: the first of thousands is taken in constant time, however many were taken before.
        self._loads: dict[LoadState, OrderedDict[Load, None]] = {
            state: OrderedDict() for state in LoadState if state is not LoadState.OVER
        }
        self._by_wait: dict[Wait, Load] = {}

    def add(self, load: Load) -> None:
        """Take a new load, which is WAITING.

        Raises:
            LocalProtocolError: it is not.
        """
        if load.state is not LoadState.WAITING:
            raise LocalProtocolError(
                f"{load}: a new load is {load.state.name}; {load.story}"
            )
        self._loads[LoadState.WAITING][load] = None

    def apply(
        self, load: Load, event: LoadEvent, now_s: float, wait: Wait | None = None
    ) -> None:
        """Let an event happen to a load: its state, its container and its story change together.

        Args:
            wait: of a load that parks: what it waits for.

        Raises:
            LocalProtocolError: the event may not happen in its state. Nothing has changed, and the text ends with the
                load's story.
        """
        before = load.state
        try:
            after = LOAD_TRANSITIONS[before, event]
        except KeyError:
            error = cannot_happen(load, before, event)
            raise LocalProtocolError(f"{error}; {load.story}") from None
        if (event is LoadEvent.PARK) != (wait is not None):
            raise LocalProtocolError(
                f"{load}: only a load that parks has a wait; {load.story}"
            )
        del self._loads[before][load]
        if load.wait is not None:
            del self._by_wait[load.wait]
        if wait is not None:
            self._by_wait[wait] = load
        load.wait = wait
        load.state = after
        load.since_s = now_s
        load.story.add(event, now_s)
        if after is not LoadState.OVER:
            self._loads[after][load] = None

    def in_state(self, state: LoadState) -> KeysView[Load]:
        """The loads in a state, as a view that follows every change; the one that entered it first is first."""
        return self._loads[state].keys()

    def of(self, *states: LoadState) -> Iterator[Load]:
        """The loads in these states."""
        for state in states:
            yield from self._loads[state]

    def count(self, *states: LoadState) -> int:
        """How many loads are in these states. May be called on any thread."""
        return sum(len(self._loads[state]) for state in states)

    def counts(self) -> dict[LoadState, int]:
        """How many loads are in each state but OVER."""
        return {state: len(loads) for state, loads in self._loads.items()}

    def parked_for(self, wait: Wait) -> Load:
        """The load that is parked until this wait is over."""
        return self._by_wait[wait]


_STRETCH_S = 100e-6
"""Loads are resumed for this long without a pause. A thousand loads take a millisecond and more, all of it under the
interpreter's lock, and the engine's step thread would wait that long for the lock. A post that has released the lock
for a while begins a new stretch, so that loads whose posts copy follow one another without a pause."""

_DEADLINE_CHECK_S = 10e-3
_DEADLINE_CHECKS = 100
"""Loads that do not run are checked at this interval, or so often in their time without progress."""

UNAWAITED_POLL_S = 10e-3
"""Interval of the polls of reads that no load waits for: a failed one may still write, or a message is flushed."""

_NO_ROOM_S = 1.0
"""How long a load may wait for a part of the staging pool that failed reads may still write into. A cancelled read of a
live producer ends within this time; one of a producer that stands still does not, and would cost the load all of its
`load_timeout_s`."""

_SHOWN_REQUESTS = 8

_BEGUN = (
    LoadState.RUNNING,
    LoadState.PARKED,
    LoadState.RESUMED,
    LoadState.FLUSHING,
    LoadState.QUARANTINED,
)


class LoadRunner:
    """Runs loads. Used on the transfer thread.

    Args:
        results: where loads are reported.
        timeout_s: without progress, after which a load has failed.
        max_loads: loads that run at once.

    Attributes:
        loads: all loads that are not over. Quarantined ones that have read no data yet keep entries and pages from
            use, but not their blocks.
        rest_of_round: the loads of the present round that have not been resumed yet.
        round_s: how long the last round took that resumed every load once, without posts that copied.
    """

    def __init__(
        self, context: LoadContext, results: ResultBox, timeout_s: float, max_loads: int
    ) -> None:
        self.loads = LoadsByState()
        self._waiting = self.loads.in_state(LoadState.WAITING)
        self._running = self.loads.in_state(LoadState.RUNNING)
        self._parked = self.loads.in_state(LoadState.PARKED)
        self._resumed = self.loads.in_state(LoadState.RESUMED)
        self._flushing = self.loads.in_state(LoadState.FLUSHING)
        self._quarantined = self.loads.in_state(LoadState.QUARANTINED)
        self.round_s = 0.0
        self.timeout_s = timeout_s
        self._context = context
        self._results = results
        self._max_loads = max_loads
        self._watch = SlotWatch(context.reader, context.slot_reads)
        self.rest_of_round: deque[Load] = deque()
        self._stretched_s = 0.0
        self._deadlines_checked_s = 0.0
        # The peers of all loads that have begun; None when it has to be made again. The registry asks in every turn.
        self._in_use: frozenset[PeerKey] | None = None
        self._clock = AwakeClock(LONGEST_TURN_S)

    def add(
        self, order: LoadOrder, mark: DeviceMark, ordered_s: float, boot: str
    ) -> None:
        """Queue a load of this boot of the engine; it runs when it is its turn."""
        make_reading: Callable[[LoadParts], Reading] = WholeRead
        if order.source.kvferry.stream_row is not None:
            make_reading = StreamedRead
        now_s = self._clock.wind(time.monotonic())
        load = Load(
            order=order,
            mark=mark,
            context=self._context,
            boot=boot,
            ordered_s=ordered_s,
            deadline=Deadline(ordered_s=now_s, progressed_s=now_s),
            make_reading=make_reading,
        )
        self.loads.add(load)

    def cancel(self, request_ids: Collection[str]) -> None:
        """End these loads, whose requests were aborted: nobody wants them. Those that have ended are left alone.

        They post no more reads. Where none is in flight, as in one that waits for its producer, the blocks are free. A
        handshake that only they wait for is not begun any more.
        """
        # Without this an aborted load went on to its end, and the producer decided when that was: beside one whose slot
        # stayed COMPUTING, 3 of 63 blocks were free 40 s after the aborts.
        wanted = frozenset(request_ids)
        cancelled = [
            load for load in self.loads.of(*MAY_FAIL) if load.order.request_id in wanted
        ]
        contacts: set[PeerKey] = set()
        for load in cancelled:
            has_begun = load.state is not LoadState.WAITING
            if has_begun and load.is_connecting:
                contacts.add(load.record.source)
            self._fail(load, FailureReason.ABORTED, "its request was aborted")
        if contacts:
            # Handshakes have limits per host: those that only aborted requests had wanted kept a host's other engines
            # waiting for 40 s, where 32 ports of it drop packets.
            still_wanted = {
                load.record.source for load in self._running if load.is_connecting
            }
            self._context.registry.withdraw(contacts - still_wanted)
        self._in_use = None

    def fail_all(self, reason: FailureReason, detail: str) -> None:
        """Fail every load that has not been reported. Those whose reads may still write stay in quarantine."""
        for load in list(self.loads.of(*MAY_FAIL)):
            self._fail(load, reason, detail)
        self._in_use = None

    def busy(self) -> bool:
        """Whether `step` must be called again soon."""
        if self._running or self._waiting or self._resumed:
            return True
        return bool(self._watch.watched) and self._watch.busy()

    def pause_s(self) -> float | None:
        """How long `step` need not be called while it is not busy; None if there is nothing to do."""
        pauses_s: list[float] = []
        if self._watch.watched:
            poll_s = self._watch.next_s()
            if poll_s is not None:
                pauses_s.append(max(poll_s - time.monotonic(), 0.0))
        # Reads are in flight that no load waits for.
        if self._flushing or self._quarantined or self._watch.closing:
            pauses_s.append(UNAWAITED_POLL_S)
        return min(pauses_s, default=None)

    def in_use(self) -> frozenset[PeerKey]:
        """Peers that reads may be in flight from, or that parked loads wait for."""
        if self._in_use is None:
            sources: set[PeerKey] = set()
            for load in self.loads.of(*_BEGUN):
                sources.add(load.record.source)
            self._in_use = frozenset(sources)
        if not self._watch.closing:
            return self._in_use
        return self._in_use | {poll.peer.key for poll in self._watch.closing}

    def begun(self) -> Iterator[Load]:
        """Loads that have begun; except for parked ones, they may hold entries, waves or transfers."""
        return self.loads.of(*_BEGUN)

    def polls(self) -> Iterator[SlotPoll]:
        """Reads of slots that loads wait for."""
        return self._watch.polls()

    def step(self) -> bool:
        """Resume every load once, or as many as fit into a stretch: the next call continues with the others.

        Deadlines are judged after a load was resumed: what has ended while this process stood still counts.

        Returns:
            Whether there was progress: a load that ended, or reached its next stage or wave. A poll alone is no
            progress.
        """
        begun_s = time.monotonic()
        awake_s = self._clock.wind(begun_s)
        # The slots first: what has changed there may begin in this round.
        has_moved = False
        if self._watch.watched or self._watch.closing:
            over, has_moved = self._watch.step(begun_s)
            for wait in over:
                self.loads.apply(self.loads.parked_for(wait), LoadEvent.RESUME, begun_s)
        has_ended = False
        interval_s = max(_DEADLINE_CHECK_S, self.timeout_s / _DEADLINE_CHECKS)
        if begun_s >= self._deadlines_checked_s + interval_s:
            self._deadlines_checked_s = begun_s
            has_ended = self._fail_late(awake_s)
        self._give_places(begun_s, awake_s)
        if not self.rest_of_round:
            self.rest_of_round.extend(self._running)
        ended_in_round, moved_in_round = self._resume_round(begun_s)
        has_ended |= ended_in_round
        has_moved |= moved_in_round
        if not self.rest_of_round:
            self.round_s = self._stretched_s
            self._stretched_s = 0.0
            if self._quarantined:
                has_ended |= self._settle_quarantined()
            if self._flushing:
                has_ended |= self._settle_flushing()
        if has_ended:
            self._in_use = None
        return has_ended or has_moved

    def stop(self) -> list[Load | SlotPoll]:
        """Stop all loads.

        Returns:
            The loads and polls whose reads may still write.
        """
        for load in self.loads.of(*MAY_FAIL):
            load.resumed_steps.close()
        return [*self.begun(), *self.polls()]

    def _give_places(self, now_s: float, awake_s: float) -> None:
        """Begin as many loads as there are places. Resumed ones come first: they have begun already, and their
        producers hold blocks for them."""
        while (self._resumed or self._waiting) and len(self._running) < self._max_loads:
            load = next(iter(self._resumed or self._waiting))
            if load.state is LoadState.WAITING:
                self._in_use = None
            # What it has waited for a place does not count.
            load.deadline.progressed_s = awake_s
            self.loads.apply(load, LoadEvent.BEGIN, now_s)

    def _resume_round(self, begun_s: float) -> tuple[bool, bool]:
        """Resume loads of the round until it ends or the stretch is over. Returns whether any has ended, or given up
        its place, and whether any has progressed."""
        has_ended = False
        has_moved = False
        stretch_began_s = begun_s
        while self.rest_of_round:
            load = self.rest_of_round.popleft()
            if load.state is not LoadState.RUNNING:
                # It was cancelled since the round began.
                continue
            progress_before = load.deadline.noted
            try:
                has_ended |= self._resume(load)
                has_moved |= load.deadline.noted is not progress_before
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log(f"req={load.order.request_id}: other loads go on")
            # A post that has released the interpreter's lock begins a new stretch.
            stretch_began_s = max(begun_s, self._context.reader.gil_released_at_s)
            if time.monotonic() >= stretch_began_s + _STRETCH_S:
                break
        # A round may take several stretches. What lies between them is no time of its own: the step thread's.
        self._stretched_s += time.monotonic() - stretch_began_s
        return has_ended, has_moved

    def _fail_late(self, awake_s: float) -> bool:
        """Fail the loads without a place that are past their deadline. Returns whether there were any."""
        late = [*self._late_parked(awake_s), *self._late_without_place(awake_s)]
        for load, why in late:
            self._fail(load, FailureReason.DEADLINE, why)
        return bool(late)

    def _late_parked(self, awake_s: float) -> Iterator[tuple[Load, str]]:
        """Parked loads past a deadline, each with the reason."""
        for load in self._parked:
            if load.deadline.missed(awake_s, self.timeout_s) is None:
                continue
            # Its progress is taken only now: a thousand parked loads would feel it in every check.
            load.deadline.note(load.progress(), awake_s)
            why = load.deadline.missed(awake_s, self.timeout_s)
            if why is not None:
                yield load, why

    def _late_without_place(self, awake_s: float) -> Iterator[tuple[Load, str]]:
        """Loads that lack only a place and have no time left at all, each with the reason. The others are given a place
        in time: those that run have deadlines."""
        for load in self._resumed:
            why = load.deadline.longest_missed(awake_s, self.timeout_s)
            if why is not None:
                yield load, why
        for load in self._waiting:
            why = load.deadline.longest_missed(awake_s, self.timeout_s)
            if why is None:
                # They wait in the order of their orders: no later one has less time.
                return
            yield load, why

    def _resume(self, load: Load) -> bool:
        """Resume one load. Returns whether it has ended, or gives up its place."""
        try:
            wait = next(load.resumed_steps)
            now_s = time.monotonic()
            awake_s = self._clock.wind(now_s)
            # After it was resumed: a read that ended while this process stood still is progress before it is late.
            load.deadline.note(load.progress(), awake_s)
            if wait is None:
                self._check_deadline(load, awake_s)
                return False
            self.loads.apply(load, LoadEvent.PARK, now_s, wait)
            self._watch.add(wait, now_s)
        except StopIteration:
            self._succeed(load)
        except LoadFailed as failed:
            self._fail(load, failed.reason, str(failed))
        except InvalidParams as invalid:
            self._fail(load, FailureReason.PARAMS, str(invalid))
        except FabricError as error:
            self._fail(load, FailureReason.TRANSFER, str(error))
            if isinstance(error, PeerLost) and load.peer is not None:
                self._context.registry.lost(load.peer, str(error), time.monotonic())
        except Exception as error:  # noqa: BLE001 - shown, with its traceback
            # A producer may be the cause of all of them.
            internal_errors.exception("%s: an internal error in a load", load)
            self._fail(load, FailureReason.TRANSFER, repr(error))
        return True

    def _check_deadline(self, load: Load, awake_s: float) -> None:
        """Check the deadline of a load that runs.

        Raises:
            LoadFailed: it is past its deadline, or waits for a part of the pool in vain.
        """
        # Its handshake has a deadline of its own, and may wait for its turn behind others of its host.
        if load.is_connecting:
            load.deadline.progressed_s = awake_s
        why = load.deadline.missed(awake_s, self.timeout_s)
        if why is not None:
            raise LoadFailed(FailureReason.DEADLINE, why)
        # Room that failed reads keep comes back when they end. Where their producer stands still that may take minutes,
        # and computing the prompt here begins at once.
        if load.lacks_room and awake_s - load.deadline.progressed_s > _NO_ROOM_S:
            raise LoadFailed(
                FailureReason.STAGING,
                "failed reads may still write into the staging pool, and leave it no room",
            )

    def _succeed(self, load: Load) -> None:
        """Report a good load, and then notify its producer: the engine waits for the report."""
        record = load.record
        self.loads.apply(load, LoadEvent.LOADED, time.monotonic())
        with self._results as results:
            results.loaded.add(record.request_id)
            results.load_records.append(record)
        load.notify_producers()
        if load.undelivered:
            with self._results as results:
                results.counts["failed_notifications"] += load.undelivered
        logger.debug(
            "%s loaded tokens %d…%d: %d B in %d descriptors (%d before merging), %.2f ms",
            load,
            load.order.first_token,
            load.order.stop_token,
            record.planned_bytes,
            record.descriptors,
            record.planned_descriptors,
            record.load_s * 1e3,
        )

    def _fail(self, load: Load, reason: FailureReason, detail: str) -> None:
        """Report a failed load at once; it is quarantined while its reads may still write."""
        now_s = time.monotonic()
        record = load.record
        wait = load.wait
        self.loads.apply(load, LoadEvent.FAILED, now_s)
        if wait is not None:
            self._watch.remove(wait)
        # Closing ends what the steps hold open, such as their turn in the peer's queue. No more reads are posted.
        load.resumed_steps.close()
        record.reason = reason
        record.end(now_s)
        is_over = load.settle()
        if is_over:
            self.loads.apply(load, LoadEvent.SETTLED, now_s)
        # A read of the slot writes into the worker's own entries only, so it pins those, not the blocks: beside a
        # stopped producer the recompute needs them.
        is_safe = is_over or not load.has_read_data
        self._log_failure(load, reason, detail, is_safe=is_safe)
        with self._results as results:
            results.failed[record.request_id] = reason
            results.load_records.append(record)
            if is_safe:
                return
            # In the report of the failure itself: the scheduler pins the blocks before vLLM frees them.
            results.still_written = self._still_written()
            # Reads of aborted loads are expected to end soon, so those are not counted.
            if reason is not FailureReason.ABORTED:
                results.counts["quarantined_loads"] += 1
                results.counts["quarantined_blocks"] += sum(
                    map(len, load.order.local_blocks)
                )

    def _log_failure(
        self, load: Load, reason: FailureReason, detail: str, *, is_safe: bool
    ) -> None:
        """A failed load in one line, with its story: it says which stage took how long."""
        level = logging.WARNING
        # An abort is nobody's fault, and a storm of them would flood the log.
        if reason is FailureReason.ABORTED:
            level = logging.DEBUG
        logger.log(
            level,
            "%s load failed (%s): %s%s; its last events: %s",
            load,
            reason.value,
            detail,
            "" if is_safe else "; its blocks are quarantined",
            load.story,
        )

    def _settle_flushing(self) -> bool:
        """End the good loads behind whose messages nothing is in flight any more. Returns whether there were any."""
        now_s = time.monotonic()
        has_settled = False
        for load in list(self._flushing):
            if load.settle():
                self.loads.apply(load, LoadEvent.SETTLED, now_s)
                has_settled = True
        return has_settled

    def _settle_quarantined(self) -> bool:
        """End the failed loads that nothing can write into any more. Returns whether there were any."""
        settled = [load for load in self._quarantined if load.settle()]
        if not settled:
            return False
        now_s = time.monotonic()
        kept_blocks = [load for load in settled if load.has_read_data]
        oldest_s = min((load.since_s for load in kept_blocks), default=now_s)
        for load in settled:
            self.loads.apply(load, LoadEvent.SETTLED, now_s)
        if kept_blocks:
            shown = kept_blocks[:_SHOWN_REQUESTS]
            logger.info(
                "%s: the blocks are out of quarantine, the oldest after %.1f s; %d loads are left in it",
                ", ".join(f"req={load.order.request_id}" for load in shown),
                now_s - oldest_s,
                len(self._still_written()),
            )
            with self._results as results:
                results.still_written = self._still_written()
        return True

    def _still_written(self) -> frozenset[str]:
        """Requests whose blocks may still be written after their load failed."""
        with_data = (load for load in self._quarantined if load.has_read_data)
        return frozenset(load.order.request_id for load in with_data)
