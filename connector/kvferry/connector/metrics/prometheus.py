"""kvferry's metrics in the engine's own `/metrics`: the tables of `metrics.tables` as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.connector.config import MAX_PEER_LABELS
from kvferry.connector.metrics.tables import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    OTHER_PEERS,
    PEER,
    Metric,
)


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
        # By engine, metric and value of its label.
        self._children: dict[tuple[int, str, str], Any] = {}
        self._counters_by_peer: dict[str, Any] = {}
        self._peers_with_label: dict[tuple[int, str], set[str]] = {}
        self._create(COUNTERS, self._counter_cls, labelnames)
        self._create(
            GAUGES, self._gauge_cls, labelnames, multiprocess_mode="mostrecent"
        )
        self._create(HISTOGRAMS, self._histogram_cls, labelnames)

    def _create(
        self,
        specs: Mapping[str, Metric],
        metric_class: Any,
        labelnames: list[str],
        **options: Any,
    ) -> None:
        for name, spec in specs.items():
            if spec.buckets:
                options["buckets"] = list(spec.buckets)
            labels = list(labelnames)
            if spec.label:
                labels.append(spec.label)
            metric = metric_class(
                name=f"vllm:{spec.exported}",
                documentation=spec.doc,
                labelnames=labels,
                **options,
            )
            if spec.label == PEER:
                self._counters_by_peer[name] = metric
            # All known children exist from the start, so a counter is 0 before its first event, not absent.
            for engine, engine_values in self.per_engine_labelvalues.items():
                if not spec.label:
                    self._children[engine, name, ""] = metric.labels(*engine_values)
                for value in spec.values:
                    self._children[engine, name, value] = metric.labels(
                        *engine_values, value
                    )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's statistics. Metrics that are not in the tables, e.g. of a newer worker, are ignored."""
        for name, by_label in transfer_stats_data.get("counters", {}).items():
            for label, amount in by_label.items():
                self._count(engine_idx, name, label, amount)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            gauge = self._children.get((engine_idx, name, ""))
            if gauge is not None:
                gauge.set(value)
        for name, values in transfer_stats_data.get("samples", {}).items():
            histogram = self._children.get((engine_idx, name, ""))
            if histogram is not None:
                for value in values:
                    histogram.observe(value)

    def _count(self, engine: int, name: str, label: str, amount: float) -> None:
        child = self._children.get((engine, name, label))
        if child is None:
            child = self._child_of_peer(engine, name, label)
        if child is None:
            return
        child.inc(amount)
        if name == "leases_released" and label == "expired":
            # Also under the name that vLLM's own connector counts it by.
            self._children[engine, "expired", ""].inc(amount)

    def _child_of_peer(self, engine: int, name: str, label: str) -> Any:
        """The child of a producer, created if needed; None for an unknown metric or engine."""
        counter = self._counters_by_peer.get(name)
        engine_values = self.per_engine_labelvalues.get(engine)
        if counter is None or engine_values is None:
            return None
        with_label = self._peers_with_label.setdefault((engine, name), set())
        # Workers bound their labels too. This bound is the front end's own: a child is never removed.
        if len(with_label) >= MAX_PEER_LABELS:
            return self._children[engine, name, OTHER_PEERS]
        with_label.add(label)
        child = counter.labels(*engine_values, label)
        self._children[engine, name, label] = child
        return child
