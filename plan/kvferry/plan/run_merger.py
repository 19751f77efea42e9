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
from kvferry.plan.runs import Bundle, ReadExtent, RunAxis, TensorSlice, UnitStride
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.geometry import PagedTensor


def merge(parts: Sequence[TensorSlice]) -> tuple[Bundle, ...]:
    """Merge parts into bundles; the indices of `members` are those of `parts`.

    Example: K and V of one layer, 2 heads, units of 4 tokens, cells of 8 bytes. If both sides have head stride 64,
    tile stride 16 and V 8 bytes after K, the result is one bundle with one run of 128 bytes. If the remote side
    has the tokens outermost (head stride 16, tile stride 32), K and V still merge, and 8 runs of 16 bytes remain.
    """
    merger = _RunMerger()
    strided_runs = [merger.strided_run(index, part) for index, part in enumerate(parts)]
    # A longer run may make another axis continue it, and a longer run may touch the next tensor's.
    while True:
        joined: list[_StridedRun] = []
        for alike in _grouped(strided_runs, _loops_of):
            joined += _join(alike)
        is_settled = len(joined) == len(strided_runs)
        strided_runs = [merger.grow(strided) for strided in joined]
        if is_settled:
            break
    return tuple(
        _bundle(alike) for alike in _grouped(strided_runs, _loops_run_and_dtypes)
    )


def _bundle(alike: Sequence[_StridedRun]) -> Bundle:
    loops = alike[0].loops
    return Bundle(
        tokens=loops.tokens,
        run=alike[0].run,
        axes=loops.axes,
        local_unit_stride=loops.local_unit_stride,
        remote_unit_stride=loops.remote_unit_stride,
        bases=tuple((strided.local_base, strided.remote_base) for strided in alike),
        members=tuple(strided.members for strided in alike),
        conversions=tuple(
            strided.conversion for strided in alike if strided.conversion is not None
        ),
    )


def producer_runs(
    parts: Sequence[TensorSlice], reading: ReadExtent
) -> tuple[Bundle, ...]:
    """The producer's own runs; both sides of these bundles describe the producer."""
    maps: dict[int, TokenMap] = {}
    return merge([_producer_part(part, reading, maps) for part in parts])


class _Loops(NamedTuple):
    """Loop structure without the run.

    Attributes:
        items: bytes of an element, local and remote, if there is a conversion; else 1.
    """

    tokens: TokenMap
    axes: tuple[RunAxis, ...]
    local_unit_stride: UnitStride
    remote_unit_stride: UnitStride
    items: tuple[int, int]


class _StridedRun(NamedTuple):
    """The bytes of one unit of some parts."""

    loops: _Loops
    run: int
    local_base: int
    remote_base: int
    members: tuple[int, ...]
    conversion: DtypeConversion | None


def _loops_of(strided: _StridedRun) -> int:
    # Equal loops are one object (`_RunMerger`).
    return id(strided.loops)


def _loops_run_and_dtypes(strided: _StridedRun) -> tuple[object, ...]:
    dtypes = None
    if strided.conversion is not None:
        dtypes = strided.conversion[:2]
    return (id(strided.loops), strided.run, dtypes)


class _RunMerger:
    """Makes strided runs. Equal loops are one object, found once per shape: layers differ only in their addresses."""

    def __init__(self) -> None:
        self._by_shape: dict[tuple[object, ...], tuple[_Loops, int]] = {}
        self._equal: dict[_Loops, _Loops] = {}
        self._grown: dict[tuple[int, int], tuple[_Loops, int]] = {}

    def strided_run(self, index: int, part: TensorSlice) -> _StridedRun:
        """The strided run of one part."""
        local, remote, heads, tokens, conversion = part
        dtypes = None
        if conversion is not None:
            dtypes = conversion[:2]
        shape = (local.shape, remote.shape, len(heads), id(tokens), dtypes)
        loops_and_run = self._by_shape.get(shape)
        if loops_and_run is None:
            loops_and_run = self._loops(part)
            self._by_shape[shape] = loops_and_run
        loops, run = loops_and_run
        local_offset = (heads.start - local.heads.start) * local.head_stride
        remote_offset = (heads.start - remote.heads.start) * remote.head_stride
        return _StridedRun(
            loops=loops,
            run=run,
            local_base=local.base + local_offset,
            remote_base=remote.base + remote_offset,
            members=(index,),
            conversion=conversion,
        )

    def grow(self, strided: _StridedRun) -> _StridedRun:
        """The strided run after absorbing every axis that continues its run."""
        key = (id(strided.loops), strided.run)
        grown = self._grown.get(key)
        if grown is None:
            axes, run = _absorb(strided.loops.axes, strided.run, strided.loops.items)
            grown = (self._one_object(strided.loops._replace(axes=axes)), run)
            self._grown[key] = grown
        loops, run = grown
        if run == strided.run:
            return strided
        return strided._replace(loops=loops, run=run)

    def _loops(self, part: TensorSlice) -> tuple[_Loops, int]:
        """The loops of a part, and the run that they are around."""
        local, remote, heads, tokens, conversion = part
        tiles = local.tiles
        if not tokens.is_state:
            tiles = tokens.unit_tokens // local.tile_tokens
        if conversion is None:
            items = (1, 1)
            element_axes, run = _elements(local, remote)
        else:
            items = conversion.items
            element_axes, run = _items(local, remote, items)
        axes, run = _absorb(
            [
                RunAxis(len(heads), local.head_stride, remote.head_stride),
                RunAxis(tiles, local.tile_stride, remote.tile_stride),
                *element_axes,
            ],
            run,
            items,
        )
        loops = _Loops(
            tokens=tokens,
            axes=axes,
            local_unit_stride=_unit_stride(
                local, tiles, tokens.positions(tokens.local)
            ),
            remote_unit_stride=_unit_stride(
                remote, tiles, tokens.positions(tokens.remote)
            ),
            items=items,
        )
        return self._one_object(loops), run

    def _one_object(self, loops: _Loops) -> _Loops:
        return self._equal.setdefault(loops, loops)


def _unit_stride(tensor: PagedTensor, tiles: int, positions: int) -> UnitStride:
    # 0 within a block that is one unit, so that tensors with another order of tokens (K as [D, N]
    # beside V as [N, D]) can merge.
    position_stride = 0
    if positions > 1:
        position_stride = tiles * tensor.tile_stride
    return UnitStride(tensor.block_stride, position_stride, tensor.blocks)


def _elements(local: PagedTensor, remote: PagedTensor) -> tuple[list[RunAxis], int]:
    """The axes inside a cell, and the bytes that are contiguous on both sides with any strides."""
    cell_bytes = local.cell_bytes
    local_bytes = local.element_bytes or cell_bytes
    remote_bytes = remote.element_bytes or cell_bytes
    if local_bytes == remote_bytes == cell_bytes:
        return [], cell_bytes
    # Element sizes are powers of two, so the smaller one divides the larger: elements of `large`
    # bytes, around pieces of `small`.
    small = min(local_bytes, remote_bytes)
    large = max(local_bytes, remote_bytes)
    local_outer, local_inner = _element_strides(local, small, large)
    remote_outer, remote_inner = _element_strides(remote, small, large)
    outer = RunAxis(cell_bytes // large, local_outer, remote_outer)
    inner = RunAxis(large // small, local_inner, remote_inner)
    return [outer, inner], small


def _element_strides(tensor: PagedTensor, small: int, large: int) -> tuple[int, int]:
    """The strides of elements of `large` bytes, and of pieces of `small` bytes inside of them."""
    stride = tensor.cell_bytes
    size = tensor.cell_bytes
    if tensor.element_bytes:
        stride = tensor.element_stride
        size = tensor.element_bytes
    outer = stride
    if size != large:
        outer = stride * (large // size)
    inner = stride
    if size != small:
        # Larger elements are contiguous inside.
        inner = small
    return outer, inner


def _items(
    local: PagedTensor, remote: PagedTensor, items: tuple[int, int]
) -> tuple[list[RunAxis], int]:
    """The axis of the elements of a converted cell, and a run of one element."""
    local_item, remote_item = items
    local_stride = local_item
    if local.element_bytes:
        local_stride = local.element_stride
    remote_stride = remote_item
    if remote.element_bytes:
        remote_stride = remote.element_stride
    return [RunAxis(local.cell_bytes // local_item, local_stride, remote_stride)], 1


def _absorb(
    axes: Iterable[RunAxis], run: int, items: tuple[int, int]
) -> tuple[tuple[RunAxis, ...], int]:
    """Grow the run by every axis that continues it on both sides; drop axes of one step."""
    # The stride of an axis of one step is never used. It may be any, and would keep equal loops apart.
    remaining = [axis for axis in axes if axis.steps > 1]
    continuing = _continuing(remaining, run, items)
    while continuing is not None:
        run *= continuing.steps
        remaining.remove(continuing)
        continuing = _continuing(remaining, run, items)
    # The outermost of the producer first, so that equal axes in another order are equal loops.
    remaining.sort(
        key=lambda axis: (-axis.remote_stride, -axis.local_stride, axis.steps)
    )
    return tuple(remaining), run


def _continuing(
    axes: Iterable[RunAxis], run: int, items: tuple[int, int]
) -> RunAxis | None:
    """An axis that continues a run on both sides."""
    local_item, remote_item = items
    for axis in axes:
        if (
            axis.local_stride == run * local_item
            and axis.remote_stride == run * remote_item
        ):
            return axis
    return None


def _producer_part(
    part: TensorSlice, reading: ReadExtent, maps: dict[int, TokenMap]
) -> TensorSlice:
    """The part with the producer's side on both sides; `maps` caches the producer's token maps."""
    remote = part.remote
    tokens = part.tokens
    unit_tokens = tokens.unit_tokens
    if reading is not ReadExtent.UNITS and not tokens.is_state:
        unit_tokens = remote.block_tokens
    heads = part.heads
    # Where heads lie inside of tokens, the run of some heads ends with each token; that of all goes on.
    if reading is ReadExtent.ALL_HEADS:
        heads = remote.heads
    producer_map = TokenMap(tokens.group, unit_tokens, tokens.remote, tokens.remote)
    # Not a new one for each part, though equal: shapes are compared by the identity of their map.
    producer_map = maps.setdefault(id(tokens), producer_map)
    return TensorSlice(remote, remote, heads, producer_map)


def _grouped(
    strided_runs: Iterable[_StridedRun], key: Callable[[_StridedRun], object]
) -> list[list[_StridedRun]]:
    """The strided runs grouped by a key, in order of first appearance."""
    groups: dict[object, list[_StridedRun]] = {}
    for strided in strided_runs:
        groups.setdefault(key(strided), []).append(strided)
    return list(groups.values())


def _join(alike: list[_StridedRun]) -> list[_StridedRun]:
    """Join strided runs whose runs are adjacent on both sides."""
    joined: list[_StridedRun] = []
    # The order of one side is enough: what may be joined is adjacent on both.
    for strided in sorted(alike, key=lambda strided: strided.local_base):
        if joined and _may_join(joined[-1], strided):
            last = joined[-1]
            joined[-1] = last._replace(
                run=last.run + strided.run, members=last.members + strided.members
            )
        else:
            joined.append(strided)
    return joined


def _may_join(last: _StridedRun, strided: _StridedRun) -> bool:
    # Converted runs are never joined: each has its own scales.
    if last.conversion is not None or strided.conversion is not None:
        return False
    if strided.local_base - last.local_base != last.run:
        return False
    if strided.remote_base - last.remote_base != last.run:
        return False
    # A joined run stays within the stride of a block: beyond it is another block, or another
    # allocation that happens to be adjacent, and no descriptor may cross that border.
    run = last.run + strided.run
    return (
        run <= last.loops.local_unit_stride.block_stride
        and run <= last.loops.remote_unit_stride.block_stride
    )
