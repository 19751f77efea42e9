"""Merging paged tensors into the longest runs that both sides share.

The bytes of one unit of one tensor are a strided run: axes (heads, tiles, the elements of a cell) around a contiguous
run. An axis whose strides equal the run's length on both sides is part of the run; two tensors whose runs are adjacent
on both sides (K and V of `[K|V]`, the layers of a blocks-first cache) are one. Both rules are applied until neither
changes anything. Each combination of the remaining axes is one descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvferry.plan.conversion import DtypeConversion
from kvferry.plan.runs import Bundle, Reading, RunAxis, TensorSlice, UnitStride
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.geometry import PagedTensor


def bundle(parts: Sequence[TensorSlice]) -> tuple[Bundle, ...]:
    """Merge parts into bundles; the indices of `members` are those of `parts`.

    Example: K and V of one layer, 2 heads, units of 4 tokens, cells of 8 bytes. If both sides have head stride 64,
    tile stride 16 and V 8 bytes after K, the result is one bundle with one run of 128 bytes. If the remote side
    has the tokens outermost (head stride 16, tile stride 32), K and V still merge, and 8 runs of 16 bytes remain.
    """
    merger = _RunMerger()
    strided_runs = [merger.strided_run(index, part) for index, part in enumerate(parts)]
    while True:
        joined = [
            strided
            for alike in _grouped(strided_runs, lambda strided: id(strided.loops))
            for strided in _join(alike)
        ]
        settled = len(joined) == len(strided_runs)
        strided_runs = [merger.grow(strided) for strided in joined]
        if settled:
            break
    return tuple(
        Bundle(
            tokens=alike[0].loops.tokens,
            run=alike[0].run,
            axes=alike[0].loops.axes,
            local_unit_stride=alike[0].loops.local_unit_stride,
            remote_unit_stride=alike[0].loops.remote_unit_stride,
            bases=tuple((strided.local_base, strided.remote_base) for strided in alike),
            members=tuple(strided.members for strided in alike),
            conversions=tuple(
                strided.conversion for strided in alike if strided.conversion is not None
            ),
        )
        for alike in _grouped(
            strided_runs,
            lambda strided: (
                id(strided.loops),
                strided.run,
                strided.conversion and strided.conversion[:2],
            ),
        )
    )


def producer_runs(parts: Sequence[TensorSlice], reading: Reading) -> tuple[Bundle, ...]:
    """The producer's own runs; both sides of these bundles describe the producer."""
    maps: dict[int, TokenMap] = {}
    return bundle([_producer_part(part, reading, maps) for part in parts])


class _Loops(NamedTuple):
    """Loop structure without the run."""

    tokens: TokenMap
    axes: tuple[RunAxis, ...]
    local_unit_stride: UnitStride
    remote_unit_stride: UnitStride
    items: tuple[int, int]


class _StridedRun(NamedTuple):
    loops: _Loops
    run: int
    local_base: int
    remote_base: int
    members: tuple[int, ...]
    conversion: DtypeConversion | None


class _RunMerger:
    """Makes strided runs. Equal loops are one object, found once per shape: layers differ only in their addresses."""

    def __init__(self) -> None:
        self._by_shape: dict[tuple[object, ...], tuple[_Loops, int]] = {}
        self._equal: dict[_Loops, _Loops] = {}
        self._grown: dict[tuple[int, int], tuple[_Loops, int]] = {}

    def strided_run(self, index: int, part: TensorSlice) -> _StridedRun:
        """The strided run of one part."""
        local, remote, heads, tokens, conversion = part
        shape = (local.shape, remote.shape, len(heads), id(tokens), conversion and conversion[:2])
        found = self._by_shape.get(shape)
        if found is None:
            found = self._by_shape[shape] = self._loops(part)
        return _StridedRun(
            *found,
            local.base + (heads.start - local.heads.start) * local.head_stride,
            remote.base + (heads.start - remote.heads.start) * remote.head_stride,
            (index,),
            conversion,
        )

    def grow(self, strided: _StridedRun) -> _StridedRun:
        """The strided run after absorbing every axis that continues its run."""
        key = (id(strided.loops), strided.run)
        found = self._grown.get(key)
        if found is None:
            axes, run = _absorb(strided.loops.axes, strided.run, strided.loops.items)
            found = self._grown[key] = (self._one(strided.loops._replace(axes=axes)), run)
        return (
            strided if found[1] == strided.run else strided._replace(loops=found[0], run=found[1])
        )

    def _loops(self, part: TensorSlice) -> tuple[_Loops, int]:
        local, remote, heads, tokens, conversion = part
        tiles = local.tiles if tokens.is_state else tokens.unit_tokens // local.tile_tokens
        items = conversion.items if conversion is not None else (1, 1)
        elements, contiguous = (
            _elements(local, remote) if conversion is None else _items(local, remote, items)
        )
        axes = [
            RunAxis(len(heads), local.head_stride, remote.head_stride),
            RunAxis(tiles, local.tile_stride, remote.tile_stride),
            *elements,
        ]
        merged, run = _absorb(axes, contiguous, items)
        local_unit_stride = _unit_stride(local, tiles, tokens.positions(tokens.local))
        remote_unit_stride = _unit_stride(remote, tiles, tokens.positions(tokens.remote))
        return self._one(_Loops(tokens, merged, local_unit_stride, remote_unit_stride, items)), run

    def _one(self, loops: _Loops) -> _Loops:
        return self._equal.setdefault(loops, loops)


def _unit_stride(tensor: PagedTensor, tiles: int, positions: int) -> UnitStride:
    """The unit stride of one side; 0 within a block that is one unit, so that tensors with another order of
    tokens (K as [D, N] beside V as [N, D]) can merge."""
    return UnitStride(
        tensor.block_stride, tiles * tensor.tile_stride if positions > 1 else 0, tensor.blocks
    )


def _elements(local: PagedTensor, remote: PagedTensor) -> tuple[list[RunAxis], int]:
    """The axes inside a cell, and the bytes that are contiguous on both sides with any strides.

    Element sizes are powers of two, so the smaller one divides the larger.
    """
    cell = local.cell_bytes
    here, there = local.element_bytes or cell, remote.element_bytes or cell
    if here == there == cell:
        return [], cell
    small, large = min(here, there), max(here, there)
    strides = [
        (tensor.element_stride if tensor.element_bytes else cell, tensor.element_bytes or cell)
        for tensor in (local, remote)
    ]
    # Elements of `large` bytes around pieces of `small`: each side's own stride where its elements are that small.
    outer = [stride if size == large else stride * (large // size) for stride, size in strides]
    inner = [stride if size == small else small for stride, size in strides]
    return [
        RunAxis(cell // large, outer[0], outer[1]),
        RunAxis(large // small, inner[0], inner[1]),
    ], small


def _items(
    local: PagedTensor, remote: PagedTensor, items: tuple[int, int]
) -> tuple[list[RunAxis], int]:
    """The axis of the elements of a converted cell, and a run of one element."""
    strides = [
        tensor.element_stride if tensor.element_bytes else item
        for tensor, item in zip((local, remote), items, strict=True)
    ]
    return [RunAxis(local.cell_bytes // items[0], strides[0], strides[1])], 1


def _absorb(
    axes: Iterable[RunAxis], run: int, items: tuple[int, int]
) -> tuple[tuple[RunAxis, ...], int]:
    """Grow the run by every axis that continues it on both sides; drop axes of one step."""
    left = [axis for axis in axes if axis.steps > 1]
    while True:
        for axis in left:
            if (axis.local_stride, axis.remote_stride) == (run * items[0], run * items[1]):
                run *= axis.steps
                left.remove(axis)
                break
        else:
            left.sort(key=lambda axis: (-axis.remote_stride, -axis.local_stride, axis.steps))
            return tuple(left), run


def _producer_part(part: TensorSlice, reading: Reading, maps: dict[int, TokenMap]) -> TensorSlice:
    """The part with the producer's side on both sides; `maps` caches the producer's token maps."""
    remote, heads, tokens = part.remote, part.heads, part.tokens
    whole = reading is not Reading.UNITS and not tokens.is_state
    unit = remote.block_tokens if whole else tokens.unit_tokens
    tokens = maps.setdefault(id(tokens), TokenMap(tokens.group, unit, tokens.remote, tokens.remote))
    return TensorSlice(
        remote, remote, remote.heads if reading is Reading.ALL_HEADS else heads, tokens
    )


def _grouped(
    strided_runs: Iterable[_StridedRun], key: Callable[[_StridedRun], object]
) -> list[list[_StridedRun]]:
    """The strided runs grouped by a key, in order of first appearance."""
    groups: dict[object, list[_StridedRun]] = {}
    for strided in strided_runs:
        groups.setdefault(key(strided), []).append(strided)
    return list(groups.values())


def _join(alike: list[_StridedRun]) -> list[_StridedRun]:
    """Join strided runs whose runs are adjacent on both sides.

    A joined run stays within the stride of a block: beyond it is another block, or another allocation that happens to
    be adjacent, and no descriptor may cross that border. Converted runs are never joined: each has its own scales.
    """
    joined: list[_StridedRun] = []
    for strided in sorted(alike, key=lambda strided: strided.local_base):
        last = joined[-1] if joined else None
        if last is not None and _adjacent(last, strided):
            joined[-1] = last._replace(
                run=last.run + strided.run, members=last.members + strided.members
            )
        else:
            joined.append(strided)
    return joined


def _adjacent(last: _StridedRun, strided: _StridedRun) -> bool:
    length = last.run + strided.run
    return (
        last.conversion is None
        and strided.conversion is None
        and strided.local_base - last.local_base
        == last.run
        == strided.remote_base - last.remote_base
        and length <= last.loops.local_unit_stride.block_stride
        and length <= last.loops.remote_unit_stride.block_stride
    )
