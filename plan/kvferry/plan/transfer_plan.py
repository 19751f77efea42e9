"""The transfer plan of one consumer worker and one producer engine: a frozen value, computed once per peer."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.plan.runs import Run
from kvferry.protocol.geometry import PagedTensor, Place, Range


class Placing(str, enum.Enum):
    """How the bytes get to their places."""

    DIRECT = "direct"
    """NIXL reads them there."""
    STAGED = "staged"
    """NIXL reads them into a staging pool, from which a kernel puts them in place."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one route reads of one paged tensor.

    Attributes:
        local, remote: the tensor on either side.
        heads: the global heads that are read.
        runs: contiguous runs of one block.
        placing: how they are put in place.
    """

    local: PagedTensor
    remote: PagedTensor
    heads: Range
    runs: tuple[Run, ...]
    placing: Placing = Placing.DIRECT

    @property
    def block_bytes(self) -> int:
        """Bytes that one block moves."""
        return sum(run.length for run in self.runs)


@dataclass(frozen=True, slots=True)
class Route:
    """Everything that is read from one producer worker.

    Attributes:
        worker: index of the worker in the producer's description.
        place: its place.
        slices: what is read; empty when the worker only has to be told that its copy is not needed.
        expected: how many consumer workers report `done` to this producer worker.
    """

    worker: int
    place: Place
    slices: tuple[Slice, ...]
    expected: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Who reads what from whom.

    Attributes:
        producer: engine id of the producer.
        place: the consumer worker's place.
        worker: the consumer worker's index in its engine.
        routes: one per producer worker to be read from or told.
    """

    producer: str
    place: Place
    worker: int
    routes: tuple[Route, ...]

    def describe(self) -> str:
        """The plan in one line, for the log: who reads from whom, how much and in what runs."""
        parts = []
        for route in self.routes:
            lengths = sorted({run.length for item in route.slices for run in item.runs})
            runs = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}…{lengths[-1]}" if lengths else "no"
            per_token = sum(item.block_bytes / item.local.block_tokens for item in route.slices)
            placing = "+".join(sorted({item.placing.value for item in route.slices})) or "release only"
            tensors = len(route.slices)
            descriptors = sum(len(item.runs) for item in route.slices)
            parts.append(
                f"{self.place} reads {route.place}: {tensors} tensors, {per_token:.0f} B/token, "
                f"{placing}, runs of {runs} B, {descriptors} descriptors a block"
            )
        return f"plan producer={self.producer} " + "; ".join(parts)
