"""The record of a load that is over: how it ended, when each stage ended, and what it adds to the worker's metrics.

It is made on the transfer thread as the load ends; the step thread only passes it on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.protocol.orders import FailureReason
from kvferry.worker.peers.peer import PeerKey


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """Totals of a good load: bytes, descriptors and times.

    Attributes:
        planned_bytes, planned_descriptors: by the plan, which merges nothing.
        transferred_bytes, descriptors: as counted by NIXL, which merges neighbours: a descriptor is a run of bytes
            that are contiguous on both sides.
        post_s, transfer_s: as measured by NIXL, summed over the routes.
        load_s: from the order to the last byte.
        staged_bytes, waves: the part of the planned bytes that went through the staging pool, and its waves.
    """

    planned_bytes: int
    planned_descriptors: int
    transferred_bytes: int
    descriptors: int
    post_s: float
    transfer_s: float
    load_s: float
    staged_bytes: int = 0
    waves: int = 0

    @property
    def run_bytes(self) -> float | None:
        """Mean length of a run; None where NIXL counted nothing."""
        return self.transferred_bytes / self.descriptors if self.descriptors else None


class Stage(enum.Enum):
    """The stages of a load, in order. A stage begins when the one before it has ended.

    Attributes:
        QUEUED: it waits for its turn.
        CONNECTING: it waits until its producer is connected and the device is done with the blocks' last owner.
        FENCE: it reads the lease's slots until the producer is ready.
        POSTING: its reads are prepared and posted; where a post copies, it lasts until the bytes are here.
        READING: its reads are under way, and staged bytes are put in place.
        FENCE_AGAIN: it reads the slots once more, while what was not loaded is zeroed.
    """

    QUEUED = "queued"
    CONNECTING = "connecting"
    FENCE = "fence"
    POSTING = "posting"
    READING = "reading"
    FENCE_AGAIN = "fence_again"


@dataclass(slots=True)
class StageTimes:
    """The stages of one load on the worker's monotonic clock, in seconds.

    Attributes:
        ordered_s: when the worker had the order.
        stage: the present one, or that in which the load ended.
        ended_s: when each stage ended.
        relayout_s: the part of `READING` in which waves were put in place, summed over waves.
    """

    ordered_s: float
    stage: Stage = Stage.QUEUED
    ended_s: dict[Stage, float] = field(default_factory=dict)
    relayout_s: float = 0.0

    def go_on(self, stage: Stage, now_s: float) -> None:
        """End the present stage and begin this one."""
        self.ended_s[self.stage] = now_s
        self.stage = stage

    def end(self, now_s: float) -> None:
        """End the present stage, because the load has ended, well or badly."""
        self.ended_s[self.stage] = now_s

    def lasted_s(self, stage: Stage) -> float | None:
        """Duration of a stage; None when it has not ended."""
        return self.all_lasted_s().get(stage)

    def all_lasted_s(self) -> dict[Stage, float]:
        """Duration of each stage that has ended."""
        lasted_s, begun_s = {}, self.ordered_s
        for stage, ended_s in self.ended_s.items():
            lasted_s[stage] = ended_s - begun_s
            begun_s = ended_s
        return lasted_s


_STAGES = (("queue_s", Stage.QUEUED), ("connecting_s", Stage.CONNECTING), ("fence_s", Stage.FENCE))


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The increments of one good load to its worker's metrics, by the metrics' keys.

    Attributes:
        counters: by metric and label value, which is empty where the metric has no label.
        samples: by metric.
    """

    counters: dict[str, dict[str, float]]
    samples: dict[str, list[float]]

    @classmethod
    def of(cls, totals: LoadTotals, times: StageTimes) -> LoadMetrics:
        """The metrics of a good load."""
        counters: dict[str, dict[str, float]] = {"placed_loads": {_placing(totals): 1}}
        if totals.planned_bytes:
            counters["planned_bytes"] = {"": totals.planned_bytes}
        if totals.planned_descriptors:
            counters["planned_descriptors"] = {"": totals.planned_descriptors}
        samples = {
            "transfer_s": [totals.transfer_s],
            "post_s": [totals.post_s],
            "transferred_bytes": [float(totals.transferred_bytes)],
            "descriptors": [float(totals.descriptors)],
            "load_s": [totals.load_s],
        }
        run_bytes = totals.run_bytes
        if run_bytes is not None:
            samples["run_bytes"] = [run_bytes]
        lasted_s = times.all_lasted_s()
        for name, stage in _STAGES:
            if stage in lasted_s:
                samples[name] = [lasted_s[stage]]
        if Stage.READING in lasted_s:
            samples["read_s"] = [lasted_s.get(Stage.POSTING, 0.0) + lasted_s[Stage.READING]]
        if totals.staged_bytes:
            counters["staged_bytes"] = {"": totals.staged_bytes}
            samples["relayout_s"] = [times.relayout_s]
        return cls(counters, samples)


def _placing(totals: LoadTotals) -> str:
    """The label of the metric `placed_loads`: whether the plan's bytes are staged, read in place, or both."""
    if not totals.planned_bytes:
        return "none"
    if not totals.staged_bytes:
        return "direct"
    return "staged" if totals.staged_bytes >= totals.planned_bytes else "mixed"


@dataclass(slots=True)
class LoadRecord:
    """A load that has ended, as the transfer thread reports it.

    Attributes:
        request_id: of this engine.
        source: the producer.
        times: when its stages ended.
        reason: why it failed; None for a good one.
        totals: of a good one.
        metrics: the increments of a good one to the worker's metrics.
    """

    request_id: str
    source: PeerKey
    times: StageTimes
    reason: FailureReason | None = None
    totals: LoadTotals | None = None
    metrics: LoadMetrics | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.totals is not None:
            self.metrics = LoadMetrics.of(self.totals, self.times)
