"""When each stage of a load ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Stage(enum.Enum):
    """What a load does, in its order. A stage begins when the one before it has ended.

    Attributes:
        QUEUED: it waits for its turn.
        MEETING: it waits until its producer has been met, and the device is done with the blocks' last owner.
        FENCE: it reads the lease's slots until the producer is ready.
        POSTING: its reads are prepared and posted; where a post copies, it lasts until the bytes are here.
        READING: what it reads is under way, and what is staged is put in place.
        FENCE_AGAIN: it reads the slots once more, while what was not loaded is zeroed.
    """

    QUEUED = "queued"
    MEETING = "meeting"
    FENCE = "fence"
    POSTING = "posting"
    READING = "reading"
    FENCE_AGAIN = "fence_again"


@dataclass(slots=True)
class LoadTimes:
    """The stages of one load on the worker's monotonic clock, in seconds.

    Attributes:
        ordered_s: when the worker had the order.
        stage: what it does now, or did when it ended.
        ended_s: by stage, when it ended.
        relayout_s: of `READING` the time in which waves were put in place, summed over waves.
    """

    ordered_s: float
    stage: Stage = Stage.QUEUED
    ended_s: dict[Stage, float] = field(default_factory=dict)
    relayout_s: float = 0.0

    def go_on(self, stage: Stage, now_s: float) -> None:
        """The present stage has ended, and this one begins."""
        self.ended_s[self.stage] = now_s
        self.stage = stage

    def end(self, now_s: float) -> None:
        """The load has ended, well or badly."""
        self.ended_s[self.stage] = now_s

    def lasted_s(self, stage: Stage) -> float | None:
        """How long a stage took; None when it has not ended."""
        return self.all_lasted_s().get(stage)

    def all_lasted_s(self) -> dict[Stage, float]:
        """How long each stage took that has ended."""
        lasted_s, begun_s = {}, self.ordered_s
        for stage, ended_s in self.ended_s.items():
            lasted_s[stage] = ended_s - begun_s
            begun_s = ended_s
        return lasted_s
