"""Reads in the producer's shape: the runs that go to the staging pool, and their relayout from there into the caches.

A *source* is a bundle of runs on the producer. For one source unit (a unit, or a whole block) each of its runs fills
one chunk of the pool, of exactly the run's bytes. A *placement* describes the copies from such chunks into the caches:
for every piece, the run whose chunk holds it, its offset in the chunk, its address in the cache at block 0, position 0,
and the axes that chunk and cache have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.plan.cost import ReadOption
from kvferry.plan.run_merger import producer_runs
from kvferry.plan.runs import (
    MAX_DESCRIPTORS,
    Bundle,
    ReadExtent,
    RunAxis,
    TensorSlice,
    grid,
)
from kvferry.plan.tokens import TokenMap


class Unplaceable(Exception):
    """The producer's runs have an axis that the places lack: its cells overlap."""


class Piece(NamedTuple):
    """One piece: `offset` bytes from the start of the chunk of run `run`; copied to `local_base`.

    `scales` are the producer's and the consumer's, if there is a conversion.
    """

    run: int
    offset: int
    local_base: int
    scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Pieces with the same axes and strides.

    Attributes:
        run: contiguous length in the chunk and in the cache: bytes, or elements if there is a conversion.
        axes: the loops around a run; the remote strides are those inside a chunk.
        block_stride, position_stride: from one local unit to the next.
        source_position_stride: from one unit to the next inside a chunk that holds a whole block, else 0.
        pieces: their places.
        dtypes: the producer's and the consumer's, if there is a conversion.
    """

    run: int
    axes: tuple[RunAxis, ...]
    block_stride: int
    position_stride: int
    source_position_stride: int
    pieces: tuple[Piece, ...]
    dtypes: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class StagedSource:
    """Runs on the producer, and the places of their bytes.

    Attributes:
        tokens: how the tokens correspond; defines the units of the placements.
        reading: the part of a block that is read.
        bundle: the runs; run `r` of place `i` and combination `c` of its axes is number `i·combinations + c`.
        placements: the places of the bytes.
    """

    tokens: TokenMap
    reading: ReadExtent
    bundle: Bundle
    placements: tuple[Placement, ...]

    @property
    def whole_blocks(self) -> bool:
        return self.reading is not ReadExtent.UNITS and not self.tokens.is_state

    @property
    def unit_bytes(self) -> int:
        """Bytes of the pool that one source unit takes."""
        return self.bundle.unit_bytes

    @property
    def unit_descriptors(self) -> float:
        """Descriptors of one unit; if whole blocks are read, its portion of a block's."""
        if not self.whole_blocks:
            return self.bundle.unit_runs
        return self.bundle.unit_runs / self.tokens.positions(self.tokens.remote)


def differs(part: TensorSlice, reading: ReadExtent) -> bool:
    """True if this reading of a part differs from those before it in `ReadExtent`."""
    if reading is ReadExtent.UNITS:
        return True
    if reading is ReadExtent.BLOCKS:
        return (
            not part.tokens.is_state
            and part.tokens.unit_tokens < part.remote.block_tokens
        )
    return len(part.heads) < len(part.remote.heads)


MAX_RUNS = 8192
"""Runs of a source, at most: the relayout of a wave has a table with a row for every piece."""


def read_options(
    parts: Sequence[TensorSlice],
    indices: Sequence[int],
    reading: ReadExtent,
    max_run_bytes: int,
) -> Mapping[int, ReadOption]:
    """The cost of reading each of the parts with these indices in the producer's shape, for one unit of its token map.

    Parts that cannot be read this way, or only in runs of more than `max_run_bytes`, or in more runs or descriptors
    than `MAX_RUNS` and `MAX_DESCRIPTORS`, are left out.
    """
    options: dict[int, ReadOption] = {}
    for bundle in producer_runs([parts[index] for index in indices], reading):
        # A run is one chunk of the pool, which no wave divides.
        if bundle.run_bytes > max_run_bytes or bundle.unit_runs > MAX_RUNS:
            continue
        # The rows are prepared once for the producer's whole cache, whatever a request reads of it.
        if _descriptors(bundle) > MAX_DESCRIPTORS:
            continue
        for positions in bundle.members:
            members = [indices[position] for position in positions]
            if not all(
                _has_surplus_inside(parts[member], bundle, reading)
                for member in members
            ):
                continue
            for member in members:
                units = _needed_units_of_block(parts[member], reading)
                runs = bundle.runs_per_place / len(members) / units
                options[member] = ReadOption(runs * bundle.run_bytes, runs)
    return options


def sources(
    parts: Sequence[TensorSlice],
    bundles: Sequence[Bundle],
    reading_of_part: Mapping[int, ReadExtent],
) -> tuple[StagedSource, ...]:
    """The sources of the parts that are staged.

    Args:
        bundles: the parts as they are merged for both sides; their members index `parts`.
        reading_of_part: of the staged parts: the same for all parts of a bundle, and one that `read_options` returned.

    Raises:
        Unplaceable: the producer's cells overlap.
    """
    staged: list[StagedSource] = []
    for reading in ReadExtent:
        indices = [
            index
            for index in range(len(parts))
            if reading_of_part.get(index) is reading
        ]
        for source_bundle in producer_runs(
            [parts[index] for index in indices], reading
        ):
            place_of_part: dict[int, int] = {}
            for place, positions in enumerate(source_bundle.members):
                for position in positions:
                    place_of_part[indices[position]] = place
            # Parts whose tokens correspond in different ways may be alike on the producer: their
            # units differ, so each correspondence is a source of its own.
            for tokens in dict.fromkeys(parts[part].tokens for part in place_of_part):
                own = {
                    part: place
                    for part, place in place_of_part.items()
                    if parts[part].tokens == tokens
                }
                placements = _placements(bundles, source_bundle, own, reading)
                staged.append(StagedSource(tokens, reading, source_bundle, placements))
    return tuple(staged)


def _descriptors(bundle: Bundle) -> int:
    """Descriptors of the producer's rows, all blocks."""
    positions = bundle.tokens.positions(bundle.tokens.remote)
    return bundle.unit_runs * positions * bundle.remote_unit_stride.blocks


def _has_surplus_inside(part: TensorSlice, bundle: Bundle, reading: ReadExtent) -> bool:
    """True if the surplus bytes are inside the producer's runs; elsewhere they would only add runs."""
    if reading is ReadExtent.UNITS or part.tokens.is_state:
        return True
    remote = part.remote
    outer_loops = {(axis.steps, axis.remote_stride) for axis in bundle.axes}
    if remote.tiles > 1 and (remote.tiles, remote.tile_stride) in outer_loops:
        return False
    if reading is ReadExtent.BLOCKS or len(remote.heads) == 1:
        return True
    return (len(remote.heads), remote.head_stride) not in outer_loops


def _needed_units_of_block(part: TensorSlice, reading: ReadExtent) -> float:
    """Needed units of a producer's block, which share the cost of reading it."""
    if reading is ReadExtent.UNITS or part.tokens.is_state:
        return 1.0
    units = part.tokens.positions(part.tokens.remote)
    local_share = part.tokens.local.share
    if local_share == part.tokens.remote.share:
        return units
    # Of a producer's block this worker needs the tokens of its own rank.
    return units / local_share.ranks


def _placements(
    bundles: Sequence[Bundle],
    source: Bundle,
    place_of_part: Mapping[int, int],
    reading: ReadExtent,
) -> tuple[Placement, ...]:
    """The placements of a source.

    Args:
        place_of_part: the place of each part in the source.
    """
    placements: list[Placement] = []
    for bundle in bundles:
        if not any(members[0] in place_of_part for members in bundle.members):
            continue
        outer_axes = _axes_of_runs(source.axes, bundle.axes)
        source_position_stride = 0
        if reading is not ReadExtent.UNITS and not bundle.tokens.is_state:
            source_position_stride = bundle.remote_unit_stride.position_stride
        placement = Placement(
            run=bundle.run,
            axes=tuple(axis for axis in bundle.axes if axis not in outer_axes),
            block_stride=bundle.local_unit_stride.block_stride,
            position_stride=bundle.local_unit_stride.position_stride,
            source_position_stride=source_position_stride,
            pieces=tuple(_pieces(bundle, source, outer_axes, place_of_part)),
            dtypes=bundle.dtypes,
        )
        placements.append(placement)
    return tuple(placements)


def _pieces(
    bundle: Bundle,
    source: Bundle,
    outer_axes: Sequence[RunAxis],
    place_of_part: Mapping[int, int],
) -> list[Piece]:
    """The pieces of one bundle in a source: one for each place and each run of the source there."""
    combinations = grid([axis.steps for axis in outer_axes]).T
    strides = np.array([axis.local_stride for axis in outer_axes], dtype=np.int64)
    run_offsets = [int(strides @ combination) for combination in combinations]
    pieces: list[Piece] = []
    for index, members in enumerate(bundle.members):
        place = place_of_part.get(members[0])
        if place is None:
            continue
        local_base, remote_base = bundle.bases[index]
        _, source_base = source.bases[place]
        scales = (1.0, 1.0)
        if bundle.conversions:
            conversion = bundle.conversions[index]
            scales = (conversion.remote_scale, conversion.local_scale)
        first_run = place * source.runs_per_place
        pieces += [
            Piece(
                first_run + number,
                remote_base - source_base,
                local_base + run_offset,
                scales,
            )
            for number, run_offset in enumerate(run_offsets)
        ]
    return pieces


def _axes_of_runs(
    of_source: Sequence[RunAxis], of_places: Sequence[RunAxis]
) -> list[RunAxis]:
    """The axes of a source's runs, as the places have them; their combinations are numbered as those of the runs.

    Raises:
        Unplaceable: the places do not have an axis.
    """
    axes: list[RunAxis] = []
    left = list(of_places)
    for steps, _, stride in of_source:
        equal = _equal_axes(steps, stride, left)
        # Each once: where a producer's cells overlap, two axes may be alike on its side. One taken for both left the
        # runs' chunks, and the blocks of the request.
        for axis in equal:
            left.remove(axis)
        axes += equal
    return axes


def _equal_axes(steps: int, stride: int, of_places: Sequence[RunAxis]) -> list[RunAxis]:
    """The one or two axes of the places that are this axis on the producer, the outer one first."""
    for axis in of_places:
        if axis.steps == steps and axis.remote_stride == stride:
            return [axis]
    # One axis of the source may be two axes of the places, if their elements are longer: 4 elements
    # 6 bytes apart are 2 pairs 12 bytes apart, of 2 elements each.
    for inner in of_places:
        for outer in of_places:
            continues = outer.remote_stride == stride * inner.steps
            if outer is inner or inner.remote_stride != stride or not continues:
                continue
            if outer.steps * inner.steps == steps:
                return [outer, inner]
    raise Unplaceable
