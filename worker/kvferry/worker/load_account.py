"""What a good load adds to its worker's metrics, by the metrics' keys.

It is made on the transfer thread, as the load ends: the step thread only passes it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.worker.load_figures import LoadFigures
from kvferry.worker.load_times import LoadTimes, Stage

_STAGES = (("queue_s", Stage.QUEUED), ("meeting_s", Stage.MEETING), ("fence_s", Stage.FENCE))


@dataclass(frozen=True, slots=True)
class LoadAccount:
    """One load's.

    Attributes:
        counters: by metric and label value, which is empty where the metric has no label.
        samples: by metric.
    """

    counters: dict[str, dict[str, float]]
    samples: dict[str, list[float]]

    @classmethod
    def of(cls, figures: LoadFigures, times: LoadTimes) -> LoadAccount:
        """Of a load that has ended well."""
        counters: dict[str, dict[str, float]] = {"placed_loads": {_placing(figures): 1}}
        if figures.planned_bytes:
            counters["planned_bytes"] = {"": figures.planned_bytes}
        if figures.planned_descriptors:
            counters["planned_descriptors"] = {"": figures.planned_descriptors}
        samples = {
            "transfer_s": [figures.transfer_s],
            "post_s": [figures.post_s],
            "transferred_bytes": [float(figures.transferred_bytes)],
            "descriptors": [float(figures.descriptors)],
            "load_s": [figures.load_s],
        }
        run_bytes = figures.run_bytes
        if run_bytes is not None:
            samples["run_bytes"] = [run_bytes]
        lasted_s = times.all_lasted_s()
        for name, stage in _STAGES:
            if stage in lasted_s:
                samples[name] = [lasted_s[stage]]
        if Stage.READING in lasted_s:
            samples["read_s"] = [lasted_s.get(Stage.POSTING, 0.0) + lasted_s[Stage.READING]]
        if figures.staged_bytes:
            counters["staged_bytes"] = {"": figures.staged_bytes}
            samples["relayout_s"] = [times.relayout_s]
        return cls(counters, samples)


def _placing(figures: LoadFigures) -> str:
    """Where the plan has its bytes read to, as the metric has it."""
    if not figures.planned_bytes:
        return "none"
    if not figures.staged_bytes:
        return "direct"
    return "staged" if figures.staged_bytes >= figures.planned_bytes else "mixed"
