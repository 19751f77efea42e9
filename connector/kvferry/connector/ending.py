"""What an engine that was asked to end does about its leases: it steps on while blocks are held, until its time is up.

With a time to drain, those that wait for a lease get it, and answers are offered no more; without, nobody does.
"""

from __future__ import annotations

import logging

from kvferry.connector.shutdown import ShutdownNotice
from kvferry.scheduler.producer.ledger import ProducerLedger

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
