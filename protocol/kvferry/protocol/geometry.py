"""How a worker describes its KV cache to others: paged tensors.

    address(block, head, tile) = base + block·block_stride + head·head_stride + tile·tile_stride   (+ cell_bytes)

Everything here is numbers; no layout has a name. All ranges are half-open. All strides and sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import Address, Count, Positive, Rank, Size, Text

MAX_TENSORS = 16384
"""Most paged tensors of one worker."""

Stride = Annotated[int, Meta(ge=0, lt=2**48)]


class Range(msgspec.Struct, frozen=True, array_like=True):
    """`[start, stop)` on the sharded axis, counted over the whole model."""

    start: Count
    stop: Count

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of a cell mean. Only equal formats may be copied as they are.

    Attributes:
        dtype: of one element, e.g. `bfloat16`.
        quantization: the cache's quantisation, `none` when there is none.
        packing: how a cell is arranged: `plain` when its elements follow one another, `k|v` when K and V of a token
            do, otherwise a name that carries everything the arrangement depends on (e.g. backend, instruction set).
    """

    dtype: Text
    quantization: Text = "none"
    packing: Text = "plain"


class PagedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state of one layer on one worker.

    Attributes:
        layer: the layer's name, the same on every engine that serves the model.
        kind: which state of the layer, e.g. `kv`.
        group: index of the cache group whose block table addresses it.
        base: address of block 0.
        blocks: number of blocks (the engine's kernel blocks).
        block_tokens: tokens per block.
        block_stride: bytes from one block to the next.
        heads: the global heads that this worker holds.
        head_stride: bytes from one head to the next.
        tile_tokens: tokens per cell; `block_tokens` when a backend packs a whole block (such a cell cannot be split).
        tile_stride: bytes from one tile to the next.
        cell_bytes: contiguous bytes of one (block, head, tile).
        format: what the bytes mean.
    """

    layer: Text
    kind: Text
    group: Rank
    base: Address
    blocks: Positive
    block_tokens: Size
    block_stride: Stride
    heads: Range
    head_stride: Stride
    tile_tokens: Size
    tile_stride: Stride
    cell_bytes: Positive
    format: Format

    @property
    def name(self) -> tuple[str, str]:
        """What a tensor is matched by across engines."""
        return (self.layer, self.kind)

    @property
    def tiles(self) -> int:
        """Tiles per block."""
        return self.block_tokens // self.tile_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's cells, all local heads."""
        return len(self.heads) * self.tiles * self.cell_bytes


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place among the ranks of its engine."""

    pp: Rank = 0
    pcp: Rank = 0
    tp: Rank = 0
    dcp: Rank = 0

    def __str__(self) -> str:
        parts = [f"tp{self.tp}"]
        parts += [f"{name}{rank}" for name, rank in (("pp", self.pp), ("pcp", self.pcp), ("dcp", self.dcp)) if rank]
        return "/".join(parts)


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's parallel sizes."""

    pp: Size = 1
    pcp: Size = 1
    tp: Size = 1
    dcp: Size = 1
