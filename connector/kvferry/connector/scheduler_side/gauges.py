"""An engine's gauges.

Only the scheduler reports them, of which an engine has one: a front end may get only some of an engine's steps, and
keeps the latest value.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.connector.vllm_internals import EngineBlocks
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.worker.loads.results import WorkerGauges


class EngineGauges:
    """Reads both ledgers once per step, at constant cost: the ledgers maintain the counts."""

    def __init__(self, leases: ProducerLedger, loads: ConsumerLedger, blocks: EngineBlocks) -> None:
        self._leases = leases
        self._loads = loads
        self._blocks = blocks
        self._workers: dict[int, WorkerGauges] = {}
        self._seen: tuple[int, ...] = ()
        self._reported: dict[str, float] = {}

    def update(self, gauges: Mapping[int, WorkerGauges]) -> None:
        """Take the latest values of some workers."""
        if gauges:
            self._workers.update(gauges)
            self._seen = ()

    def changes(self) -> dict[str, float]:
        """The gauges that have changed since the last call."""
        references, loads = self._leases.block_references, self._loads
        seen = (len(self._leases), references.num_requests, len(references), loads.in_flight, loads.waiting)
        if seen == self._seen:
            return {}
        self._seen = seen
        now = self._gauges(*seen)
        changed = {name: value for name, value in now.items() if self._reported.get(name) != value}
        self._reported = now
        return changed

    def _gauges(self, leases: int, held: int, blocks: int, in_flight: int, waiting: int) -> dict[str, float]:
        workers = self._workers.values()
        usable = self._blocks.num_blocks - 1  # without the null block
        return {
            "loads_now": in_flight,
            "prompts_waiting_now": waiting,
            "leases_computing_now": leases - held,
            "leases_held_now": held,
            "lease_slots": self._leases.slots,
            "leased_blocks_now": blocks,
            "leased_fraction_now": blocks / usable if usable > 0 else 0.0,
            "staging_used_bytes": max((worker.staging_used_bytes for worker in workers), default=0),
            "staging_pool_bytes": max((worker.staging_pool_bytes for worker in workers), default=0),
            "peers_now": max((worker.peers for worker in workers), default=0),
        }
