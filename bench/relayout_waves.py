"""Data of `bench.relayout`: requests of a Llama whose two engines keep their caches in different ways."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.relayout.shape import (
    CopyAxis,
    ElementConversion,
    ElementType,
    Shape,
)
from kvferry.worker.relayout.wave_table import SHAPE, Pieces, WaveTable

HEADS, DIM = 8, 128
TO_FLOAT8 = ElementConversion(ElementType.BFLOAT16, ElementType.FLOAT8_E4M3)


@dataclass(frozen=True)
class Side:
    """One engine's cache of one layer's K (or V): `[block, head, token, dim]` (HND) or tokens before heads (NHD)."""

    order: str
    block_tokens: int
    dtype: torch.dtype

    @property
    def cell_bytes(self) -> int:
        return DIM * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return HEADS * self.block_tokens * self.cell_bytes

    @property
    def block_shape(self) -> tuple[int, ...]:
        sizes = (
            (HEADS, self.block_tokens)
            if self.order == "HND"
            else (self.block_tokens, HEADS)
        )
        return (*sizes, DIM)

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from head to head, and from token to token."""
        cell = self.cell_bytes
        return (
            (self.block_tokens * cell, cell)
            if self.order == "HND"
            else (cell, HEADS * cell)
        )

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True)
class Setup:
    """A pair of engines."""

    remote: Side
    local: Side

    @property
    def name(self) -> str:
        sides = [
            f"{side.order} {side.block_tokens}" for side in (self.remote, self.local)
        ]
        return " → ".join(sides) + (", bf16 → fp8" if self.conversion else "")

    @property
    def conversion(self) -> ElementConversion | None:
        return TO_FLOAT8 if self.remote.dtype != self.local.dtype else None

    @property
    def unit_tokens(self) -> int:
        return min(self.remote.block_tokens, self.local.block_tokens)

    @property
    def shape(self) -> Shape:
        """A source block is a block of the producer, as it arrived in the pool."""
        here, there, unit = self.remote.strides, self.local.strides, self.unit_tokens
        return Shape.from_axes(
            [CopyAxis(HEADS, here[0], there[0]), CopyAxis(unit, here[1], there[1])],
            DIM if self.conversion else self.remote.cell_bytes,
            source_unit_stride=(self.remote.block_bytes, unit * here[1]),
            destination_unit_stride=(self.local.block_bytes, unit * there[1]),
            conversion=self.conversion,
        )


def setups() -> list[Setup]:
    """The pairs of the published table."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    pairs = [
        (("HND", 16, bf16), ("NHD", 16, bf16)),
        (("NHD", 16, bf16), ("HND", 16, bf16)),
        (("HND", 16, bf16), ("HND", 64, bf16)),
        (("HND", 64, bf16), ("HND", 16, bf16)),
        (("NHD", 16, bf16), ("HND", 64, bf16)),
        (("HND", 16, bf16), ("NHD", 16, fp8)),
    ]
    return [Setup(Side(*remote), Side(*local)) for remote, local in pairs]


@dataclass(frozen=True)
class Memory:
    """A staging pool and a cache.

    Attributes:
        pool: uint8; eight waves.
        cache: uint8 `[2·layers, blocks, block_bytes]`.
    """

    pool: torch.Tensor
    cache: torch.Tensor

    @classmethod
    def of(
        cls,
        setup: Setup,
        layers: int,
        pool_bytes: int,
        cache_blocks: int,
        device: torch.device,
    ) -> Memory:
        pool = torch.empty(pool_bytes, dtype=torch.uint8, device=device)
        values = pool.view(torch.bfloat16)
        step = 1 << 26
        for start in range(
            0, len(values), step
        ):  # normal numbers: random bytes would be NaNs now and then
            values[start : start + step].normal_()
        cache = torch.zeros(
            2 * layers,
            cache_blocks,
            setup.local.block_bytes,
            dtype=torch.uint8,
            device=device,
        )
        return cls(pool, cache)


def waves(
    setup: Setup, memory: Memory, tokens: int, first_block: int = 0
) -> Iterator[WaveTable]:
    """The tables of one request, wave after wave through the pool; its blocks lie in a random order."""
    tensors, cache_blocks = memory.cache.shape[:2]
    wave_bytes = len(memory.pool) // 8
    remote_blocks = max(1, wave_bytes // (tensors * setup.remote.block_bytes))
    per_wave = remote_blocks * setup.remote.block_tokens
    wanted = setup.local.blocks(tokens)
    blocks = (first_block + shuffled(wanted)) % cache_blocks
    unit = setup.unit_tokens
    rows = np.zeros((tensors, 4), dtype=np.int64)
    rows[:, 0] = memory.pool.data_ptr()
    rows[:, 1] = memory.cache.data_ptr() + np.arange(tensors) * memory.cache[0].nbytes
    pieces = Pieces((setup.shape,), rows)
    for number, start in enumerate(range(0, tokens, per_wave)):
        at = np.arange(start, min(start + per_wave, tokens), unit)
        units = np.empty((len(at), 4), dtype=np.int32)
        units[:, 0] = (at - start) // setup.remote.block_tokens
        units[:, 1] = at % setup.remote.block_tokens // unit
        units[:, 2] = blocks[at // setup.local.block_tokens]
        units[:, 3] = at % setup.local.block_tokens // unit
        first = number % 8 * (wave_bytes // setup.remote.block_bytes)
        yield WaveTable(
            pieces,
            ((0, len(units)),),
            units,
            first + np.arange(tensors) * remote_blocks,
        )


def shuffled(count: int) -> NDArray[np.int64]:
    """The numbers below `count` in the order of a request's blocks."""
    numbers = list(range(count))
    random.Random(1).shuffle(numbers)
    return np.array(numbers, dtype=np.int64)


def layer_by_layer(
    setup: Setup,
    received: torch.Tensor,
    cache: torch.Tensor,
    theirs: torch.Tensor,
    ours: torch.Tensor,
) -> None:
    """Gather, permute and scatter in torch, once per layer and K or V, from blocks as they were received.

    Args:
        received: uint8 `[blocks, block_bytes]`: the producer's blocks of one tensor, read again for every one.
        cache: uint8 `[2·layers, blocks, block_bytes]`.
        theirs, ours: the blocks of the request on either side, int64.
    """
    remote, local = setup.remote, setup.local
    source = received.view(remote.dtype).view(-1, *remote.block_shape)
    for tensor in cache:
        layer = tensor.view(local.dtype).view(-1, *local.block_shape)
        blocks = source.index_select(0, theirs)
        by_token = blocks.transpose(1, 2) if remote.order == "HND" else blocks
        if (
            remote.block_tokens != local.block_tokens
            and local.order == remote.order == "HND"
        ):
            blocks = _resized(blocks, local.block_tokens)
        else:
            blocks = by_token.reshape(-1, local.block_tokens, HEADS, DIM)
            blocks = blocks.transpose(1, 2) if local.order == "HND" else blocks
        if setup.conversion is not None:
            blocks = blocks.to(local.dtype)
            layer, blocks = (
                layer.view(torch.uint8),
                blocks.contiguous().view(torch.uint8),
            )
        layer.index_copy_(0, ours, blocks)


def _resized(blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Blocks `[n, head, token, dim]` of another number of tokens."""
    count, heads, have, dim = blocks.shape
    if have < tokens:
        joined = blocks.view(-1, tokens // have, heads, have, dim).transpose(1, 2)
        return joined.reshape(-1, heads, tokens, dim)
    return (
        blocks.view(count, heads, have // tokens, tokens, dim)
        .transpose(1, 2)
        .reshape(-1, heads, tokens, dim)
    )


def moved_bytes(table: WaveTable) -> int:
    """Bytes that a wave reads, and bytes that it writes, without its table."""
    pieces = (
        (table.pieces.shapes[piece], *table.ranges[piece])
        for piece in table.rows[:, SHAPE].tolist()
    )
    return sum(
        (stop - first)
        * shape.run
        * math.prod(axis.steps for axis in shape.axes)
        * sum(shape.element_bytes)
        for shape, first, stop in pieces
    )
