"""kvferry's metrics in the engine's own `/metrics`: the tables of `metrics.tables` as Prometheus metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.connector.config import MAX_PEER_LABELS
from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS, OTHER_PEERS, PeerCounterSpec

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "FerryPromMetrics"]


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
        self._counters: dict[tuple[int, str, str], Any] = {}
        self._histograms: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], Any] = {}
        self._counters_by_peer: dict[str, Any] = {}
        self._named: dict[tuple[int, str], set[str]] = {}
        for name, spec in COUNTERS.items():
            labels = [*labelnames, spec.label] if spec.label else labelnames
            counter = self._counter_cls(name=f"vllm:{spec.exported}", documentation=spec.doc, labelnames=labels)
            if isinstance(spec, PeerCounterSpec):
                self._counters_by_peer[name] = counter
            for engine, values in per_engine_labelvalues.items():
                for label in spec.values or ("",):
                    child = counter.labels(*values, *((label,) if spec.label else ()))
                    self._counters[engine, name, label] = child
        for name, spec_g in GAUGES.items():
            gauge = self._gauge_cls(
                name=f"vllm:{spec_g.exported}",
                documentation=spec_g.doc,
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )
            for engine, values in per_engine_labelvalues.items():
                self._gauges[engine, name] = gauge.labels(*values)
        for name, spec_h in HISTOGRAMS.items():
            histogram = self._histogram_cls(
                name=f"vllm:{spec_h.exported}",
                documentation=spec_h.doc,
                buckets=list(spec_h.buckets),
                labelnames=labelnames,
            )
            for engine, values in per_engine_labelvalues.items():
                self._histograms[engine, name] = histogram.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's statistics. Metrics that are not in the tables, e.g. of a newer worker, are ignored."""
        for name, by_label in transfer_stats_data.get("counters", {}).items():
            for label, amount in by_label.items():
                child = self._counters.get((engine_idx, name, label)) or self._of_peer(engine_idx, name, label)
                if child is None:
                    continue
                child.inc(amount)
                if (name, label) == ("leases_released", "expired"):
                    self._counters[engine_idx, "expired", ""].inc(amount)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            gauge = self._gauges.get((engine_idx, name))
            if gauge is not None:
                gauge.set(value)
        for name, values in transfer_stats_data.get("samples", {}).items():
            histogram = self._histograms.get((engine_idx, name))
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
            return self._counters[engine, name, OTHER_PEERS]
        named.add(label)
        child = self._counters[engine, name, label] = counter.labels(*values, label)
        return child
