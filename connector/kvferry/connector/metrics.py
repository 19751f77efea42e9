"""kvferry's figures in the engine's own `/metrics`.

Where the meaning is that of vLLM's NixlConnector, so is the name: dashboards carry over. One table says everything;
statistics travel from workers and scheduler to the front end as plain counters and samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.protocol.orders import FailureReason
from kvferry.scheduler.tally import CounterKey
from kvferry.worker.results import StepResults

_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(float(1 << power) for power in range(14, 37, 2))
_COUNTS = tuple(float(1 << power) for power in range(0, 21, 2))

RECOMPUTE_REASONS = (
    "foreign_params",
    "invalid_params",
    "other_prompt",
    "lease_in_use",
    "own_engine",
    "prompt_embeds",
    "window_edge",
    "wrong_role",
    "turns_off",
    "below_threshold",
    "not_wanted",
    "load_failed",
)
RELEASE_WAYS = ("done", "release", "expired", "abandoned", "reset")
TURN_RELEASE_WAYS = (*RELEASE_WAYS, "room")


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """A counter. `values` are the label's possible values; () for a counter without a label."""

    exported: str
    doc: str
    label: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """A histogram."""

    exported: str
    doc: str
    buckets: tuple[float, ...]


COUNTERS: Mapping[str, CounterSpec] = {
    "loads": CounterSpec("kvferry_loads", "Prompts ordered to be loaded from another engine."),
    "turn_loads": CounterSpec("kvferry_turn_loads", "Those of them that read a last turn from its decoder."),
    "planned_bytes": CounterSpec("kvferry_planned_bytes", "Bytes of good loads by the transfer plan."),
    "local_recomputes": CounterSpec(
        "kvferry_local_recomputes",
        "Prompts that came with params of a remote prefill or of a last turn and were computed here instead.",
        "reason",
        RECOMPUTE_REASONS,
    ),
    "failed_requests": CounterSpec(
        "kvferry_failed_requests", "Requests that vLLM ended with an error because their load failed (policy `fail`)."
    ),
    "failed_loads": CounterSpec(
        "kvferry_failed_loads",
        "Loads that failed, by worker and reason.",
        "reason",
        tuple(reason.value for reason in FailureReason),
    ),
    "failed_transfers": CounterSpec("nixl_num_failed_transfers", "Loads that failed, by worker."),
    "failed_notifications": CounterSpec("nixl_num_failed_notifications", "Notifications that could not be sent."),
    "expired": CounterSpec("nixl_num_kv_expired_reqs", "Leases that ran out before their blocks were read."),
    "late_notifications": CounterSpec(
        "nixl_num_notifications_after_expiry", "Notifications about leases that were over."
    ),
    "bad_notifications": CounterSpec("kvferry_bad_notifications", "Notifications that were not kvferry's."),
    "leases_opened": CounterSpec("kvferry_leases_opened", "Leases opened for prompts to be decoded elsewhere."),
    "leases_refused": CounterSpec("kvferry_leases_refused", "Prompts served without a lease: no slot was free."),
    "prefills_kept": CounterSpec(
        "kvferry_prefills_kept",
        "Prompts to be decoded elsewhere that cannot be: streamed, of embeddings, or without the tokens to leave out.",
    ),
    "leases_released": CounterSpec("kvferry_leases_released", "Leases that are over, and how.", "how", RELEASE_WAYS),
    "turns_opened": CounterSpec("kvferry_turns_opened", "Leases opened for answers that may be offered."),
    "turns_refused": CounterSpec("kvferry_turns_refused", "Answers that will not be offered: no slot was free."),
    "turns_offered": CounterSpec("kvferry_turns_offered", "Answers offered to the next turn."),
    "turns_released": CounterSpec(
        "kvferry_turns_released",
        "Turns that are held no more, and how; `abandoned` ones were never offered, `room` was needed by others.",
        "how",
        TURN_RELEASE_WAYS,
    ),
    "leases_given_back": CounterSpec("kvferry_leases_given_back", "Leases of other engines given back unread."),
    "heartbeats": CounterSpec("kvferry_heartbeats", "Renewals of other engines' leases."),
    "renewals_unknown": CounterSpec("kvferry_unknown_renewals", "Renewals of leases that are over or never were."),
    "releases_unknown": CounterSpec("kvferry_unknown_releases", "Releases of leases that are over or never were."),
    "handshakes_served": CounterSpec("kvferry_handshakes_served", "Descriptions given to other engines."),
    "dropped_messages": CounterSpec(
        "kvferry_dropped_messages", "Renewals and releases that came faster than this engine took them."
    ),
    "bad_frames": CounterSpec("kvferry_bad_frames", "Messages on the side channel that could not be used."),
    "side_channel_errors": CounterSpec("kvferry_side_channel_errors", "Messages that the side channel could not send."),
}

HISTOGRAMS: Mapping[str, HistogramSpec] = {
    "transfer_s": HistogramSpec("nixl_xfer_time_seconds", "Time of a load's transfers as NIXL measured it.", _SECONDS),
    "post_s": HistogramSpec("nixl_post_time_seconds", "Time to post a load's transfers as NIXL measured it.", _SECONDS),
    "transferred_bytes": HistogramSpec("nixl_bytes_transferred", "Bytes of a load as NIXL counted them.", _BYTES),
    "descriptors": HistogramSpec("nixl_num_descriptors", "Descriptors of a load as NIXL counted them.", _COUNTS),
    "load_s": HistogramSpec("kvferry_load_seconds", "Time of a load from its order to its last byte.", _SECONDS),
    "handover_s": HistogramSpec(
        "kvferry_handover_seconds",
        "Time from a prompt's arrival here until its blocks were loaded.",
        _SECONDS,
    ),
}


class FerryStats(KVConnectorStats):
    """Counters by name and label, samples by name: `{"counters": {name: {label: n}}, "samples": {name: [x]}}`."""

    @classmethod
    def of_counts(cls, counts: Mapping[CounterKey, int], samples: Mapping[str, list[float]]) -> FerryStats | None:
        """Statistics of one step; None when there is nothing to tell."""
        if not counts and not samples:
            return None
        counters: dict[str, dict[str, int]] = {}
        for (name, label), amount in counts.items():
            counters.setdefault(name, {})[label] = amount
        return cls(data={"counters": counters, "samples": {name: list(values) for name, values in samples.items()}})

    @classmethod
    def of_results(cls, results: StepResults) -> FerryStats | None:
        """What a worker's step tells."""
        counts: dict[CounterKey, int] = {}
        for reason in results.failed.values():
            counts["failed_loads", reason.value] = counts.get(("failed_loads", reason.value), 0) + 1
        for name, amount in (
            ("failed_transfers", len(results.failed)),
            ("failed_notifications", results.undelivered),
            ("bad_notifications", results.bad_notifications),
            ("late_notifications", results.late_notifications),
            ("planned_bytes", sum(figures.planned_bytes for figures in results.figures)),
        ):
            if amount:
                counts[name, ""] = amount
        samples = {
            name: [float(getattr(figures, name)) for figures in results.figures]
            for name in ("transfer_s", "post_s", "transferred_bytes", "descriptors", "load_s")
            if results.figures
        }
        return cls.of_counts(counts, samples)

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "samples": {}}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        for name, by_label in other.data.get("counters", {}).items():
            ours = self.data.setdefault("counters", {}).setdefault(name, {})
            for label, amount in by_label.items():
                ours[label] = ours.get(label, 0) + amount
        for name, values in other.data.get("samples", {}).items():
            self.data.setdefault("samples", {}).setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in a few figures, for the log."""
        samples: dict[str, list[float]] = self.data.get("samples", {})
        counters: dict[str, dict[str, int]] = self.data.get("counters", {})
        told: dict[str, int | float] = {name: sum(by_label.values()) for name, by_label in sorted(counters.items())}
        for name, values in sorted(samples.items()):
            if values:
                told[f"{name} mean"] = round(sum(values) / len(values), 6)
        return told

    def is_empty(self) -> bool:
        return not self.data.get("counters") and not self.data.get("samples")


class FerryPromMetrics(KVConnectorPromMetrics):
    """The tables above as Prometheus metrics, one child per engine and label value, all made at start."""

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
        for name, spec in COUNTERS.items():
            labels = [*labelnames, spec.label] if spec.label else labelnames
            counter = self._counter_cls(name=f"vllm:{spec.exported}", documentation=spec.doc, labelnames=labels)
            for engine, values in per_engine_labelvalues.items():
                for label in spec.values or ("",):
                    child = counter.labels(*values, *((label,) if spec.label else ()))
                    self._counters[engine, name, label] = child
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
        """Record one step's statistics. What is not in the tables, e.g. from a newer worker, is left out."""
        for name, by_label in transfer_stats_data.get("counters", {}).items():
            for label, amount in by_label.items():
                child = self._counters.get((engine_idx, name, label))
                if child is None:
                    continue
                child.inc(amount)
                if (name, label) == ("leases_released", "expired"):
                    self._counters[engine_idx, "expired", ""].inc(amount)
        for name, values in transfer_stats_data.get("samples", {}).items():
            histogram = self._histograms.get((engine_idx, name))
            if histogram is not None:
                for value in values:
                    histogram.observe(value)
