"""The drain of an engine that was asked to end: it steps on while blocks are held, until its time is up.

vLLM calls a connector's `shutdown` only when all is over. On SIGTERM an engine goes on stepping until no request is
left, and a request whose blocks are held counts as one. So unless leases that no consumer will read are ended, the
engine steps until it is killed.

With a time to drain, those that wait for a lease get it, and answers are offered no more; without, nobody does.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from kvferry.scheduler.producer.ledger import ProducerLedger


class DrainSignal:
    """Knows whether this process was asked to end.

    vLLM has set its handlers of SIGTERM and SIGINT before it makes a connector. They are called as before; the
    handler only sets a flag. Where no handler is set (an engine within another program), or on a thread that may not
    set one, nothing is changed and no signal is noticed.
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
        drains_s: how long vLLM waits for what is under way (`--shutdown-timeout`).

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
        """Whether the engine is to end."""
        return self.has_begun or self._drain_signal.was_received

    def step(self) -> None:
        """Called once a step. Also ends offers that are held only now, or that a prefill has waited with until now."""
        if self.has_begun:
            if self._drains_s:
                self._leases.release_idle_turns("shutdown")
        elif self._drain_signal.was_received:
            self.has_begun = True
            leases = self._leases
            ended = leases.release_idle_turns("shutdown") if self._drains_s else leases.release_all("shutdown")
            logger.info("shutting down: %d leases ended, %d are waited for", ended, leases.block_references.num_held)
