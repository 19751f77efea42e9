"""Statistics that workers and scheduler send to the front end: plain counters, samples and gauges."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvferry.connector.metrics.tables import OTHER_PEERS
from kvferry.connector.vllm.scheduler import EngineBlocks
from kvferry.link.counters import CounterKey, Counters
from kvferry.protocol.orders import FailureReason
from kvferry.scheduler.consumer.ledger import NOTHING_PINNED, ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.worker.loads.results import LoadRecord, Stage, StepResults, WorkerGauges
from kvferry.worker.peers.peer import PeerKey

_LONGEST = 128
_UNCLEAN = re.compile(r"[^A-Za-z0-9.:_\-]")


class PeerLabels:
    """Labels of the first producers, by address: a restarted engine keeps its label.

    Args:
        max_labels: number of labels besides `other`.
    """

    def __init__(self, max_labels: int) -> None:
        self._max_labels = max_labels
        self._by_address: dict[tuple[str, int], str] = {}

    def label_of(self, source: PeerKey, *, is_good: bool) -> str:
        """The label of the producer of an ended load."""
        address = (source.host, source.port)
        label = self._by_address.get(address)
        if label is not None:
            return label
        # Clients choose the hosts in params. So a producer gets a label only after a good load: then it was connected,
        # and the MAC of the params was checked. Labels are never removed, so their number is bounded.
        if not is_good or len(self._by_address) >= self._max_labels:
            return OTHER_PEERS
        label = _UNCLEAN.sub("_", f"{source.host}:{source.port}"[-_LONGEST:])
        self._by_address[address] = label
        return label


LabelledCounts = dict[str, dict[str, float]]
"""By metric and label value."""


class FerryStats(KVConnectorStats):
    """Counters by name and label, samples and gauges by name:
    `{"counters": {name: {label: n}}, "samples": {name: [x]}, "gauges": {name: x}}`.

    Counters and samples are added up, over workers and over steps. Gauges are reported only by the engine's scheduler,
    which has the latest values of each worker (`EngineMonitor`), so the latest gauge replaces earlier ones.
    """

    @classmethod
    def from_results(
        cls, results: StepResults, labels: PeerLabels
    ) -> FerryStats | None:
        """Statistics of a worker's step; None if there are none."""
        has_loads = results.load_records or results.failed
        if not has_loads and not results.counts and not results.handshake_s:
            return None
        counters: LabelledCounts = {}
        for name, count in results.counts.items():
            counters[name] = {"": count}
        samples: dict[str, list[float]] = {}
        if results.handshake_s:
            samples["handshake_s"] = list(results.handshake_s)
        failed = Counter[str]()
        for reason in results.failed.values():
            failed[reason.value] += 1
        # Aborted loads are counted apart: a client that goes away is no fault of any engine.
        aborted = failed.pop(FailureReason.ABORTED.value, 0)
        if aborted:
            counters["aborted_loads"] = {"": aborted}
        if failed:
            counters["failed_transfers"] = {"": failed.total()}
            counters["failed_loads"] = dict(failed)
        for load in results.load_records:
            for (name, label), amount in _counts_of(load, labels).items():
                by_label = counters.setdefault(name, {})
                by_label[label] = by_label.get(label, 0) + amount
            if load.reason is None:
                for name, value in _samples_of(load).items():
                    samples.setdefault(name, []).append(value)
        return cls(data={"counters": counters, "samples": samples, "gauges": {}})

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "samples": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        # Gauges replace earlier ones: only the scheduler reports them, with the latest values of each worker.
        counters: LabelledCounts = self.data.setdefault("counters", {})
        for name, more in other.data.get("counters", {}).items():
            by_label = counters.setdefault(name, {})
            for label, amount in more.items():
                by_label[label] = by_label.get(label, 0) + amount
        for name, values in other.data.get("samples", {}).items():
            self.data.setdefault("samples", {}).setdefault(name, []).extend(values)
        self.data.setdefault("gauges", {}).update(other.data.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """A summary of the interval, for the log."""
        counters: LabelledCounts = self.data.get("counters", {})
        samples: dict[str, list[float]] = self.data.get("samples", {})
        gauges: dict[str, float] = self.data.get("gauges", {})
        summary: dict[str, int | float] = {}
        for name, by_label in sorted(counters.items()):
            summary[name] = round(sum(by_label.values()), 6)
        for name, values in sorted(samples.items()):
            if values:
                summary[f"{name} mean"] = round(sum(values) / len(values), 6)
        summary.update(gauges)
        return summary

    def is_empty(self) -> bool:
        data = self.data
        return not (data.get("counters") or data.get("samples") or data.get("gauges"))


def _counts_of(load: LoadRecord, labels: PeerLabels) -> dict[CounterKey, float]:
    """The increments of counters by an ended load."""
    if load.reason is FailureReason.ABORTED:
        return {}
    peer = labels.label_of(load.source, is_good=load.reason is None)
    if load.reason is not None:
        return {("peer_failed_loads", peer): 1}
    counts = {
        ("peer_loads", peer): 1,
        ("peer_bytes", peer): load.planned_bytes,
        ("peer_load_s", peer): load.load_s,
        ("placed_loads", _placing(load)): 1,
        ("planned_bytes", ""): load.planned_bytes,
        ("planned_descriptors", ""): load.planned_descriptors,
    }
    if load.staged_bytes:
        counts["staged_bytes", ""] = load.staged_bytes
    if load.mapped_bytes:
        counts["mapped_bytes", ""] = load.mapped_bytes
    if load.early_bytes:
        counts["early_bytes", ""] = load.early_bytes
    return counts


def _placing(load: LoadRecord) -> str:
    """The label of the metric `placed_loads`: whether the plan's bytes are staged, mapped, read in place, or some of
    each."""
    if not load.planned_bytes:
        return "none"
    if load.staged_bytes == load.planned_bytes:
        return "staged"
    if load.mapped_bytes == load.planned_bytes:
        return "mapped"
    if load.staged_bytes or load.mapped_bytes:
        return "mixed"
    return "direct"


def _samples_of(load: LoadRecord) -> dict[str, float]:
    """The measurements of a good load, by metric."""
    lasted_s = load.lasted_s()
    samples = {
        "load_s": load.load_s,
        "queue_s": lasted_s[Stage.QUEUED],
        "connecting_s": lasted_s[Stage.CONNECTING],
        "fence_s": lasted_s[Stage.FENCE],
        "read_s": lasted_s[Stage.POSTING] + lasted_s[Stage.READING],
    }
    # A load that NIXL had nothing to read for says nothing about NIXL.
    if load.mapped_bytes < load.planned_bytes or not load.planned_bytes:
        samples |= {
            "transfer_s": load.transfer_s,
            "post_s": load.post_s,
            "transferred_bytes": float(load.transferred_bytes),
            "descriptors": float(load.descriptors),
        }
    if load.descriptors:
        samples["run_bytes"] = load.transferred_bytes / load.descriptors
    if load.staged_bytes:
        samples["relayout_s"] = load.relayout_s
    return samples


class EngineMonitor:
    """The statistics of one engine's scheduler: reads both ledgers, and changes nothing.

    Only the scheduler reports an engine's gauges, of which an engine has one: a front end may get only some of an
    engine's steps, and keeps the latest value.

    Attributes:
        counters: of this engine.
        workers: the latest gauges of each worker.
    """

    def __init__(
        self,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        blocks: EngineBlocks,
        counters: Counters,
    ) -> None:
        self.counters = counters
        self._leases = leases
        self._loads = loads
        self._blocks = blocks
        self.workers: dict[int, WorkerGauges] = {}
        self._reported_gauges: dict[str, float] = {}

    def take_stats(self) -> FerryStats | None:
        """Counters and samples since the last call, and gauges that have changed."""
        gauges = self._gauges()
        changed = dict(gauges.items() - self._reported_gauges.items())
        self._reported_gauges = gauges
        counters: LabelledCounts = {}
        for (name, label), amount in self.counters.take().items():
            counters.setdefault(name, {})[label] = amount
        samples = self.counters.take_samples()
        if not counters and not samples and not changed:
            return None
        return FerryStats(
            data={"counters": counters, "samples": samples, "gauges": changed}
        )

    def _gauges(self) -> dict[str, float]:
        """Constant cost: the ledgers maintain the counts."""
        references = self._leases.block_references
        loads = self._loads
        usable_blocks = self._blocks.num_blocks - 1  # without the null block
        num_held = len(references.held) + len(references.ending)
        num_leased = len(references.counts)
        leased_fraction = 0.0
        if usable_blocks > 0:
            leased_fraction = num_leased / usable_blocks
        slots = self._leases.slots
        num_leases = slots.count - len(slots.free)
        used_bytes = 0
        pool_bytes = 0
        num_peers = 0
        for worker in self.workers.values():
            used_bytes = max(used_bytes, worker.staging_used_bytes)
            pool_bytes = max(pool_bytes, worker.staging_pool_bytes)
            num_peers = max(num_peers, worker.peers)
        gauges: dict[str, float] = {
            "loads_now": loads.in_flight,
            "prompts_waiting_now": len(loads.claims) - loads.in_flight,
            "leases_computing_now": num_leases - num_held,
            "leases_held_now": num_held,
            "lease_slots": slots.count,
            "leased_blocks_now": num_leased,
            "leased_fraction_now": leased_fraction,
            "staging_used_bytes": used_bytes,
            "staging_pool_bytes": pool_bytes,
            "peers_now": num_peers,
            **NOTHING_PINNED,
        }
        if loads.quarantine.pinned:
            gauges |= loads.quarantine.gauges(time.monotonic())
        return gauges
