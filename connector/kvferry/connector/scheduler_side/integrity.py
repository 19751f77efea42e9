"""Integrity checks of the scheduler side: the counts of its parts must agree with each other and with vLLM's."""

from __future__ import annotations

import logging
import time

from kvferry.connector.scheduler_side.lease_eviction import LeaseEviction
from kvferry.connector.scheduler_side.quarantine import QuarantinedBlocks
from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import LoadState
from kvferry.scheduler.producer.lease import LeaseState
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.state.counters import Counters

logger = logging.getLogger(__name__)

IDLE_INTERVAL_S = 10.0
"""Shortest time between two checks, without `always`."""

_INTERVAL_FACTOR = 200
"""The time between two checks is at least this many times the last check's duration, which is 50 ms with tens of
thousands of held blocks."""


class Integrity:
    """Checks one engine's scheduler side.

    Args:
        always: whether every `poll` checks, instead of only some while the engine has no requests.
        counters: counts `integrity_errors`.
    """

    def __init__(
        self,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        eviction: LeaseEviction,
        quarantined_blocks: QuarantinedBlocks,
        counters: Counters,
        *,
        always: bool,
    ) -> None:
        self._leases = leases
        self._loads = loads
        self._eviction = eviction
        self._quarantined_blocks = quarantined_blocks
        self._counters = counters
        self._always = always
        self._next_s = 0.0
        self._has_reported = False

    def poll(self) -> None:
        """Check if a check is due. An error is counted each time, logged once and never raised: it is a bug of this
        connector, which must not stop an engine that may still serve."""
        if self._eviction.unfinished and not self._always:
            return
        began_s = time.monotonic()
        if began_s < self._next_s and not self._always:
            return
        try:
            self.check()
        except Exception as error:
            self._counters.add("integrity_errors")
            if not self._has_reported:
                self._has_reported = True
                bug = None if isinstance(error, LocalProtocolError) else error
                logger.error(
                    "the integrity check of the scheduler side failed (logged once; integrity_errors counts on): %s",
                    error,
                    exc_info=bug,
                )
        ended_s = time.monotonic()
        self._next_s = ended_s + max(IDLE_INTERVAL_S, _INTERVAL_FACTOR * (ended_s - began_s))

    def check(self) -> None:
        """Check all counts.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        self._leases.check_integrity()
        self._loads.check_integrity()
        self._quarantined_blocks.check_integrity()
        unfinished = set(self._eviction.unfinished)
        leases = self._leases.leases(LeaseState.INTENDED, LeaseState.COMPUTING)
        _check_known("leases of running requests", {lease.request_id for lease in leases}, unfinished)
        live = [state for state in LoadState if state is not LoadState.ABORTED]
        _check_known("remote prompts", set(self._loads.requests(*live)), unfinished)
        aborted = set(self._loads.requests(LoadState.ABORTED))
        if aborted & unfinished:
            raise LocalProtocolError(f"{len(aborted & unfinished)} of {len(aborted)} aborted loads have not ended")


def _check_known(what: str, found: set[str], among: set[str]) -> None:
    if not found <= among:
        raise LocalProtocolError(f"{what}: {len(found)}, of which {len(found - among)} are unknown: {among=}"[:2000])
