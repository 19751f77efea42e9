"""The caches of one worker, carved out of allocations with guard bytes around everything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.protocol.geometry import PagedTensor, Place, Range
from tests.geometry.models import ITEM_BYTES, Group, Kind, Model
from tests.geometry.orders import Extent, Order, Strides, lay_out
from tests.geometry.shards import Shards

GUARD_BYTES = 64


@dataclass(frozen=True)
class Blocks:
    """The blocks of one cache group on one side.

    Attributes:
        kernel_tokens: local slots per kernel block.
        ratio: kernel blocks per scheduler block.
        count: scheduler blocks.
    """

    kernel_tokens: int
    ratio: int
    count: int

    @property
    def block_tokens(self) -> int:
        """Local slots per scheduler block."""
        return self.kernel_tokens * self.ratio


@dataclass(frozen=True)
class Side:
    """Everything that decides what an engine's workers hold and where, but addresses.

    Attributes:
        blocks, orders: one per cache group.
        overlaid: all groups share the same bytes, and no block is of two groups at a time.
        blocks_first: in an overlaid cache, all layers of a block together.
        one_storage: all groups lie in one allocation; otherwise each in its own, or each layer where layers are
            outermost.
        names_empty: a worker that holds no head of a tensor names it all the same.
        cache_dtype: what 16-bit attention caches are kept in instead; "" for what the model says.
        scales: of caches that are kept in 8 bits: one for all heads, or more, one for each head in turn.
    """

    shards: Shards
    blocks: tuple[Blocks, ...]
    orders: tuple[Order, ...]
    overlaid: bool = False
    blocks_first: bool = False
    one_storage: bool = False
    names_empty: bool = False
    cache_dtype: str = ""
    scales: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Caches:
    """One worker's caches without addresses.

    Attributes:
        sizes: bytes of every allocation, guards included.
        tensors: the allocation each lies in, and the tensor with its base counted from there.
    """

    sizes: tuple[int, ...]
    tensors: tuple[tuple[int, PagedTensor], ...]

    def at(self, addresses: Sequence[int]) -> tuple[PagedTensor, ...]:
        """The tensors once every allocation has an address."""
        return tuple(
            msgspec.structs.replace(tensor, base=tensor.base + addresses[storage])
            for storage, tensor in self.tensors
        )


def carve(model: Model, side: Side, place: Place) -> Caches:
    """The caches of the worker at `place`."""
    pieces = (
        _overlaid(model, side, place) if side.overlaid else _apart(model, side, place)
    )
    sizes: list[int] = []
    tensors: list[tuple[int, PagedTensor]] = []
    for size, found in pieces:
        if not (side.one_storage and sizes):
            sizes.append(GUARD_BYTES)
        tensors += [
            (len(sizes) - 1, msgspec.structs.replace(one, base=one.base + sizes[-1]))
            for one in found
        ]
        sizes[-1] += size + GUARD_BYTES
    kept = [
        (storage, one) for storage, one in tensors if len(one.heads) or side.names_empty
    ]
    return Caches(tuple(sizes), tuple(kept))


Piece = tuple[int, list[PagedTensor]]
"""Bytes that lie together, and the tensors in them with their bases counted from the first byte."""


def _apart(model: Model, side: Side, place: Place) -> list[Piece]:
    """Every group in memory of its own; every layer where layers are outermost."""
    pieces: list[Piece] = []
    for index, group in enumerate(model.groups):
        layers = _layers(side, place, group)
        if not layers:
            continue
        blocks, order = side.blocks[index], side.orders[index]
        extents = _extents(side, place, group, len(layers), blocks)
        total, strides = lay_out(order, extents)
        each = order.outer.startswith("L")
        step = next(iter(strides.values())).steps["L"]
        found: list[PagedTensor] = []
        for number, layer in enumerate(layers):
            for kind in group.kinds:
                at = strides[kind.name]
                base = at.offset + (0 if each else number * at.steps["L"])
                found.append(
                    _tensor(
                        side, place, index, group, layer, kind, at, base, at.steps["B"]
                    )
                )
            if each:
                pieces.append((step, found))
                found = []
        if not each:
            pieces.append((total, found))
    return pieces


def _overlaid(model: Model, side: Side, place: Place) -> list[Piece]:
    """Pages of one size, one per scheduler block and position: the n-th layer of every group lies in position n."""
    laid: dict[int, tuple[list[str], dict[str, Strides]]] = {}
    page, count = 1, side.blocks[0].count
    for index, group in enumerate(model.groups):
        layers = _layers(side, place, group)
        extents = _extents(side, place, group, len(layers), side.blocks[index])
        size, strides = lay_out(side.orders[index], extents, without="LB")
        laid[index] = (layers, strides)
        page = max(page, size * side.blocks[index].ratio)
    divisor = math.lcm(*(blocks.ratio for blocks in side.blocks))
    page = -(-page // divisor) * divisor
    positions = max(len(layers) for layers, _ in laid.values())
    inside = side.blocks_first and divisor == 1
    found: list[PagedTensor] = []
    for index, group in enumerate(model.groups):
        layers, strides = laid[index]
        for number, layer in enumerate(layers):
            start = number * page * (1 if inside else count)
            step = page * positions if inside else page // side.blocks[index].ratio
            for kind in group.kinds:
                at = strides[kind.name]
                found.append(
                    _tensor(
                        side,
                        place,
                        index,
                        group,
                        layer,
                        kind,
                        at,
                        start + at.offset,
                        step,
                    )
                )
    return [(page * positions * count, found)]


def _layers(side: Side, place: Place, group: Group) -> list[str]:
    return [layer for layer in side.shards.stages[place.pp] if layer in group.layers]


def _extents(
    side: Side, place: Place, group: Group, layers: int, blocks: Blocks
) -> dict[str, Extent]:
    tiles = 1 if group.policy == "state" else blocks.kernel_tokens // group.tile_tokens
    sizes = {"L": layers, "B": blocks.count * blocks.ratio, "N": tiles}
    found: dict[str, Extent] = {}
    for kind in group.kinds:
        heads = side.shards.heads(place, kind.heads, group.policy)
        own: Mapping[str, int] = {
            **sizes,
            "H": len(heads),
            "E": kind.elements * group.tile_tokens,
        }
        found[kind.name] = Extent(
            own, ITEM_BYTES[group.format(kind, side.cache_dtype).dtype]
        )
    return found


def _tensor(
    side: Side,
    place: Place,
    index: int,
    group: Group,
    layer: str,
    kind: Kind,
    at: Strides,
    base: int,
    block_stride: int,
) -> PagedTensor:
    blocks = side.blocks[index]
    heads: Range = side.shards.heads(place, kind.heads, group.policy)
    apart = at.steps["E"] != at.element_bytes
    format_ = group.format(kind, side.cache_dtype)
    scales: tuple[float, ...] = ()
    if format_.quantization != "none":
        by_head = tuple(
            side.scales[head % len(side.scales)]
            for head in range(heads.start, heads.stop)
        )
        scales = by_head if len(side.scales) > 1 else side.scales
    return PagedTensor(
        layer=layer,
        kind=kind.name,
        group=index,
        base=base,
        blocks=blocks.count * blocks.ratio,
        block_tokens=blocks.kernel_tokens,
        block_stride=block_stride,
        heads=heads,
        head_stride=at.steps["H"],
        tile_tokens=blocks.kernel_tokens
        if group.policy == "state"
        else group.tile_tokens,
        tile_stride=at.steps["N"],
        cell_bytes=kind.elements * ITEM_BYTES[format_.dtype] * group.tile_tokens,
        element_bytes=at.element_bytes if apart else 0,
        element_stride=at.steps["E"] if apart else 0,
        interleave=side.shards.interleave(place, group.policy, blocks.block_tokens),
        scales=scales,
        format=format_,
    )
