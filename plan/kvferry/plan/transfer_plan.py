"""The transfer plan of one consumer worker and one producer engine: a frozen value, computed once per peer."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import Source
from kvferry.plan.tokens import TokenMap, shared_part
from kvferry.protocol.geometry import PagedTensor, Place, Range


class Placing(str, enum.Enum):
    """How bytes are put in place."""

    DIRECT = "direct"
    """NIXL reads them into place."""
    STAGED = "staged"
    """NIXL reads them into a staging pool, from which a kernel puts them in place."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one paged tensor that a route reads.

    Attributes:
        local, remote: the tensor on each side.
        heads: the global heads that are read.
        tokens: how the tokens correspond.
        placing, reason: how the bytes are put in place, and why.
        run_bytes: contiguous bytes of one descriptor, merged with other slices.
        unit_runs: this slice's portion of the descriptors of one unit.
    """

    local: PagedTensor
    remote: PagedTensor
    heads: Range
    tokens: TokenMap
    placing: Placing
    reason: str
    run_bytes: int
    unit_runs: float

    @property
    def token_bytes(self) -> float:
        """Bytes in the consumer worker's cache per token of a prompt; 0 for a recurrent state."""
        if self.tokens.is_state:
            return 0.0
        part = shared_part(self.tokens.local.share, self.tokens.remote.share)
        return part * len(self.heads) * self.local.cell_bytes / self.local.tile_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes per request of a recurrent state; 0 for everything else."""
        return len(self.heads) * self.local.tiles * self.local.cell_bytes if self.tokens.is_state else 0


@dataclass(frozen=True, slots=True)
class Route:
    """All reads from one producer worker.

    Attributes:
        worker: index of the worker in the producer's description.
        place: its place.
        slices: the reads; empty if the worker is only notified that its copy is not needed.
        bundles: the slices merged into the runs that both sides share; `members` index `slices`.
        sources: the staged reads, in the runs of the producer.
        expected: number of consumer workers that report `done` to this producer worker.
    """

    worker: int
    place: Place
    slices: tuple[Slice, ...]
    bundles: tuple[Bundle, ...]
    sources: tuple[Source, ...]
    expected: int

    def placing_of(self, bundle: Bundle) -> Placing:
        """How a bundle of this route is placed."""
        return self.slices[bundle.members[0][0]].placing

    @property
    def unit_descriptors(self) -> float:
        """Descriptors for one unit of every group; those of whole blocks are divided by their units."""
        direct = sum(one.unit_runs for one in self.bundles if self.placing_of(one) is Placing.DIRECT)
        return direct + sum(source.unit_descriptors for source in self.sources)

    def describe(self) -> str:
        """The route in one phrase: tensors, bytes, runs and placing."""
        if not self.slices:
            return f"releases {self.place}"
        parts = [f"{len(self.slices)} tensors"]
        held = [item.heads for item in self.slices if not item.tokens.is_state]
        if held:
            first, last = min(heads.start for heads in held), max(heads.stop for heads in held) - 1
            parts.append(f"heads {first}…{last}" if first < last else f"head {first}")
        parts.append(f"{sum(item.token_bytes for item in self.slices):g} B/token")
        if state_bytes := sum(item.state_bytes for item in self.slices):
            parts.append(f"{state_bytes} B/request")
        units = sorted({bundle.tokens.unit_tokens for bundle in self.bundles if not bundle.tokens.is_state})
        parts.append("+".join(sorted({item.placing.value for item in self.slices})))
        runs = f"runs of {_lengths(bundle.run_bytes for bundle in self.bundles)} B"
        if self.sources:
            runs += f" read in runs of {_lengths(source.bundle.run_bytes for source in self.sources)} B"
        parts.append(runs)
        if units:
            parts.append(f"units of {'/'.join(str(unit) for unit in units)} tokens")
        parts.append(f"{self.unit_descriptors:g} descriptors a unit")
        return f"reads {self.place}: " + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The reads of one consumer worker.

    Attributes:
        producer: engine id of the producer.
        place: the consumer worker's place.
        worker: the consumer worker's index in its engine.
        routes: one per producer worker to be read from or notified.
    """

    producer: str
    place: Place
    worker: int
    routes: tuple[Route, ...]

    def describe(self) -> str:
        """The plan in one line, for the log: producer, places, bytes and runs."""
        routes = "; ".join(route.describe() for route in self.routes) or "needs nothing"
        return f"plan producer={self.producer} {self.place} {routes}"


def _lengths(found: Iterable[int]) -> str:
    """The shortest and the longest length, as text."""
    lengths = sorted(found)
    return f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]}…{lengths[-1]}"
