"""The drain of an engine that was asked to end: its held leases end, or it steps until they are read."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from kvferry.scheduler.producer.eviction_order import release_idle_turns
from kvferry.scheduler.producer.ledger import ProducerLedger

logger = logging.getLogger(__name__)


class Drain:
    """The drain of one engine.

    vLLM calls a connector's `shutdown` only at the very end. On SIGTERM an engine steps until it has no work, and held
    leases count as work (`steps.py`). So leases that no consumer will read must end, or the engine steps until it is
    killed.

        time to drain (`--shutdown-timeout`)     leases of prompts     offered answers (turns)
        0 s                                      end at once           end at once
        more                                     are waited for        end; none is offered any more

    Args:
        drain_s: seconds that vLLM waits for running requests.

    Attributes:
        is_requested: whether this process has received SIGTERM or SIGINT.
        has_begun: whether a step has seen that.
    """

    def __init__(self, leases: ProducerLedger, drain_s: float) -> None:
        self.is_requested = False
        self.has_begun = False
        self._leases = leases
        self._drain_s = drain_s
        # Python lets the main thread alone set handlers. An engine on another thread notices no signal.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._notice(number)

    def step(self) -> None:
        """Called once per step. After the drain has begun, it ends turns that were offered or became idle since."""
        if not self.is_requested:
            return
        is_first = not self.has_begun
        self.has_begun = True
        num_ended = self._end_leases(is_first=is_first)
        if is_first:
            logger.info(
                "shutting down: %d leases ended, waiting for %d",
                num_ended,
                len(self._leases.block_references.held),
            )

    def _end_leases(self, *, is_first: bool) -> int:
        if self._drain_s:
            # In every step: the next request of a conversation goes to another engine anyway, so a turn that is held
            # when a running request ends would only keep this one.
            return release_idle_turns(self._leases, "shutdown")
        if is_first:
            return self._leases.release_all("shutdown")
        return 0

    def _notice(self, number: signal.Signals) -> None:
        """Set a handler that sets a flag and calls the one that was there."""
        # vLLM sets its handlers before it creates a connector (v1/engine/core.py:1469). If there is none, the engine
        # runs within another program: to set one would change how that program ends.
        before = signal.getsignal(number)
        if not callable(before) or before is signal.default_int_handler:
            return

        def on_signal(given: int, frame: FrameType | None) -> None:
            self.is_requested = True
            before(given, frame)

        signal.signal(number, on_signal)
