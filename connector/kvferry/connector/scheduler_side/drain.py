"""The drain of an engine that shuts down: it keeps stepping while blocks are held, until its time is up.

vLLM calls a connector's `shutdown` only at the very end. On SIGTERM an engine steps until it has no work, and held
leases count as work. So unless leases that no consumer will read are ended, the engine steps until it is killed.

With a time to drain, waiting requests still get leases, but answers are no longer offered; without it, all leases end.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from kvferry.scheduler.producer.eviction_order import release_idle_turns
from kvferry.scheduler.producer.ledger import ProducerLedger


class DrainSignal:
    """Records whether this process has received SIGTERM or SIGINT.

    vLLM sets its handlers before it creates a connector. They are called as before; the new handler only sets a flag in
    addition. If no handler is set (an engine within another program), or on a thread that may not set one, nothing is
    changed and no signal is noticed.
    """

    def __init__(self) -> None:
        self.was_received = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._listen(number)

    def _listen(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not callable(before) or before is signal.default_int_handler:
            return

        def on_signal(given: int, frame: FrameType | None) -> None:
            self.was_received = True
            before(given, frame)

        signal.signal(number, on_signal)


logger = logging.getLogger(__name__)


class Drain:
    """The drain of one engine.

    Args:
        drains_s: seconds that vLLM waits for running requests (`--shutdown-timeout`).

    Attributes:
        has_begun: whether a step has seen the signal.
    """

    def __init__(self, drain_signal: DrainSignal, leases: ProducerLedger, drains_s: float) -> None:
        self.has_begun = False
        self._drain_signal = drain_signal
        self._leases = leases
        self._drains_s = drains_s

    @property
    def is_requested(self) -> bool:
        """Whether the engine shuts down."""
        return self.has_begun or self._drain_signal.was_received

    def step(self) -> None:
        """Called once per step. After the drain has begun, it ends turn leases that became held or idle since."""
        if self.has_begun:
            if self._drains_s:
                release_idle_turns(self._leases, "shutdown")
        elif self._drain_signal.was_received:
            self.has_begun = True
            leases = self._leases
            ended = release_idle_turns(leases, "shutdown") if self._drains_s else leases.release_all("shutdown")
            logger.info("shutting down: %d leases ended, waiting for %d", ended, len(leases.block_references.held))
