"""kvferry's metrics in the engine's own `/metrics`: the tables of `metrics.tables` as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.connector.config import MAX_PEER_LABELS
from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS, OTHER_PEERS, PEER, Metric


class FerryPromMetrics(KVConnectorPromMetrics):
    """One child per engine and label value, created at start; those of producers at their first load."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[tuple[int, str, str], Any] = {}
        self._counters_by_peer: dict[str, Any] = {}
        self._named: dict[tuple[int, str], set[str]] = {}
        self._create(COUNTERS, self._counter_cls, labelnames)
        self._create(GAUGES, self._gauge_cls, labelnames, multiprocess_mode="mostrecent")
        self._create(HISTOGRAMS, self._histogram_cls, labelnames)

    def _create(
        self, specs: Mapping[str, Metric], kind: Any, labelnames: list[str], **options: Any
    ) -> None:
        for name, spec in specs.items():
            if spec.buckets:
                options["buckets"] = list(spec.buckets)
            labels = [*labelnames, spec.label] if spec.label else labelnames
            metric = kind(
                name=f"vllm:{spec.exported}", documentation=spec.doc, labelnames=labels, **options
            )
            if spec.label == PEER:
                self._counters_by_peer[name] = metric
            for engine, values in self.per_engine_labelvalues.items():
                for label in spec.values or ("",):
                    child = metric.labels(*values, *((label,) if spec.label else ()))
                    self._children[engine, name, label] = child

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's statistics. Metrics that are not in the tables, e.g. of a newer worker, are ignored."""
        for name, by_label in transfer_stats_data.get("counters", {}).items():
            for label, amount in by_label.items():
                child = self._children.get((engine_idx, name, label)) or self._of_peer(
                    engine_idx, name, label
                )
                if child is None:
                    continue
                child.inc(amount)
                if (name, label) == ("leases_released", "expired"):
                    self._children[engine_idx, "expired", ""].inc(amount)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            gauge = self._children.get((engine_idx, name, ""))
            if gauge is not None:
                gauge.set(value)
        for name, values in transfer_stats_data.get("samples", {}).items():
            histogram = self._children.get((engine_idx, name, ""))
            if histogram is not None:
                for value in values:
                    histogram.observe(value)

    def _of_peer(self, engine: int, name: str, label: str) -> Any:
        """The child of a producer, created if needed; None for an unknown metric or engine."""
        counter, values = self._counters_by_peer.get(name), self.per_engine_labelvalues.get(engine)
        if counter is None or values is None:
            return None
        named = self._named.setdefault((engine, name), set())
        if len(named) >= MAX_PEER_LABELS:
            return self._children[engine, name, OTHER_PEERS]
        named.add(label)
        child = self._children[engine, name, label] = counter.labels(*values, label)
        return child
