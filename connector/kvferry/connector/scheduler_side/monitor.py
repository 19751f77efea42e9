"""The metrics of the scheduler side.

Only the scheduler reports an engine's gauges, of which an engine has one: a front end may get only some of an engine's
steps, and keeps the latest value.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvferry.connector.metrics.stats import FerryStats
from kvferry.connector.scheduler_side.requests import SchedulerContext
from kvferry.worker.loads.results import WorkerGauges


class EngineMonitor:
    """Reads both ledgers, and changes nothing.

    Attributes:
        counters: of this engine.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self.counters = context.counters
        self._leases = context.leases
        self._loads = context.loads
        self._blocks = context.blocks
        self._workers: dict[int, WorkerGauges] = {}
        self._reported_gauges: dict[str, float] = {}

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
            "staging_used_bytes": max(
                (worker.staging_used_bytes for worker in workers), default=0
            ),
            "staging_pool_bytes": max(
                (worker.staging_pool_bytes for worker in workers), default=0
            ),
            "peers_now": max((worker.peers for worker in workers), default=0),
            **loads.quarantine.gauges(time.monotonic()),
        }
