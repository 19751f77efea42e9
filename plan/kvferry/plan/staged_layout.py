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
from kvferry.plan.runs import MAX_DESCRIPTORS, Bundle, Reading, RunAxis, TensorSlice, grid
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
    reading: Reading
    bundle: Bundle
    placements: tuple[Placement, ...]

    @property
    def whole_blocks(self) -> bool:
        return self.reading is not Reading.UNITS and not self.tokens.is_state

    @property
    def unit_bytes(self) -> int:
        """Bytes of the pool that one source unit takes."""
        return self.bundle.unit_bytes

    @property
    def unit_descriptors(self) -> float:
        """Descriptors of one unit; if whole blocks are read, its portion of a block's."""
        return self.bundle.unit_runs / (
            self.tokens.positions(self.tokens.remote) if self.whole_blocks else 1
        )


def differs(part: TensorSlice, reading: Reading) -> bool:
    """Whether this reading of a part differs from those before it in `Reading`."""
    if reading is Reading.BLOCKS:
        return not part.tokens.is_state and part.tokens.unit_tokens < part.remote.block_tokens
    return reading is Reading.UNITS or len(part.heads) < len(part.remote.heads)


MAX_RUNS = 8192
"""Most runs of a source: the relayout of a wave has a table with a row for every piece."""


def read_options(
    parts: Sequence[TensorSlice], indices: Sequence[int], reading: Reading, most_bytes: int
) -> Mapping[int, ReadOption]:
    """The cost of reading each of the parts with these indices in the producer's shape, for one unit of its token map.

    Parts that cannot be read this way, or only in runs of more than `most_bytes`, or in more runs or descriptors than
    `MAX_RUNS` and `MAX_DESCRIPTORS`, are left out.
    """
    found: dict[int, ReadOption] = {}
    for one in producer_runs([parts[index] for index in indices], reading):
        if (
            one.run_bytes > most_bytes
            or one.unit_runs > MAX_RUNS
            or _descriptors(one) > MAX_DESCRIPTORS
        ):
            continue
        for places in one.members:
            members = [indices[place] for place in places]
            if not all(_fits(parts[member], one, reading) for member in members):
                continue
            for member in members:
                runs = one.runs_per_place / len(members) / _units_of_block(parts[member], reading)
                found[member] = ReadOption(runs * one.run_bytes, runs)
    return found


def sources(
    parts: Sequence[TensorSlice], bundles: Sequence[Bundle], chosen: Mapping[int, Reading]
) -> tuple[StagedSource, ...]:
    """The sources of the parts that are staged.

    Args:
        bundles: the parts as they are merged for both sides; their members index `parts`.
        chosen: per staged part its reading: the same for all parts of a bundle, and one that `read_options` returned.
    """
    found: list[StagedSource] = []
    for reading in Reading:
        members = [index for index in range(len(parts)) if chosen.get(index) is reading]
        for one in producer_runs([parts[index] for index in members], reading):
            places = {
                members[member]: place for place, of in enumerate(one.members) for member in of
            }
            for tokens in dict.fromkeys(parts[member].tokens for member in places):
                own = {
                    member: place
                    for member, place in places.items()
                    if parts[member].tokens == tokens
                }
                found.append(
                    StagedSource(tokens, reading, one, _placements(bundles, one, own, reading))
                )
    return tuple(found)


def _descriptors(one: Bundle) -> int:
    """Descriptors of the producer's rows, all blocks."""
    return one.unit_runs * one.tokens.positions(one.tokens.remote) * one.remote_unit_stride.blocks


def _fits(part: TensorSlice, one: Bundle, reading: Reading) -> bool:
    """Whether the surplus bytes are inside the producer's runs; elsewhere they would only add runs."""
    if reading is Reading.UNITS or part.tokens.is_state:
        return True
    outside, remote = {(axis.steps, axis.remote_stride) for axis in one.axes}, part.remote
    if (remote.tiles, remote.tile_stride) in outside and remote.tiles > 1:
        return False
    all_heads = (len(remote.heads), remote.head_stride)
    return reading is Reading.BLOCKS or len(remote.heads) == 1 or all_heads not in outside


def _units_of_block(part: TensorSlice, reading: Reading) -> float:
    """Needed units of a producer's block, which share the cost of reading it."""
    if reading is Reading.UNITS or part.tokens.is_state:
        return 1.0
    here, there = part.tokens.local.share, part.tokens.remote.share
    return part.tokens.positions(part.tokens.remote) / (
        1 if here.ranks == 1 or here == there else here.ranks
    )


def _placements(
    bundles: Sequence[Bundle], source: Bundle, places: Mapping[int, int], reading: Reading
) -> tuple[Placement, ...]:
    """The placements of a source; `places` is the place of each part in the source."""
    found = []
    for one in bundles:
        if not any(members[0] in places for members in one.members):
            continue
        across = _across(source.axes, one.axes)
        combinations = grid([axis.steps for axis in across]).T
        steps = np.array([axis.local_stride for axis in across], dtype=np.int64)
        pieces = []
        for index, ((local_base, remote_base), members) in enumerate(
            zip(one.bases, one.members, strict=True)
        ):
            if members[0] not in places:
                continue
            place = places[members[0]]
            offset = remote_base - source.bases[place][1]
            scales = one.conversions[index][2:] if one.conversions else (1.0, 1.0)
            pieces += [
                Piece(
                    place * source.runs_per_place + number,
                    offset,
                    local_base + int(steps @ combination),
                    scales,
                )
                for number, combination in enumerate(combinations)
            ]
        if pieces:
            whole = reading is not Reading.UNITS and not one.tokens.is_state
            placement = Placement(
                run=one.run,
                axes=tuple(axis for axis in one.axes if axis not in across),
                block_stride=one.local_unit_stride.block_stride,
                position_stride=one.local_unit_stride.position_stride,
                source_position_stride=one.remote_unit_stride.position_stride if whole else 0,
                pieces=tuple(pieces),
                dtypes=one.conversions[0][:2] if one.conversions else None,
            )
            found.append(placement)
    return tuple(found)


def _across(of_source: Sequence[RunAxis], of_places: Sequence[RunAxis]) -> list[RunAxis]:
    """The axes of a source's runs, as the places have them; their combinations are numbered as those of the runs.

    One axis of the source may be two axes of the places, if their elements are longer: 4 elements 6 bytes apart are
    2 pairs 12 bytes apart, of 2 elements each.

    Raises:
        Unplaceable: the places do not have an axis.
    """
    found: list[RunAxis] = []
    for steps, _, stride in of_source:
        whole = [
            (axis,) for axis in of_places if (axis.steps, axis.remote_stride) == (steps, stride)
        ]
        halves = [
            (outer, inner)
            for inner in of_places
            for outer in of_places
            if (inner.remote_stride, outer.remote_stride) == (stride, stride * inner.steps)
            and outer.steps * inner.steps == steps
        ]
        same = [*whole, *halves]
        if not same:
            raise Unplaceable
        found += same[0]
    return found
