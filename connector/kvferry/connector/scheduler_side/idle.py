"""When an engine without requests may be idle, and what it does first when it wakes.

vLLM's loop sleeps until there is work, unless the connector says that the engine must step. So this decides what a
held lease costs: nothing while no request needs the blocks. What happens meanwhile waits: consumers' notifications with
the workers, renewals and releases in the listener's inbox, the ends of leases for the next step. There is one after
`MAX_IDLE_S`, unless the engine cannot be woken.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvferry.connector.scheduler_side.held_blocks import QuarantinedBlocks
from kvferry.connector.vllm_internals import EngineLoop
from kvferry.scheduler.producer.ledger import ProducerLedger

MAX_IDLE_S = 15.0
"""While it holds leases, an engine steps so often at least: then what it reports is hardly older. A step costs more
than itself: vLLM's workers spin for a second after each before they sleep again."""


class IdleState:
    """The idle state of one engine.

    Args:
        workers: of this engine.
    """

    def __init__(self, leases: ProducerLedger, quarantined_blocks: QuarantinedBlocks, workers: int) -> None:
        self._leases = leases
        self._quarantined_blocks = quarantined_blocks
        self._workers = frozenset(range(workers))
        self._was_idle = False
        self._unheard: set[int] = set()
        self._waking_until_s = 0.0  # on the leases' clock
        self._stepped_s = time.monotonic()
        self._loop = EngineLoop()

    def must_step(self, *, is_draining: bool) -> bool:
        """Whether the engine must step although it has no request.

        Args:
            is_draining: the engine was asked to end. Then it waits for its leases, but not for quarantined blocks.
        """
        leases, references = self._leases, self._leases.block_references
        if (
            leases.has_orders
            or references.num_ending
            or leases.may_have_due
            or (len(self._quarantined_blocks) and not is_draining)
        ):
            return True
        if is_draining or not references.num_held:
            return references.num_held > 0
        if self._loop.is_paused:
            return True  # as with requests: the pause is complete when nothing is held any more
        if self._has_slept_long():
            # A sleeping engine is not asked. A caller that asks now (the listener's thread, a call to empty its prefix
            # cache) gets what one step can bring back.
            return True
        self._was_idle = True
        return False

    def poll(self) -> None:
        """Called on the listener's thread, twice a second or oftener: wake an engine that has been idle for long."""
        if self._was_idle and self._has_slept_long():
            self._loop.wake()

    def begin_step(self) -> bool:
        """A step begins. Returns whether every worker is to answer in it, be it that there is nothing new."""
        self._stepped_s = time.monotonic()
        if self._was_idle:
            self._was_idle = False
            self._unheard = set(self._workers)
            self._waking_until_s = self._leases.clock_s + self._leases.heartbeat_s
        return bool(self._unheard)

    def reported(self, workers: Iterable[int]) -> None:
        """These workers have told what they knew."""
        self._unheard.difference_update(workers)

    @property
    def has_news(self) -> bool:
        """Whether the next step or two may tell of leases that were over before the engine woke."""
        return self._was_idle or self.is_waking

    def _has_slept_long(self) -> bool:
        return time.monotonic() >= self._stepped_s + MAX_IDLE_S

    @property
    def is_waking(self) -> bool:
        """Whether workers have yet to report what they received while idle: leases may be over that seem held."""
        return bool(self._unheard) and self._leases.clock_s <= self._waking_until_s
