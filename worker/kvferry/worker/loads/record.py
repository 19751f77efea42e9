"""The record of one load, all that metrics, traces and logs say of it; and its story, which its errors tell."""

from __future__ import annotations

import msgspec

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.transitions import TableEnum
from kvferry.worker.fabric.port import TransferTelemetry
from kvferry.worker.loads.state import LoadEvent
from kvferry.worker.peers.peer import PeerKey


class Stage(TableEnum):
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


MAX_CHUNKS = 64
"""Most chunks of one record; further ones lengthen the last. A chunk is a step of the producer: a long prompt has
hundreds."""


class LoadRecord(msgspec.Struct, kw_only=True):
    """One load. The numbers of a failed one are those up to its failure.

    Attributes:
        request_id: of this engine.
        source: the producer.
        ordered_s: when the worker had the order, in seconds on its monotonic clock.
        stage: the present one, or that in which the load ended.
        ended_s: when each stage ended, on the same clock.
        reason: why it failed; None for a good load.
        planned_bytes, planned_descriptors: by the plan, which merges nothing; staged ones are more than arrive in the
            caches where whole blocks are read.
        transferred_bytes, descriptors: as counted by NIXL, which merges neighbours: a descriptor is a run of bytes
            that are contiguous on both sides.
        post_s, transfer_s: as measured by NIXL, summed over the reads.
        staged_bytes, waves: the part of the planned bytes that went through the staging pool, and its waves.
        mapped_bytes: the part of the planned bytes that was copied from the producer's mapped memory, without NIXL.
        relayout_s: from the end of each wave's read until it was found in place, summed; a part of `READING`.
        early_bytes: the part of the planned bytes that was read before the prefill had ended.
        restarts: times that it began anew, since the prefill was preempted.
        chunks: the reads of a prompt that was read while it was computed, at most `MAX_CHUNKS`: the token up to
            which each went, and its begin and end on the same clock.
    """

    request_id: str
    source: PeerKey
    ordered_s: float
    stage: Stage = Stage.QUEUED
    ended_s: dict[Stage, float] = {}
    reason: FailureReason | None = None
    planned_bytes: int = 0
    planned_descriptors: int = 0
    transferred_bytes: int = 0
    descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0
    staged_bytes: int = 0
    waves: int = 0
    mapped_bytes: int = 0
    relayout_s: float = 0.0
    early_bytes: int = 0
    restarts: int = 0
    chunks: tuple[tuple[int, float, float], ...] = ()

    def go_on(self, stage: Stage, now_s: float) -> None:
        """End the present stage and begin this one."""
        self.end(now_s)
        self.stage = stage

    def end(self, now_s: float) -> None:
        """End the present stage, the last one if the load has ended, well or badly."""
        self.ended_s[self.stage] = now_s

    def count(self, telemetry: TransferTelemetry | None) -> None:
        """Add a finished read; None where NIXL counted nothing."""
        if telemetry is None:
            return
        self.transferred_bytes += telemetry.bytes
        self.descriptors += telemetry.descriptors
        self.post_s += telemetry.post_us / 1e6
        self.transfer_s += telemetry.transfer_us / 1e6

    def add_chunk(self, stop_token: int, begun_s: float, ended_s: float) -> None:
        """Add the read of a part of the prompt, up to this token."""
        if len(self.chunks) == MAX_CHUNKS:
            begun_s = self.chunks[-1][1]
        self.chunks = (*self.chunks[: MAX_CHUNKS - 1], (stop_token, begun_s, ended_s))

    @property
    def load_s(self) -> float:
        """Seconds from the order to the last byte; 0 before the load has ended."""
        return self.ended_s.get(self.stage, self.ordered_s) - self.ordered_s

    def lasted_s(self) -> dict[Stage, float]:
        """Duration of each stage that has ended."""
        lasted_s: dict[Stage, float] = {}
        begun_s = self.ordered_s
        for stage, ended_s in self.ended_s.items():
            lasted_s[stage] = ended_s - begun_s
            begun_s = ended_s
        return lasted_s


_STORY_EVENTS = 12
"""Transitions that a story keeps: a streamed load is parked once a step of its producer, hundreds of times in all."""


class LoadStory:
    """The last events of one load and their times, for error texts and the log.

    The ends of stages are taken from the record when the story is told, so they cost nothing while the load runs.
    """

    __slots__ = ("_events", "_forgotten", "_record")

    def __init__(self, record: LoadRecord) -> None:
        self._record = record
        self._events: list[tuple[LoadEvent, float]] = []
        self._forgotten = 0

    def add(self, event: LoadEvent, now_s: float) -> None:
        """An event has happened now, by the record's clock."""
        if len(self._events) == _STORY_EVENTS:
            del self._events[0]
            self._forgotten += 1
        self._events.append((event, now_s))

    def __str__(self) -> str:
        """For example `begin 0.1 ms, connecting ended 0.2 ms, park 0.9 ms, failed 60001.0 ms`, since the order."""
        ended_s = self._record.ended_s
        events = [(at_s, f"{stage.value} ended") for stage, at_s in ended_s.items()]
        events += [(at_s, event.value) for event, at_s in self._events]
        # By time alone: a stage that ends with a transition stands before it.
        events.sort(key=lambda event: event[0])
        parts = [
            f"{text} {(at_s - self._record.ordered_s) * 1e3:.1f} ms"
            for at_s, text in events
        ]
        if self._forgotten:
            parts.insert(0, f"{self._forgotten} earlier events")
        return ", ".join(parts) or "no event since its order"
