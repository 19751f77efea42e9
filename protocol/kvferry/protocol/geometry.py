"""The description of a worker's KV cache: paged tensors.

    address(block, head, tile) = base + block·block_stride + head·head_stride + tile·tile_stride   (+ cell_bytes)

`head` counts from the first head that the worker holds, `tile` from the start of the block. A cell's bytes are
contiguous, unless its elements have a stride of their own: byte `i` of a cell is then at

    (i div element_bytes)·element_stride + i mod element_bytes

from the cell's address. All ranges are half-open. All strides and sizes are bytes.

Layouts are described by numbers only and have no names, so HND, NHD, cross-layer and any later permutation are one
case. vLLM's CPU attention needs the element stride: it keeps a block's K as [D, N] and its V as [N, D].
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import Address, Count, Positive, Rank, Size, Text

MAX_TENSORS = 4096
"""Most paged tensors of one worker: 1,000 layers of four kinds."""

MAX_SCALES = 1024
"""Most heads of a worker that have scales of their own."""

# Normal numbers of float32, and so is the product of two.
Scale = Annotated[float, Meta(ge=1e-30, le=1e30)]
Stride = Annotated[int, Meta(ge=0, lt=2**48)]


class Range(msgspec.Struct, frozen=True, array_like=True):
    """`[start, stop)` on the sharded axis, counted over the whole model.

    Attributes:
        start: the first index.
        stop: one past the last index.
    """

    start: Count
    stop: Count

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


class Interleave(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a worker holds where they are divided among ranks (decode context parallelism).

    Token `t` is on rank `(t div run_tokens) mod ranks`, in its local slot
    `(t div (run_tokens·ranks))·run_tokens + t mod run_tokens`. Blocks count local slots.

    Example: 2 ranks, runs of 4: rank 1 holds the tokens 4 … 7 in its slots 0 … 3, and 12 … 15 in its slots 4 … 7.

    Attributes:
        ranks: number of ranks that the tokens are divided among.
        rank: this worker's rank among them.
        run_tokens: consecutive tokens on one rank.
    """

    ranks: Size = 1
    rank: Rank = 0
    run_tokens: Size = 1


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of a cell's bytes. Only equal formats may be copied as they are.

    Attributes:
        dtype: of one element, e.g. `bfloat16`.
        quantization: the cache's quantisation, `none` when there is none.
        packing: layout of a cell: `plain` if the strides describe it fully, otherwise a name that contains
            everything the layout depends on (e.g. backend, instruction set).
    """

    dtype: Text
    quantization: Text = "none"
    packing: Text = "plain"


class PagedTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of state of one layer on one worker.

    Attributes:
        layer: the layer's name, the same on every engine that serves the model.
        kind: the state's kind: `k`, `v`, `mla`, `conv.x`, `ssm`, …; `kv` for an opaque block of both.
        group: index of the cache group whose block table addresses it.
        base: address of block 0.
        blocks: number of blocks (the engine's kernel blocks).
        block_tokens: tokens per block.
        block_stride: bytes from one block to the next.
        heads: the global heads that this worker holds; for a convolution state its channels.
        head_stride: bytes from one head to the next.
        tile_tokens: tokens per cell; `block_tokens` when a backend packs a whole block (such a cell cannot be split).
        tile_stride: bytes from one tile to the next.
        cell_bytes: bytes of one (block, head, tile).
        element_bytes, element_stride: where the elements of a cell are not contiguous, the bytes of one and the bytes
            from one to the next; 0 where they are.
        interleave: the tokens that this worker holds.
        scales: of quantised values, `value = stored · scale`: none if it is 1, one for all heads, or one per head.
        format: the meaning of the bytes.
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
    element_bytes: Annotated[int, Meta(ge=0, le=2**20)] = 0
    element_stride: Stride = 0
    interleave: Interleave = Interleave()
    scales: Annotated[tuple[Scale, ...], Meta(max_length=MAX_SCALES)] = ()
    format: Format

    @property
    def name(self) -> tuple[str, str]:
        """The key by which a tensor is matched across engines."""
        # Never its position, and never its address: vLLM's cache groups share the same bytes.
        return (self.layer, self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """The layout of a block and the number of blocks: equal for layers that differ only in their addresses."""
        return (
            self.blocks,
            self.block_tokens,
            self.block_stride,
            self.head_stride,
            self.tile_tokens,
            self.tile_stride,
            self.cell_bytes,
            self.element_bytes,
            self.element_stride,
        )

    @property
    def tiles(self) -> int:
        """Tiles per block."""
        return self.block_tokens // self.tile_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's cells, all local heads."""
        return len(self.heads) * self.tiles * self.cell_bytes

    @property
    def cell_extent(self) -> int:
        """Bytes from a cell's first byte to its end."""
        if not self.element_bytes:
            return self.cell_bytes
        num_elements = self.cell_bytes // self.element_bytes
        last_element = (num_elements - 1) * self.element_stride
        return last_element + self.element_bytes

    @property
    def block_extent(self) -> int:
        """Bytes from a block's first byte to its end, gaps included."""
        last_head = max(0, len(self.heads) - 1) * self.head_stride
        last_tile = (self.tiles - 1) * self.tile_stride
        return last_head + last_tile + self.cell_extent


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place among the ranks of its engine.

    Attributes:
        pp: pipeline stage.
        pcp: prefill context parallel rank.
        tp: tensor-parallel rank.
        dcp: decode context parallel rank.
    """

    pp: Rank = 0
    pcp: Rank = 0
    tp: Rank = 0
    dcp: Rank = 0

    def __str__(self) -> str:
        parts = [f"tp{self.tp}"]
        if self.pp:
            parts.append(f"pp{self.pp}")
        if self.pcp:
            parts.append(f"pcp{self.pcp}")
        if self.dcp:
            parts.append(f"dcp{self.dcp}")
        return "/".join(parts)


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's parallel sizes.

    Attributes:
        pp: pipeline stages.
        pcp: prefill context parallel ranks.
        tp: tensor-parallel ranks.
        dcp: decode context parallel ranks, which lie within the others.
    """

    pp: Size = 1
    pcp: Size = 1
    tp: Size = 1
    dcp: Size = 1
