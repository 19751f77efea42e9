"""The idle state of an engine without requests, and its first step after waking.

vLLM's loop sleeps until there is work, unless the connector reports that the engine must step. An engine sleeps while
it holds leases, so a held lease costs nothing as long as no request needs its blocks. Meanwhile consumers'
notifications wait at the workers, renewals and releases in the listener's inbox, and expired leases for the next step.
A step follows after `MAX_IDLE_S`, unless the engine cannot be woken.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvferry.connector.scheduler_side.quarantine import QuarantinedBlocks
from kvferry.connector.vllm_internals import EngineLoop
from kvferry.scheduler.producer.ledger import ProducerLedger

MAX_IDLE_S = 15.0
"""Longest time between steps of an engine that holds leases; its metrics are hardly older. More steps would be costly:
vLLM's workers spin for a second after each before they sleep again."""


class IdleState:
    """The idle state of one engine.

    Args:
        workers: number of this engine's workers.
    """

    def __init__(self, leases: ProducerLedger, quarantined_blocks: QuarantinedBlocks, workers: int) -> None:
        self._leases = leases
        self._quarantined_blocks = quarantined_blocks
        self._workers = frozenset(range(workers))
        self._was_idle = False
        self._unreported: set[int] = set()
        self._waking_until_s = 0.0  # on the leases' clock
        self._stepped_s = time.monotonic()
        self._loop = EngineLoop()

    def must_step(self, *, is_draining: bool) -> bool:
        """Whether the engine must step although it has no request.

        Args:
            is_draining: whether the engine shuts down. Then it waits for its leases, but not for quarantined blocks.
        """
        leases, num_held = self._leases, len(self._leases.block_references.held)
        if leases.needs_step or (len(self._quarantined_blocks) and not is_draining):
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
        return bool(self._unreported)

    def reported(self, workers: Iterable[int]) -> None:
        """These workers have reported."""
        self._unreported.difference_update(workers)

    @property
    def has_news(self) -> bool:
        """Whether the next step or two may report leases that ended before the engine woke."""
        return self._was_idle or self.is_waking

    def _has_slept_long(self) -> bool:
        return time.monotonic() >= self._stepped_s + MAX_IDLE_S

    @property
    def is_waking(self) -> bool:
        """Whether reports of notifications received while idle are outstanding: leases that seem held may be over."""
        return bool(self._unreported) and self._leases.clock_s <= self._waking_until_s
