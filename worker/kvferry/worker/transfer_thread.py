"""The transfer thread: the one thread that touches the fabric once the worker runs.

    step thread, handshakes ──→ inbox ──→ ┌─ take messages ─→ peers ─→ leases ─→ notifications ─→ loads ─┐
                     (all: `Message`)     └─────────────── pause (`PollPace`) ←── report ←───────────────┘

It blocks when there is nothing to do, and never spins. Loads are resumed for 100 µs at most, and then it releases the
interpreter's lock for 50 µs, for the engine's step thread.

| while | it polls after |
| --- | --- |
| something is in flight | 50 µs, doubled up to 1 ms or 3 times what polling everything takes; reset by any progress |
| leases are held | 2 ms, doubled up to 20 ms while no notification arrives |
| a failed read may still write, or a message is flushed | 10 ms |
| nothing is expected | 250 ms |

New messages of the inbox wake the thread at once and reset both pauses.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ParamSpec, TypeAlias

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.orders import (
    FailureReason,
    LeaseHold,
    LeaseProgress,
    OrdersHead,
    StepOrders,
    decode_orders,
)
from kvferry.worker.device import Device, DeviceMark
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.fabric.reads import FabricReader
from kvferry.worker.leases import Notifications
from kvferry.worker.loads.load import LoadContext, TailZeroing
from kvferry.worker.loads.results import LoadNotifier, ResultBox, WorkerGauges
from kvferry.worker.loads.runner import UNAWAITED_POLL_S, LoadRunner
from kvferry.worker.peers.first_contact import FirstContact, FirstReads
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.registration import WithdrawalRefused
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.thread_snapshot import ThreadSnapshot, snapshot_of_thread
from kvferry.worker.worker_memory import WorkerMemory

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 50e-6
MAX_BACKOFF_S = 1e-3
_POLLING_SHARE = 3
"""The longest pause, in multiples of the time that polling everything in flight takes: a thousand transfers are polled
for at most a quarter of the time."""
MIN_NOTIFICATION_BACKOFF_S = 2e-3
MAX_NOTIFICATION_BACKOFF_S = 20e-3
IDLE_NOTIFICATION_S = 0.25
"""Interval at which notifications are taken while none are expected. NIXL keeps them until then, any number from any
agent that reaches it: 80,000 of 60 kB were 4.5 GB."""


class PollPace:
    """The pauses that grow.

    Attributes:
        backoff_s: before the next poll of what is in flight.
        notification_backoff_s: before the next notifications are taken while leases are held.
        take_unexpected_s: when notifications are taken next while none are expected, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.backoff_s = MIN_BACKOFF_S
        self.notification_backoff_s = MIN_NOTIFICATION_BACKOFF_S
        self.take_unexpected_s = 0.0

    def woken(self) -> None:
        """A message has arrived."""
        self.backoff_s = MIN_BACKOFF_S
        self.notification_backoff_s = MIN_NOTIFICATION_BACKOFF_S

    def polled(self, round_s: float, *, has_progressed: bool) -> None:
        """Everything in flight was polled.

        Args:
            round_s: how long that takes.
            has_progressed: whether anything has: what follows it may be short.
        """
        if has_progressed:
            self.backoff_s = MIN_BACKOFF_S
            return
        longest_s = max(MAX_BACKOFF_S, _POLLING_SHARE * round_s)
        self.backoff_s = min(self.backoff_s * 2, longest_s)

    def took_expected(self, *, has_arrived: bool) -> None:
        """Notifications were taken while leases are held."""
        if has_arrived:
            self.notification_backoff_s = MIN_NOTIFICATION_BACKOFF_S
            return
        doubled_s = 2 * self.notification_backoff_s
        self.notification_backoff_s = min(doubled_s, MAX_NOTIFICATION_BACKOFF_S)

    def took_unexpected(self, now_s: float, *, has_arrived: bool) -> None:
        """Notifications were taken while none were expected. Where one has arrived, more may follow at once."""
        pause_s = IDLE_NOTIFICATION_S
        if has_arrived:
            pause_s = MIN_NOTIFICATION_BACKOFF_S
        self.take_unexpected_s = now_s + pause_s


class Signal(enum.Enum):
    """A message without content."""

    WAKE = "wake"
    """There may be work that no message brings, such as the answer of a handshake."""
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class StepOrdered:
    """A step's orders.

    Attributes:
        frame: all of the orders, encoded: decoding takes time that the step thread has not got.
        mark: reached when the device has finished everything that was launched before the orders.
        arrived_s: when the worker had them, on the monotonic clock.
    """

    head: OrdersHead
    frame: bytes
    mark: DeviceMark
    arrived_s: float


@dataclass(frozen=True, slots=True)
class StepLaunched:
    """The step of the orders before, whose head has `marks`, has been launched on the device.

    Attributes:
        mark: reached when that step has finished.
    """

    mark: DeviceMark


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Answer with a snapshot. Only the transfer thread can take one: what it owns has no lock."""

    answer: Future[ThreadSnapshot]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Fail all loads, read nothing more, and end the thread as soon as nothing can write into the worker's memory.

    Attributes:
        deadline_s: on the monotonic clock; from then on the thread goes on instead.
        answer: None once the thread is about to end; `WithdrawalRefused` if it goes on. If it was cancelled before, the
            thread goes on.
    """

    deadline_s: float
    answer: Future[None]


Message: TypeAlias = Signal | StepOrdered | StepLaunched | TakeSnapshot | Withdraw


_LAST_READS_S = 0.5
"""Own reads get this long to end before the memory goes back to the engine."""

_JOIN_S = 10.0

_STUCK_S = 1.0
"""How much later than the thread itself its caller gives a withdrawal up: it is stuck in a call."""

_SHOWN_LOADS = 8

P = ParamSpec("P")


class TransferThread:
    """Carries out orders until `close`. The thread starts with the first orders; what it uses is made before.

    Args:
        fabric: belongs to the thread once it has started.
        groups, index: this engine's cache groups, and this worker's index in its engine.
        first_contact: begins handshakes with peers, and is told when their agents are connected.
        results: where it reports; what was not taken before is kept.

    Attributes:
        inbox: what the thread is told, by any thread; to put a message returns at once.
    """

    def __init__(
        self,
        fabric: Fabric,
        memory: WorkerMemory,
        groups: tuple[CacheGroup, ...],
        index: int,
        first_contact: FirstContact,
        settings: WorkerSettings,
        results: ResultBox,
    ) -> None:
        self.results = results
        self.reader = FabricReader(fabric, settings.failed_read_grace_s)
        first_reads = FirstReads(
            self.reader,
            memory.caches,
            memory.staging,
            memory.slot_reads,
            settings.handshake_timeout_s,
            memory.mapper,
            on_end=first_contact.over,
        )
        self.registry = PeerRegistry(
            first_reads,
            first_contact.begin,
            self.wake,
            ttl_s=settings.peer_ttl_s,
            max_peers=settings.max_peers,
        )
        context = LoadContext(
            reader=self.reader,
            registry=self.registry,
            slot_reads=memory.slot_reads,
            id_pages=memory.id_pages,
            staging=memory.staging,
            caches=memory.caches,
            tail_zeroing=TailZeroing(memory.caches),
            groups=groups,
            worker=index,
        )
        self.runner = LoadRunner(
            context, self.results, settings.load_timeout_s, settings.max_loads
        )
        self._memory = memory
        self._table = memory.table
        self._pool = memory.pool
        self._reported_gauges: WorkerGauges | None = None
        self._notifications = Notifications(fabric, self._table, self.results)
        # Orders of the last step, which are complete when it has been launched.
        self._incomplete: list[LeaseProgress | LeaseHold] = []
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._pace = PollPace()
        self._is_stopping = False
        self._withdrawal: Withdraw | None = None
        self._device = memory.caches.device
        self._thread = self._new_thread()
        # Last, since it has a socket: nothing that could fail comes after it.
        self._load_notifier = LoadNotifier(index)
        self.results.notify = self._load_notifier.notify

    # For the engine's threads.

    @property
    def is_running(self) -> bool:
        """Whether the thread has started and not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, when the engine has captured its graphs. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def submit(self, head: OrdersHead, frame: bytes, mark: DeviceMark) -> None:
        """Hand over a step's orders; returns at once.

        Args:
            frame: all of the orders, encoded: the transfer thread decodes them.
        """
        self.start()
        self._load_notifier.boot = head.boot
        # Here, not on the transfer thread: a consumer may have the lease's params as soon as this step returns, and to
        # one that reads the slot before it is open the lease has ended.
        for opened in head.opens:
            self._table.open(opened)
        self.inbox.put(StepOrdered(head, frame, mark, arrived_s=time.monotonic()))

    def wake(self) -> None:
        """Make the thread look for work; may be called from any thread."""
        self.inbox.put(Signal.WAKE)

    def snapshot(self) -> Future[ThreadSnapshot]:
        """Ask for the state of the thread between two of its turns, for tests and debugging."""
        answer: Future[ThreadSnapshot] = Future()
        self.inbox.put(TakeSnapshot(answer))
        return answer

    def snapshot_now(self) -> ThreadSnapshot:
        """The state of the thread; on the thread itself, between two of its turns."""
        return snapshot_of_thread(
            self._memory,
            self.reader,
            self.registry,
            self.runner,
            self.results,
            is_idle=self._is_idle(),
        )

    def drain(self, timeout_s: float) -> None:
        """Fail all loads, and wait until this worker reads nothing any more and the thread has ended.

        The caller has ended all leases, on the thread that opens them.

        Args:
            timeout_s: how long reads may take that were posted before.

        Raises:
            WithdrawalRefused: reads may still write then, or the thread is stuck in a call. It goes on, as before.
        """
        if not self.is_running:
            return
        answer: Future[None] = Future()
        self.inbox.put(Withdraw(time.monotonic() + timeout_s, answer))
        try:
            answer.result(timeout_s + _STUCK_S)
        except TimeoutError:
            # Not if it has answered just now.
            if answer.cancel():
                raise WithdrawalRefused(
                    "the transfer thread is stuck in a call of the fabric"
                ) from None
            answer.result()
        self._thread.join()

    def resume(self) -> None:
        """Go on after `drain`, as if nothing had been in flight."""
        self._is_stopping = False
        self.registry.resume()
        self._thread = self._new_thread()
        self._thread.start()

    def close(self) -> bool:
        """Stop the thread and wait for it; all leases end. Idempotent.

        Returns:
            Whether it has ended; False when it is stuck in a call of the fabric.
        """
        # Before anything else: no consumer may read from now on, also if the thread is stuck.
        self._table.clear()
        if self.is_running:
            self.inbox.put(Signal.STOP)
            self._thread.join(_JOIN_S)
        if self.is_running:
            return False
        self.registry.close()
        self._load_notifier.close()
        return True

    # The thread.

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(
            target=self._run, args=(self._device,), name="kvferry-transfer", daemon=True
        )

    def _run(self, device: Device) -> None:
        self._log_errors(device.use)
        while not self._is_stopping:
            self._log_errors(self._take_messages)
            self._step()
            if self._withdrawal is not None:
                self._log_errors(self._end_if_quiet, self._withdrawal)
            self.results.turned_s = time.monotonic()
        self._wind_up()

    def _log_errors(
        self, part: Callable[P, bool | None], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Do one part of the work. Any exception is logged; the thread continues with the other parts."""
        # Part by part: one that always fails, such as a fabric that gives no notifications, would keep all others from
        # their turn.
        try:
            return bool(part(*args, **kwargs))
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log("the transfer thread goes on")
            return False

    def _wind_up(self) -> None:
        """End all leases and loads before the memory goes back to the engine."""
        self._table.clear()
        unsafe = self.runner.stop()
        end_s = time.monotonic() + _LAST_READS_S
        while unsafe and time.monotonic() < end_s:
            unsafe = [load for load in unsafe if not load.settle()]
            time.sleep(MAX_BACKOFF_S)
        if unsafe:
            logger.warning(
                "closed while reads of %d loads may still write", len(unsafe)
            )

    # A withdrawal: the thread ends once nothing can write any more.

    def _begin_withdrawal(self, withdrawal: Withdraw) -> None:
        # Its caller has given up while this thread was stuck: to the engine, its loads go on.
        if withdrawal.answer.cancelled():
            return
        self._withdrawal = withdrawal
        # Leases are left alone: the caller has ended them all. It may give up at any moment, now too, and what the
        # engine opens from then on must not end.
        self.runner.fail_all(FailureReason.WITHDRAWN, "this engine is put to sleep")
        self.registry.pause()

    def _end_if_quiet(self, withdrawal: Withdraw) -> None:
        """Answer a withdrawal: the thread ends when nothing can write any more, and goes on when it takes too long."""
        writing = self._may_write()
        is_late = time.monotonic() >= withdrawal.deadline_s
        if writing and not is_late and not withdrawal.answer.cancelled():
            return
        self._withdrawal = None
        # Its caller has given up: to it the thread was stuck.
        if not withdrawal.answer.set_running_or_notify_cancel():
            self.registry.resume()
            return
        if writing:
            self.registry.resume()
            withdrawal.answer.set_exception(
                WithdrawalRefused(f"reads may still write: {', '.join(writing)}")
            )
            return
        self._is_stopping = True
        withdrawal.answer.set_result(None)

    def _may_write(self) -> list[str]:
        """What of this worker may still write into its memory, or read its caches, in words."""
        # Also what only writes into entries for slots, not into the caches: the agent is closed next, and its reads
        # must be over by then.
        loads = [str(load) for load in self.runner.begun()]
        writing = loads[:_SHOWN_LOADS]
        if len(loads) > _SHOWN_LOADS:
            writing.append(f"{len(loads) - _SHOWN_LOADS} other loads")
        writing += [f"a slot of peer={poll.peer.key}" for poll in self.runner.polls()]
        writing += [
            f"the first read of peer={first_read.peer.key}"
            for first_read in self.registry.first_reads.all()
        ]
        mirror = self._memory.mirror
        if mirror is not None and mirror.is_copying:
            writing.append("a copy of blocks to host memory")
        return writing

    # Messages.

    def _take_messages(self) -> None:
        """Wait for a message, no longer than `_wait_s`, and carry out all there are."""
        try:
            message = self.inbox.get(timeout=self._wait_s())
            while True:
                # Who only looks must not change how often the thread polls.
                if not isinstance(message, TakeSnapshot):
                    self._pace.woken()
                self._take(message)
                message = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, message: Message) -> None:
        match message:
            case StepOrdered():
                self._carry_out(message)
            case StepLaunched(mark):
                incomplete = self._incomplete
                self._incomplete = []
                for order in incomplete:
                    self._table.complete(order, mark)
            case TakeSnapshot(answer):
                try:
                    answer.set_result(self.snapshot_now())
                except Exception as error:  # noqa: BLE001 - raised where the snapshot was asked for
                    answer.set_exception(error)
            case Withdraw():
                self._begin_withdrawal(message)
            case Signal.STOP:
                self._is_stopping = True
            case Signal.WAKE:
                # The turn that follows looks for work.
                pass

    # How long to wait.

    def _is_idle(self) -> bool:
        """Whether nothing is left to do but the expiry of unused peers."""
        return self._next_poll_s() is None

    def _wait_s(self) -> float:
        """How long to wait for new messages before the next turn is due."""
        # The engine waits for its answer.
        if self._withdrawal is not None:
            return self._pace.backoff_s
        poll_s = self._next_poll_s()
        if poll_s is not None:
            return poll_s
        due_s = self._pace.take_unexpected_s
        next_s = self.registry.next_s()
        if next_s is not None:
            due_s = min(due_s, next_s)
        # A little longer: at a turn that comes too early nothing would be done, and the next one would follow at once.
        return max(due_s - time.monotonic(), 0.0) + MAX_BACKOFF_S

    def _next_poll_s(self) -> float | None:
        """How long to wait before the next poll of what changes without a message; None with nothing to poll."""
        if self.runner.busy() or self._table.pending or self.registry.busy():
            if self.runner.rest_of_round:
                # Not zero: in this time the step thread gets the interpreter's lock.
                return MIN_BACKOFF_S
            return self._pace.backoff_s
        pauses_s: list[float] = []
        if self._table.held:
            pauses_s.append(self._pace.notification_backoff_s)
        loads_s = self.runner.pause_s()
        if loads_s is not None:
            pauses_s.append(loads_s)
        if self.registry.first_reads.given_up or self.reader.refused:
            pauses_s.append(UNAWAITED_POLL_S)
        return min(pauses_s, default=None)

    # A step's orders.

    def _carry_out(self, ordered: StepOrdered) -> None:
        try:
            orders = decode_orders(ordered.frame)
        except InvalidMessage:
            self._lose(ordered.head)
            return
        # Apart from the loads: an error in a step's leases must not keep its loads from being begun, since a load that
        # is not begun is never reported.
        self._log_errors(self._change_leases, orders, ordered.mark)
        for order in orders.loads:
            self.runner.add(order, ordered.mark, ordered.arrived_s, ordered.head.boot)
        # After the loads of the same step: one that is ordered and cancelled at once must be found.
        if orders.cancels:
            self._log_errors(self.runner.cancel, orders.cancels)
        for prewarm in orders.prewarms:
            key = PeerKey(prewarm.host, prewarm.port, prewarm.engine_id, prewarm.boot)
            if prewarm.is_static:
                self.registry.prewarm_static(key, ordered.arrived_s)
            else:
                self.registry.prewarm(key, ordered.arrived_s)

    def _change_leases(self, orders: StepOrders, mark: DeviceMark) -> None:
        """Carry out a step's orders for leases; the leases that end with it are reported."""
        if orders.ends:
            # A report that has arrived counts before the end of its lease.
            self._log_errors(self._notifications.take)
        # Before the holds: an order that does not fit ends its lease, which `hold` then reports.
        self._incomplete = []
        for progress in orders.progress:
            if self._table.publish(progress):
                self._incomplete.append(progress)
        over: set[str | None] = set()
        for hold in orders.holds:
            over.add(self._table.hold(hold, mark))
        for hold in orders.completions:
            over.add(self._table.hold(hold, None))
            self._incomplete.append(hold)
        for end in orders.ends:
            over.add(self._table.end(end))
        # The box is left alone without news: its lock is the step thread's too.
        if not over - {None}:
            return
        with self.results as results:
            for request_id in over:
                if request_id is not None:
                    results.sent.add(request_id)

    def _lose(self, head: OrdersHead) -> None:
        """Fail the loads of orders that cannot be decoded (an internal error). None has begun: the blocks are safe."""
        internal_errors.log(
            f"a step's orders are lost, {len(head.loads)} loads among them"
        )
        with self.results as results:
            results.counts["lost_orders"] += 1
            results.failed.update(dict.fromkeys(head.loads, FailureReason.ORDERS))

    # A turn.

    def _step(self) -> None:
        """One turn of the thread: every part of the work once."""
        has_progressed = self._log_errors(
            self.registry.step, time.monotonic(), self.runner.in_use()
        )
        has_progressed |= self._log_errors(self._table.advance)
        has_progressed |= self._take_notifications()
        has_progressed |= self._log_errors(self.runner.step)
        if self.reader.refused:
            self.reader.retry_refused()
        self._report()
        if has_progressed or not self.runner.rest_of_round:
            self._pace.polled(self.runner.round_s, has_progressed=has_progressed)

    def _take_notifications(self) -> bool:
        """Take notifications, if it is time. Returns whether any have arrived that were expected."""
        if not self._table.held:
            if time.monotonic() >= self._pace.take_unexpected_s:
                has_arrived = self._log_errors(self._notifications.take)
                self._pace.took_unexpected(time.monotonic(), has_arrived=has_arrived)
            return False
        has_arrived = self._log_errors(self._notifications.take)
        # While loads run the thread turns more often anyway, and their backoff decides.
        if has_arrived or not self.runner.busy():
            self._pace.took_expected(has_arrived=has_arrived)
        return has_arrived

    def _report(self) -> None:
        """Report what has changed of graces, handshakes and gauges; only this thread changes them."""
        graces_over = self.reader.graces_over
        handshake_s = self.registry.handshake_s
        gauges = WorkerGauges(
            peers=len(self.registry.ready),
            staging_used_bytes=self._pool.used_bytes if self._pool is not None else 0,
            staging_pool_bytes=self._pool.capacity if self._pool is not None else 0,
        )
        has_new_gauges = gauges != self._reported_gauges
        # Without news the box is left alone: its lock is the step thread's too.
        if not has_new_gauges and not graces_over and not handshake_s:
            return
        self.reader.graces_over = 0
        self.registry.handshake_s = []
        self._reported_gauges = gauges
        with self.results as results:
            results.handshake_s += handshake_s
            if has_new_gauges:
                results.gauges = gauges
            if graces_over:
                results.counts["graces_over"] += graces_over
        if graces_over:
            logger.warning(
                "%d failed reads: their memory is used again after failed_read_grace_s",
                graces_over,
            )
