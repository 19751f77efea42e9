"""The transfer thread: the one thread that touches the fabric once the worker runs.

It blocks when there is nothing to do. While something is in flight it looks again after a pause that grows from
50 µs to 1 ms and shrinks back with every progress; while leases are held it looks for notifications every 2 ms; while
a failed transfer may still write, every 10 ms. New orders wake it at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.notifications import decode_notification
from kvferry.protocol.orders import FailureReason, LeaseHold, StepOrders
from kvferry.protocol.params import Blocks
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric import Fabric, FabricError, PeerLost
from kvferry.worker.host_mirror import HostMirror
from kvferry.worker.lease_table import LeaseTable
from kvferry.worker.load import Load, LoadContext, LoadFailed, Steps
from kvferry.worker.peer_book import PeerBook
from kvferry.worker.results import ResultBox
from kvferry.worker.unforeseen import unforeseen

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3
_NOTIFICATION_PAUSE_S = 2e-3
_QUARANTINE_PAUSE_S = 10e-3
_LAST_READS_S = 0.5
_JOIN_S = 10.0

P = ParamSpec("P")


@dataclass(slots=True, eq=False)
class _Unready:
    """A hold that waits for the device.

    Attributes:
        mark: reached when everything that may write the blocks has finished; then, when they have been copied.
        waves: what has yet to be copied before anybody may read.
    """

    hold: LeaseHold
    mark: DeviceMark
    waves: deque[Blocks]


@dataclass(frozen=True, slots=True)
class _Orders:
    orders: StepOrders
    mark: DeviceMark
    arrived_s: float


class _Wake:
    """There may be something to do."""


class _Stop:
    """End the thread."""


_WorkItem = _Orders | _Wake | _Stop


class TransferThread:
    """Carries out orders until `close`.

    Args:
        table: this worker's lease table.
        mirror: where blocks are copied to before anybody may read them; None where peers read the caches.
        load_timeout_s: after which a load has failed.
        max_loads: loads in flight at once.
    """

    def __init__(self, table: LeaseTable, mirror: HostMirror | None, load_timeout_s: float, max_loads: int) -> None:
        self.results = ResultBox()
        self._table = table
        self._mirror = mirror
        self._load_timeout_s = load_timeout_s
        self._max_loads = max_loads
        self._inbox: queue.SimpleQueue[_WorkItem] = queue.SimpleQueue()
        self._unready: list[_Unready] = []
        self._waiting: deque[Load] = deque()
        self._running: dict[str, tuple[Load, Steps]] = {}
        self._quarantine: dict[str, Load] = {}
        self._pause_s = _SHORTEST_PAUSE_S
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvferry-transfer", daemon=True)

    def start(self, context: LoadContext) -> None:
        """Begin; the context's fabric is this thread's from now on. It comes late: its peer book wakes the thread."""
        self._context = context
        self._fabric: Fabric = context.fabric
        self._book: PeerBook = context.book
        self._thread.start()

    def submit(self, orders: StepOrders, mark: DeviceMark) -> None:
        """Hand over a step's orders; returns at once, with its leases open: no consumer can come before them."""
        for opened in orders.opens:
            self._table.open(opened)
        self._inbox.put(_Orders(orders, mark, time.monotonic()))

    def wake(self) -> None:
        """Look for something to do; from any thread."""
        self._inbox.put(_Wake())

    def close(self) -> bool:
        """Stop the thread and wait for it; from now on no lease is good. Idempotent.

        Returns:
            Whether it has ended; False when it is stuck in a call of the fabric.
        """
        self._table.clear()
        if self._thread.is_alive():
            self._inbox.put(_Stop())
            self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._survive(self._take_work)
            self._step()
        self._wind_up()

    def _survive(self, part: Callable[P, bool], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Do one part of the work. Whatever it raises, the thread lives and the other parts get their turn."""
        try:
            return part(*args, **kwargs)
        except Exception:  # noqa: BLE001 - shown, with its traceback
            unforeseen.show("the transfer thread goes on")
            return False

    def _wind_up(self) -> None:
        """The memory is about to be the engine's alone: reads of others are void, own ones get a moment to end."""
        self._table.clear()
        for _, steps in self._running.values():
            steps.close()
        loads = [*(load for load, _ in self._running.values()), *self._quarantine.values()]
        end_s = time.monotonic() + _LAST_READS_S
        while loads and time.monotonic() < end_s:
            loads = [load for load in loads if not load.settle()]
            time.sleep(_LONGEST_PAUSE_S)
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
            self._pause_s = _SHORTEST_PAUSE_S
            if isinstance(item, _Stop):
                self._stopping = True
            elif isinstance(item, _Orders):
                self._carry_out(item)

    def _wait_s(self) -> float | None:
        if self._running or self._unready or self._waiting or self._book.busy():
            return self._pause_s
        if self._table.held():
            return _NOTIFICATION_PAUSE_S
        return _QUARANTINE_PAUSE_S if self._quarantine or self._book.burying() else None

    def _carry_out(self, item: _Orders) -> None:
        orders = item.orders
        if orders.ends:
            self._survive(self._take_notifications)  # a report that is here already comes before the end of its lease
        sent = [self._table.end(end) for end in orders.ends]
        for hold in orders.holds:
            sent.append(self._table.hold(hold))
            waves = self._mirror.waves(hold.blocks) if self._mirror is not None else deque()
            self._unready.append(_Unready(hold, item.mark, waves))
        with self.results as results:
            results.sent.update(request_id for request_id in sent if request_id is not None)
        for order in orders.loads:
            self._waiting.append(Load(order, item.mark, self._context, item.arrived_s))

    def _step(self) -> None:
        now_s = time.monotonic()
        in_use = {load.key for load, _ in self._running.values()} | {x.key for x in self._quarantine.values()}
        progress = self._survive(self._book.step, now_s, in_use)
        progress |= self._survive(self._mark_ready)
        if self._table.held():
            progress |= self._survive(self._take_notifications)
        # In order: those that run are late before those that wait, which then get their turn and are late themselves.
        while self._waiting and len(self._running) < self._max_loads:
            load = self._waiting.popleft()
            self._running[load.order.request_id] = (load, load.steps())
        for load, steps in list(self._running.values()):
            progress |= self._survive(self._advance, load, steps, now_s)
        progress |= self._look_into_quarantine()
        self._pause_s = _SHORTEST_PAUSE_S if progress else min(self._pause_s * 2, _LONGEST_PAUSE_S)

    def _is_late(self, load: Load, now_s: float) -> bool:
        return now_s - load.ordered_s > self._load_timeout_s

    def _mark_ready(self) -> bool:
        reached = [one for one in self._unready if one.mark.reached()]
        for one in reached:
            self._unready.remove(one)
            if not one.waves or self._mirror is None:
                self._table.ready(one.hold)
                continue
            one.mark = self._mirror.try_copy(one.waves) or one.mark
            self._unready.append(one)
        return bool(reached)

    def _take_notifications(self) -> bool:
        arrived = self._fabric.take_notifications()
        for sender, frame in arrived:
            self._survive(self._take_notification, sender, frame)
        return bool(arrived)

    def _take_notification(self, sender: str, frame: bytes) -> bool:
        try:
            done = decode_notification(frame)
            finished = self._table.done(done)
        except InvalidMessage as invalid:
            logger.warning("ignored a notification of %s: %s", sender, invalid)
            with self.results as results:
                results.bad_notifications += 1
            return False
        except KeyError:
            logger.debug("ignored a notification of %s: no such lease", sender)
            with self.results as results:
                results.late_notifications += 1
            return False
        logger.debug("slot=%d done by worker %d of %s", done.slot, done.worker, done.consumer)
        if finished is not None:
            with self.results as results:
                results.sent.add(finished)
        return True

    def _advance(self, load: Load, steps: Steps, now_s: float) -> bool:
        """Resume one load. Returns whether it has ended."""
        try:
            if self._is_late(load, now_s):
                steps.close()
                raise LoadFailed(FailureReason.DEADLINE, f"not complete after {self._load_timeout_s:g} s")
            next(steps)
        except StopIteration:
            self._succeed(load)
        except LoadFailed as failed:
            self._fail(load, failed.reason, str(failed))
        except FabricError as error:
            self._fail(load, FailureReason.TRANSFER, str(error))
            if isinstance(error, PeerLost) and load.peer is not None:
                self._book.lost(load.peer, str(error), now_s)
        except Exception as error:
            logger.exception("req=%s peer=%s: an unforeseen error in a load", load.order.request_id, load.key)
            self._fail(load, FailureReason.TRANSFER, repr(error))
        else:
            return False
        return True

    def _succeed(self, load: Load) -> None:
        request_id = load.order.request_id
        del self._running[request_id]
        load.settle()
        with self.results as results:
            results.loaded.add(request_id)
            results.undelivered += load.undelivered
            if load.figures is not None:
                results.figures.append(load.figures)
        if load.figures is not None:
            logger.debug(
                "req=%s peer=%s loaded tokens %d…%d: %d B in %d descriptors, %.2f ms",
                request_id,
                load.key,
                load.order.first_token,
                load.order.stop_token,
                load.figures.planned_bytes,
                load.figures.descriptors,
                load.figures.load_s * 1e3,
            )

    def _fail(self, load: Load, reason: FailureReason, detail: str) -> None:
        """Report a failed load at once; its blocks stay in quarantine while anything may still write into them."""
        request_id = load.order.request_id
        self._running.pop(request_id, None)
        safe = load.settle()
        if not safe:
            self._quarantine[request_id] = load
        logger.warning(
            "req=%s peer=%s load failed (%s): %s%s",
            request_id,
            load.key,
            reason.value,
            detail,
            "" if safe else "; its blocks are quarantined",
        )
        with self.results as results:
            results.failed[request_id] = reason
            if not safe:
                results.alive = frozenset(self._quarantine)

    def _look_into_quarantine(self) -> bool:
        over = [request_id for request_id, load in self._quarantine.items() if load.settle()]
        for request_id in over:
            del self._quarantine[request_id]
        if over:
            with self.results as results:
                results.alive = frozenset(self._quarantine)
        return bool(over)
