"""Statistics that workers and scheduler send to the front end: plain counters, samples and gauges.

Some metrics have a label for the producer. Clients choose the hosts in params, so a producer gets a label only after a
good load: then it was connected and the MAC of the params was checked. Labels are never removed, so their number is
bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvferry.connector.metrics.tables import OTHER_PEERS
from kvferry.protocol.orders import FailureReason
from kvferry.scheduler.state.counters import CounterKey
from kvferry.worker.loads.record import LoadRecord
from kvferry.worker.loads.results import StepResults
from kvferry.worker.peers.peer import PeerKey

_LONGEST = 128
_UNCLEAN = re.compile(r"[^A-Za-z0-9.:_\-]")


class PeerLabels:
    """Labels of the first producers, by address: a restarted engine keeps its label.

    Args:
        most: number of labels besides `other`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[str, int], str] = {}

    def of(self, source: PeerKey, *, is_good: bool) -> str:
        """The label of the producer of an ended load."""
        address = (source.host, source.port)
        known = self._known.get(address)
        if known is None and is_good and len(self._known) < self._most:
            known = self._known[address] = _UNCLEAN.sub("_", f"{source.host}:{source.port}"[-_LONGEST:])
        return OTHER_PEERS if known is None else known


LabelledCounts = dict[str, dict[str, float]]
"""By metric and label value."""
Samples = dict[str, list[float]]


class FerryStats(KVConnectorStats):
    """Counters by name and label, samples and gauges by name:
    `{"counters": {name: {label: n}}, "samples": {name: [x]}, "gauges": {name: x}}`.

    Counters and samples are added up, over workers and over steps. Gauges are reported only by the engine's scheduler,
    which has the latest values of each worker (`EngineGauges`), so the latest gauge replaces earlier ones.
    """

    @classmethod
    def of_counts(
        cls,
        counts: Mapping[CounterKey, float],
        samples: Mapping[str, list[float]],
        gauges: Mapping[str, float] | None = None,
    ) -> FerryStats | None:
        """Statistics of one step; None if there are none."""
        if not counts and not samples and not gauges:
            return None
        counters: LabelledCounts = {}
        for (name, label), amount in counts.items():
            counters.setdefault(name, {})[label] = amount
        reported = {name: list(values) for name, values in samples.items()}
        return cls(data={"counters": counters, "samples": reported, "gauges": dict(gauges or {})})

    @classmethod
    def of_results(cls, results: StepResults, labels: PeerLabels) -> FerryStats | None:
        """Statistics of a worker's step; None if there are none. They may share the samples of the results' records."""
        counters, samples = _of_records(results.load_records, labels) if results.load_records else ({}, {})
        if results.failed:
            counters.update(_failures(results.failed.values()))
        numbers = _numbers_of(results)
        if any(numbers):
            counters.update({name: {"": number} for name, number in zip(_NUMBERS, numbers, strict=True) if number})
        if results.handshake_s:
            samples["handshake_s"] = list(results.handshake_s)
        if not counters and not samples:
            return None
        return cls(data={"counters": counters, "samples": samples, "gauges": {}})

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "samples": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        _add(self.data.setdefault("counters", {}), other.data.get("counters", {}))
        for name, values in other.data.get("samples", {}).items():
            self.data.setdefault("samples", {}).setdefault(name, []).extend(values)
        self.data.setdefault("gauges", {}).update(other.data.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """A summary of the interval, for the log."""
        samples: dict[str, list[float]] = self.data.get("samples", {})
        counters: dict[str, dict[str, float]] = self.data.get("counters", {})
        reported: dict[str, int | float] = {
            name: round(sum(by_label.values()), 6) for name, by_label in sorted(counters.items())
        }
        for name, values in sorted(samples.items()):
            if values:
                reported[f"{name} mean"] = round(sum(values) / len(values), 6)
        gauges: dict[str, float] = self.data.get("gauges", {})
        return {**reported, **gauges}

    def is_empty(self) -> bool:
        return not any(self.data.get(kind) for kind in ("counters", "samples", "gauges"))


_NUMBERS = {
    "failed_notifications": "undelivered",
    "bad_notifications": "bad_notifications",
    "late_notifications": "late_notifications",
    "quarantined_loads": "quarantined_loads",
    "quarantined_blocks": "quarantined_blocks",
    "graces_over": "graces_over",
    "integrity_errors": "integrity_errors",
    "lost_orders": "lost_orders",
}
"""Counters that are attributes of a step's results: attribute by metric."""
_numbers_of = attrgetter(*_NUMBERS.values())


def _failures(failed: Iterable[FailureReason]) -> LabelledCounts:
    """Counters of loads that are reported as failed."""
    reasons = [reason.value for reason in failed]
    return {"failed_transfers": {"": len(reasons)}, "failed_loads": dict(Counter(reasons))}


def _of_records(records: Sequence[LoadRecord], labels: PeerLabels) -> tuple[LabelledCounts, Samples]:
    """Counters and samples of ended loads. Most steps have at most one; its metrics are passed on without a copy."""
    if len(records) == 1 and (metrics := records[0].metrics) is not None:
        return {**metrics.counters, **_of_peer(records[0], labels)}, metrics.samples
    counters: LabelledCounts = {}
    samples: Samples = {}
    for load in records:
        _add(counters, _of_peer(load, labels))
        if load.metrics is not None:
            _add(counters, load.metrics.counters)
            for name, values in load.metrics.samples.items():
                samples.setdefault(name, []).extend(values)
    return counters, samples


def _of_peer(load: LoadRecord, labels: PeerLabels) -> LabelledCounts:
    """The per-producer counters of an ended load."""
    totals = load.totals
    peer = labels.of(load.source, is_good=totals is not None)
    if totals is None:
        return {"peer_failed_loads": {peer: 1}}
    return {
        "peer_loads": {peer: 1},
        "peer_bytes": {peer: totals.planned_bytes},
        "peer_load_s": {peer: totals.load_s},
    }


def _add(counters: LabelledCounts, more: Mapping[str, Mapping[str, float]]) -> None:
    """Add `more` to `counters`, in place."""
    for name, by_label in more.items():
        ours = counters.setdefault(name, {})
        for label, amount in by_label.items():
            ours[label] = ours.get(label, 0) + amount
