"""The transfer thread: the one thread that touches the fabric once the worker runs.

It blocks when there is nothing to do. While something is in flight it polls after a pause that grows from 50 µs to
1 ms, or to three times the time that polling everything takes, and is reset by any progress, such as a load's next
stage or wave. It polls for 100 µs at most and then releases the interpreter's lock for 50 µs, for the engine's step
thread. While leases are held it polls notifications after 2 ms, which grow to 20 ms while none arrive; while a failed
transfer may still write, or a message is being flushed, every 10 ms. New orders wake it at once. When it is idle it
checks its integrity, at most once a second, and takes notifications every 250 ms: NIXL keeps them until then, any
number from any agent that reaches it (80,000 of 60 kB were 4.5 GB).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.load_notifier import LoadNotifier
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
from kvferry.worker.integrity import WorkerIntegrity
from kvferry.worker.loads.context import LoadContext
from kvferry.worker.loads.results import ResultBox, WorkerGauges
from kvferry.worker.loads.runner import LoadRunner
from kvferry.worker.loads.tail_zeroing import TailZeroing
from kvferry.worker.notifications import Notifications
from kvferry.worker.peers.first_reads import FirstReads
from kvferry.worker.peers.peer import Handshake, PeerKey
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker_memory import WorkerMemory

logger = logging.getLogger(__name__)

_MIN_BACKOFF_S = 50e-6
_MAX_BACKOFF_S = 1e-3
_LOOKING_SHARE = 3
"""The longest pause, in multiples of the time that polling everything in flight takes: a thousand transfers are polled
for at most a quarter of the time."""
_MIN_NOTIFICATION_BACKOFF_S = 2e-3
_MAX_NOTIFICATION_BACKOFF_S = 20e-3
_IDLE_NOTIFICATION_S = 0.25
"""Interval at which notifications are taken while none are expected."""
_QUARANTINE_POLL_S = 10e-3
_LAST_READS_S = 0.5
_JOIN_S = 10.0

P = ParamSpec("P")


class TransferThread:
    """Carries out orders until `close`. The thread starts with the first orders; what it uses is made before.

    Args:
        fabric: belongs to the thread once it has started.
        groups, index: this engine's cache groups, and this worker's index in its engine.
        handshake: fetches a peer's description and plans it; waits.
    """

    def __init__(
        self,
        fabric: Fabric,
        memory: WorkerMemory,
        groups: tuple[CacheGroup, ...],
        index: int,
        handshake: Handshake,
        settings: WorkerSettings,
    ) -> None:
        self._rope = LoadNotifier(index)
        self.results = ResultBox()
        self.results.ring = self._rope.ring
        self.reader = FabricReader(fabric, settings.failed_read_grace_s)
        first_reads = FirstReads(
            self.reader,
            memory.caches,
            memory.staging,
            memory.slot_reads,
            settings.handshake_timeout_s,
        )
        self.registry = PeerRegistry(
            first_reads,
            handshake,
            self.wake,
            ttl_s=settings.peer_ttl_s,
            most_peers=settings.max_peers,
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
        self.runner = LoadRunner(context, self.results, settings.load_timeout_s, settings.max_loads)
        self._table = memory.table
        self._pool = memory.staging.pool if memory.staging is not None else None
        self._gauges: WorkerGauges | None = None
        self._notifications = Notifications(fabric, self._table, self.results)
        self._integrity = WorkerIntegrity(
            context, self._table, self.runner, self.results, settings.check_integrity
        )
        self._ending: list[LeaseProgress | LeaseHold] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._backoff_s = _MIN_BACKOFF_S
        self._notification_backoff_s = _MIN_NOTIFICATION_BACKOFF_S
        self._take_unexpected_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, args=(memory.caches.device,), name="kvferry-transfer", daemon=True
        )

    def start(self) -> None:
        """Start the thread, when the engine has captured its graphs. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def submit(self, head: OrdersHead, frame: bytes, mark: DeviceMark) -> None:
        """Hand over a step's orders; opens its leases and returns at once, so that no consumer can come before them.

        Args:
            frame: all of the orders, encoded: the transfer thread decodes them.
        """
        self.start()
        self._rope.tie(head.boot)
        for opened in head.opens:
            self._table.open(opened)
        self._inbox.put(partial(self._carry_out, head, frame, mark, time.monotonic()))

    def complete(self, mark: DeviceMark) -> None:
        """The step of the orders submitted last has been launched, and their head has `marks`. Returns at once.

        Args:
            mark: reached when that step has finished.
        """
        self._inbox.put(partial(self._complete, mark))

    def wake(self) -> None:
        """Make the thread look for work; may be called from any thread."""
        self._inbox.put(lambda: None)

    def close(self) -> bool:
        """Stop the thread and wait for it; all leases end. Idempotent.

        Returns:
            Whether it has ended; False when it is stuck in a call of the fabric.
        """
        self._table.clear()
        if self._thread.is_alive():
            self._inbox.put(self._stop)
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            return False
        self.registry.close()
        return True

    def _run(self, device: Device) -> None:
        self._log_errors(device.use)
        while not self._stopping:
            self._log_errors(self._take_work)
            self._step()
            self.results.turned_s = time.monotonic()
            self._integrity.stepped(is_idle=self._is_idle())
        self._wind_up()

    def _log_errors(
        self, part: Callable[P, bool | None], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Do one part of the work. Any exception is logged; the thread continues with the other parts."""
        try:
            return bool(part(*args, **kwargs))
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log("the transfer thread goes on")
            return False

    def _wind_up(self) -> None:
        """End all leases and loads before the memory goes back to the engine; own reads get `_LAST_READS_S` to end."""
        self._table.clear()
        loads = self.runner.stop()
        end_s = time.monotonic() + _LAST_READS_S
        while loads and time.monotonic() < end_s:
            loads = [load for load in loads if not load.settle()]
            time.sleep(_MAX_BACKOFF_S)
        if loads:
            logger.warning("closed while %d loads may still be written", len(loads))

    def _take_work(self) -> bool:
        """Wait for work, no longer than `_wait_s`, and take all there is. Returns whether there was any."""
        timeout_s, found = self._wait_s(), False
        while True:
            try:
                item = self._inbox.get(not found, timeout_s)
            except queue.Empty:
                return found
            found = True
            self._backoff_s, self._notification_backoff_s = (
                _MIN_BACKOFF_S,
                _MIN_NOTIFICATION_BACKOFF_S,
            )
            item()

    def _stop(self) -> None:
        self._stopping = True

    def _is_idle(self) -> bool:
        """Whether nothing is left to do but the integrity check and the expiry of unused peers."""
        return self._next_poll_s() is None

    def _wait_s(self) -> float:
        """How long to wait for new work before the next step is due."""
        poll_s = self._next_poll_s()
        if poll_s is not None:
            return poll_s
        due_s = [self._take_unexpected_s]
        due_s += [s for s in (self.registry.next_s(), self._integrity.next_s()) if s is not None]
        return max(min(due_s) - time.monotonic(), 0.0) + _MAX_BACKOFF_S

    def _next_poll_s(self) -> float | None:
        """How long to wait before the next poll of what changes without a wake-up; None with nothing to poll."""
        if self.runner.busy() or self._table.pending() or self.registry.busy():
            return _MIN_BACKOFF_S if self.runner.is_amid_round() else self._backoff_s
        polls_s = []
        if self._table.held():
            polls_s.append(self._notification_backoff_s)
        look_s = self.runner.next_s()
        if look_s is not None:
            polls_s.append(max(look_s - time.monotonic(), 0.0))
        if self.runner.closing() or self.registry.closing() or self.reader.refused():
            polls_s.append(_QUARANTINE_POLL_S)
        return min(polls_s, default=None)

    def _carry_out(
        self, head: OrdersHead, frame: bytes, mark: DeviceMark, arrived_s: float
    ) -> None:
        try:
            orders = decode_orders(frame)
        except InvalidMessage:
            self._lose(head)
            return
        self._log_errors(self._change_leases, orders, mark)
        for order in orders.loads:
            self.runner.add(order, mark, arrived_s, head.boot)
        if orders.cancels:
            self._log_errors(self.runner.cancel, orders.cancels)
        for prewarm in orders.prewarms:
            add = self.registry.prewarm_static if prewarm.is_static else self.registry.prewarm
            add(PeerKey(prewarm.host, prewarm.port, prewarm.engine_id, prewarm.boot), arrived_s)

    def _change_leases(self, orders: StepOrders, mark: DeviceMark) -> None:
        if orders.ends:
            self._log_errors(
                self._notifications.take
            )  # a report that has arrived counts before the end of its lease
        # Before the holds: an order that does not fit ends its lease, which `hold` then reports.
        self._ending = [order for order in orders.progress if self._table.publish(order)]
        sent = [self._table.hold(hold, mark) for hold in orders.holds]
        sent += [self._table.hold(hold, None) for hold in orders.completions]
        self._ending += orders.completions
        sent += [self._table.end(end) for end in orders.ends]
        with self.results as results:
            results.sent.update(request_id for request_id in sent if request_id is not None)

    def _complete(self, mark: DeviceMark) -> None:
        ending, self._ending = self._ending, []
        for order in ending:
            self._table.complete(order, mark)

    def _lose(self, head: OrdersHead) -> None:
        """Fail the loads of orders that cannot be decoded (an internal error). None has begun: the blocks are safe."""
        internal_errors.log(f"a step's orders are lost, {len(head.loads)} loads among them")
        with self.results as results:
            results.counts["lost_orders"] += 1
            results.failed.update(dict.fromkeys(head.loads, FailureReason.ORDERS))

    def _step(self) -> None:
        progress = self._log_errors(self.registry.step, time.monotonic(), self.runner.in_use())
        progress |= self._log_errors(self._table.advance)
        if self._table.held():
            progress |= self._take_notifications()
        elif time.monotonic() >= self._take_unexpected_s:
            arrived = self._log_errors(self._notifications.take)
            pause_s = _MIN_NOTIFICATION_BACKOFF_S if arrived else _IDLE_NOTIFICATION_S
            self._take_unexpected_s = time.monotonic() + pause_s
        progress |= self._log_errors(self.runner.step)
        self.reader.retry_refused()
        self._report()
        if progress:
            self._backoff_s = _MIN_BACKOFF_S
        elif not self.runner.is_amid_round():
            longest_s = max(_MAX_BACKOFF_S, _LOOKING_SHARE * self.runner.round_s)
            self._backoff_s = min(self._backoff_s * 2, longest_s)

    def _take_notifications(self) -> bool:
        """Take notifications. Returns whether there were any."""
        if self._log_errors(self._notifications.take):
            self._notification_backoff_s = _MIN_NOTIFICATION_BACKOFF_S
            return True
        if not self.runner.busy():  # while it is, the thread polls more often anyway
            self._notification_backoff_s = min(
                2 * self._notification_backoff_s, _MAX_NOTIFICATION_BACKOFF_S
            )
        return False

    def _report(self) -> None:
        """Report what has changed of graces, handshakes and gauges; only this thread changes them."""
        pool, graces_over, handshake_s = (
            self._pool,
            self.reader.graces_over,
            self.registry.handshake_s,
        )
        gauges = WorkerGauges(
            peers=self.registry.num_ready,
            staging_used_bytes=pool.used_bytes if pool is not None else 0,
            staging_pool_bytes=pool.capacity if pool is not None else 0,
        )
        if gauges == self._gauges and not graces_over and not handshake_s:
            return
        self.reader.graces_over, self.registry.handshake_s = 0, []
        with self.results as results:
            results.handshake_s += handshake_s
            if gauges != self._gauges:
                results.gauges = self._gauges = gauges
            if graces_over:
                results.counts["graces_over"] += graces_over
        if graces_over:
            logger.warning("%d failed reads: their memory is used again after a grace", graces_over)
