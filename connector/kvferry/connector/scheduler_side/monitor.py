"""The scheduler side's reports on itself: its metrics, and whether its counts agree with each other and with vLLM's.

Only the scheduler reports an engine's gauges, of which an engine has one: a front end may get only some of an engine's
steps, and keeps the latest value.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kvferry.connector.metrics.stats import FerryStats
from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import RemotePromptState
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.lease import LeaseState
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.worker.loads.results import WorkerGauges

logger = logging.getLogger(__name__)

IDLE_INTERVAL_S = 10.0
"""Shortest time between two integrity checks, without `always`. One takes 50 ms with tens of thousands of held
blocks."""


class EngineMonitor:
    """Reads both ledgers, and changes nothing.

    Args:
        requests: this engine's.
        always: whether every `poll` checks integrity, instead of only some while the engine has no requests.

    Attributes:
        counters: of this engine; `integrity_errors` is counted here.
    """

    def __init__(
        self,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        blocks: EngineBlocks,
        requests: EngineRequests,
        counters: Counters,
        *,
        always: bool,
    ) -> None:
        self.counters = counters
        self._leases = leases
        self._loads = loads
        self._blocks = blocks
        self._requests = requests
        self._workers: dict[int, WorkerGauges] = {}
        self._reported_gauges: dict[str, float] = {}
        self._always = always
        self._next_check_s = 0.0
        self._has_logged = False

    def update(self, gauges: Mapping[int, WorkerGauges]) -> None:
        """Take the latest values of some workers."""
        self._workers.update(gauges)

    def take_stats(self) -> FerryStats | None:
        """Counters and samples since the last call, and gauges that have changed."""
        gauges = self._gauges()
        changed = dict(gauges.items() - self._reported_gauges.items())
        self._reported_gauges = gauges
        counts = self.counters.take()
        samples = self.counters.take_samples()
        return FerryStats.from_counts(counts, samples, changed)

    def poll(self) -> None:
        """Check integrity if a check is due. An error is counted each time, logged once and never raised."""
        if not self._is_check_due():
            return
        try:
            self.check_integrity()
        except Exception as error:  # noqa: BLE001 - `_log` reports it
            # Not raised: it is a bug of this connector, which must not stop an engine that may still serve. Logged
            # once: counts that disagree do so in every later check as well.
            self.counters.add("integrity_errors")
            if not self._has_logged:
                self._has_logged = True
                self._log(error)
        self._next_check_s = time.monotonic() + IDLE_INTERVAL_S

    def check_integrity(self) -> None:
        """Check both ledgers, and that they know the requests that vLLM has.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        self._leases.check_integrity()
        self._loads.check_integrity()
        unfinished = {entry.request_id for entry in self._requests}
        running_leases = self._leases.leases(LeaseState.INTENDED, LeaseState.COMPUTING)
        leased = {lease.request_id for lease in running_leases}
        states_of_unfinished = [
            state for state in RemotePromptState if state is not RemotePromptState.ABORTED
        ]
        remote = set(self._loads.requests(*states_of_unfinished))
        aborted = set(self._loads.requests(RemotePromptState.ABORTED))
        # A lease that is held and a load that was aborted outlive their request; all others end with it.
        knows_ended = not leased | remote <= unfinished
        knows_unended = bool(aborted & unfinished)
        if knows_ended or knows_unended:
            raise LocalProtocolError(
                f"{len(unfinished)} requests have not ended; of {len(leased)} with a running lease "
                f"{len(leased - unfinished)} have, of {len(remote)} remote prompts {len(remote - unfinished)} have, of "
                f"{len(aborted)} aborted loads {len(aborted & unfinished)} have not"
            )

    def _is_check_due(self) -> bool:
        if self._always:
            return True
        # Only without requests: a check reads all blocks, and a step must not cost more the more leases are held.
        return not len(self._requests) and time.monotonic() >= self._next_check_s

    def _log(self, error: Exception) -> None:
        # The text of a `LocalProtocolError` has all counts. Anything else is a bug of the check: its place is needed.
        unexpected = None if isinstance(error, LocalProtocolError) else error
        logger.error(
            "the integrity check of the scheduler side failed (logged once; integrity_errors counts on): %s",
            error,
            exc_info=unexpected,
        )

    def _gauges(self) -> dict[str, float]:
        """Constant cost: the ledgers maintain the counts."""
        references = self._leases.block_references
        loads = self._loads
        usable_blocks = self._blocks.num_blocks - 1  # without the null block
        leased_fraction = 0.0
        if usable_blocks > 0:
            leased_fraction = len(references) / usable_blocks
        workers = self._workers.values()
        return {
            "loads_now": loads.in_flight,
            "prompts_waiting_now": loads.waiting,
            "leases_computing_now": len(self._leases) - references.num_requests,
            "leases_held_now": references.num_requests,
            "lease_slots": self._leases.slots.count,
            "leased_blocks_now": len(references),
            "leased_fraction_now": leased_fraction,
            "staging_used_bytes": max((worker.staging_used_bytes for worker in workers), default=0),
            "staging_pool_bytes": max((worker.staging_pool_bytes for worker in workers), default=0),
            "peers_now": max((worker.peers for worker in workers), default=0),
            **loads.quarantine.gauges(time.monotonic()),
        }
