"""Whether an engine without requests must step: its idle state, its first step after waking, and its drain.

vLLM's loop sleeps until there is work, unless the connector reports that the engine must step. An engine sleeps while
it holds leases, so a held lease costs nothing as long as no request needs its blocks. Meanwhile consumers'
notifications wait at the workers, renewals and releases in the listener's inbox, and expired leases for the next step.
A step follows after `MAX_IDLE_S`, unless the engine cannot be woken.

vLLM calls a connector's `shutdown` only at the very end. On SIGTERM an engine steps until it has no work, and held
leases count as work. So unless leases that no consumer will read are ended, the engine steps until it is killed. With
a time to drain, waiting requests still get leases, but answers are no longer offered; without it, all leases end.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType

from kvferry.connector.vllm.loop import EngineLoop
from kvferry.scheduler.consumer.quarantine import QuarantinedBlocks
from kvferry.scheduler.producer.eviction_order import release_idle_turns
from kvferry.scheduler.producer.ledger import ProducerLedger

logger = logging.getLogger(__name__)

MAX_IDLE_S = 15.0
"""Longest time between steps of an engine that holds leases; its metrics are hardly older. More steps would be costly:
vLLM's workers spin for a second after each before they sleep again."""


class Drain:
    """The drain of one engine: it keeps stepping while blocks are held, until its time is up.

    vLLM sets its handlers of SIGTERM and SIGINT before it creates a connector. They are called as before; a new handler
    only sets a flag in addition. If no handler is set (an engine within another program), or on a thread that may not
    set one, nothing is changed and no signal is noticed.

    Args:
        drains_s: seconds that vLLM waits for running requests (`--shutdown-timeout`).

    Attributes:
        is_requested: whether this process has received SIGTERM or SIGINT.
        has_begun: whether a step has seen that.
    """

    def __init__(self, leases: ProducerLedger, drains_s: float) -> None:
        self.is_requested = False
        self.has_begun = False
        self._leases = leases
        self._drains_s = drains_s
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._notice(number)

    def step(self) -> None:
        """Called once per step. After the drain has begun, it ends turn leases that became held or idle since."""
        if not self.is_requested:
            return
        leases, begins, self.has_begun = self._leases, not self.has_begun, True
        if self._drains_s:
            ended = release_idle_turns(leases, "shutdown")
        else:
            ended = leases.release_all("shutdown") if begins else 0
        if begins:
            logger.info(
                "shutting down: %d leases ended, waiting for %d",
                ended,
                len(leases.block_references.held),
            )

    def _notice(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not callable(before) or before is signal.default_int_handler:
            return

        def on_signal(given: int, frame: FrameType | None) -> None:
            self.is_requested = True
            before(given, frame)

        signal.signal(number, on_signal)


class IdleState:
    """The idle state of one engine.

    Args:
        workers: number of this engine's workers.
        drain: ends leases at the beginning of a step.
        has_no_dp_siblings: whether a step that computes nothing keeps no other engine waiting.
    """

    def __init__(
        self,
        leases: ProducerLedger,
        quarantine: QuarantinedBlocks,
        workers: int,
        drain: Drain,
        *,
        has_no_dp_siblings: bool,
    ) -> None:
        self.drain = drain
        self.has_no_dp_siblings = has_no_dp_siblings
        self._leases = leases
        self._quarantine = quarantine
        self._workers = frozenset(range(workers))
        self._was_idle = False
        self._unreported: set[int] = set()
        self._waking_until_s = 0.0  # on the leases' clock
        self._stepped_s = time.monotonic()
        self._loop = EngineLoop()

    def must_step(self) -> bool:
        """Whether the engine must step although it has no request. An engine that shuts down waits for its leases, but
        not for quarantined blocks."""
        is_draining, num_held = self.drain.is_requested, len(self._leases.block_references.held)
        if self._leases.needs_step or (len(self._quarantine) and not is_draining):
            return True
        if is_draining or not num_held:
            return num_held > 0
        if self._loop.is_paused:
            return True  # as with requests: the pause is complete when no lease is held
        if self._has_slept_long():
            # vLLM does not call this while the engine sleeps. After a long sleep (woken by the listener's thread or by
            # a call to empty the prefix cache), take one step, which may free blocks.
            return True
        self._was_idle = True
        return False

    def poll(self) -> None:
        """Wake an engine after `MAX_IDLE_S` without a step. Called by the listener's thread, twice a second or more."""
        if self._was_idle and self._has_slept_long():
            self._loop.wake()

    def begin_step(self) -> bool:
        """A step begins. Returns whether every worker must report in it, even if it has no news."""
        self._stepped_s = time.monotonic()
        if self._was_idle:
            self._was_idle = False
            self._unreported = set(self._workers)
            self._waking_until_s = self._leases.clock_s + self._leases.clock.heartbeat_s
        self.drain.step()
        return bool(self._unreported)

    def reported(self, workers: Iterable[int]) -> None:
        """These workers have reported."""
        self._unreported.difference_update(workers)

    @property
    def may_report_ended_leases(self) -> bool:
        """Whether the next step or two may report leases that ended before the engine woke."""
        return self._was_idle or self.is_waking

    @property
    def is_waking(self) -> bool:
        """Whether reports of notifications received while idle are outstanding: leases that seem held may be over."""
        return bool(self._unreported) and self._leases.clock_s <= self._waking_until_s

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused, and schedules nothing for that reason."""
        return self._loop.is_paused

    def _has_slept_long(self) -> bool:
        return time.monotonic() >= self._stepped_s + MAX_IDLE_S
