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


class ShutdownNotice:
    """Knows whether this process was asked to end.

    vLLM has set its handlers of SIGTERM and SIGINT before it makes a connector. They are called as before; nothing is
    done in the handler but to remember. Where nobody has set a handler (an engine within a program of somebody else),
    or on a thread that may not set one, nothing is changed and nothing is heard.
    """

    def __init__(self) -> None:
        self.was_given = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._listen(number)

    def _listen(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not callable(before) or before is signal.default_int_handler:
            return

        def heard(given: int, frame: FrameType | None) -> None:
            self.was_given = True
            before(given, frame)

        signal.signal(number, heard)


logger = logging.getLogger(__name__)


class Ending:
    """Of one engine.

    Args:
        drains_s: how long vLLM waits for what is under way (`--shutdown-timeout`).

    Attributes:
        has_begun: whether a step has seen the notice.
    """

    def __init__(self, notice: ShutdownNotice, leases: ProducerLedger, drains_s: float) -> None:
        self.has_begun = False
        self._notice = notice
        self._leases = leases
        self._drains_s = drains_s

    @property
    def is_asked(self) -> bool:
        """Whether the engine is to end."""
        return self.has_begun or self._notice.was_given

    def step(self) -> None:
        """Once a step. Also offers end that were not held yet at first, or that a prefill has waited with until now."""
        if self.has_begun:
            if self._drains_s:
                self._leases.release_idle_turns("shutdown")
        elif self._notice.was_given:
            self.has_begun = True
            leases = self._leases
            ended = leases.release_idle_turns("shutdown") if self._drains_s else leases.release_all("shutdown")
            logger.info("shutting down: %d leases ended, %d are waited for", ended, leases.kept.num_held)
