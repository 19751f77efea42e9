"""Data of `bench.transfer`: caches of two engines, and requests whose blocks lie scattered on both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bench.figures import shown_bytes
from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.protocol.handshake import CacheGroup, ModelFacts

MIB = 1 << 20
FACTS = ModelFacts(
    model="bench",
    fingerprint="weights:bench",
    dtype="uint8",
    cache_dtype="auto",
    quantization="none",
    max_model_tokens=1 << 30,
)
_MOST_LAYERS = 32
_MOST_DESCRIPTORS = 32768
_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's share of a scenario.

    Attributes:
        tp: workers, over which the heads are divided.
        tokens_first: whether a block's tokens are outside its heads (NHD), or inside (HND).
    """

    tp: int = 1
    block_tokens: int = _TOKENS
    tokens_first: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """A pair of engines.

    Attributes:
        run_bytes: the longest run that both sides share, where nothing is staged: a descriptor.
        heads: over all workers.
        cell_bytes: of one head and token.
        most_bytes: of the largest request.
        pool_bytes: of every worker's caches.
        staged: whether the plan may go through the staging pool.
        mapped: whether the consumer maps the producer's caches: in a shared file, or on a device by CUDA IPC.
    """

    name: str
    run_bytes: int
    layers: int
    heads: int
    cell_bytes: int
    producer: Side
    consumer: Side
    most_bytes: int
    pool_bytes: int
    staged: bool = False
    mapped: bool = False

    def blocks(self, side: Side) -> int:
        """Blocks of each worker's cache; block 0 holds nothing."""
        return self.pool_bytes // (self.layers * self.block_bytes(side))

    def block_bytes(self, side: Side) -> int:
        """Of one layer on one worker."""
        return self.heads // side.tp * side.block_tokens * self.cell_bytes

    def tokens(self, request_bytes: int) -> int:
        """Tokens of a request of so many bytes, all workers together."""
        return request_bytes // (self.layers * self.heads * self.cell_bytes)

    def request_blocks(
        self, side: Side, request_bytes: int, seed: int, share: int = 0
    ) -> tuple[int, ...]:
        """Blocks of a request: any of its share of the cache, in any order, so that no neighbours are merged."""
        count = -(-self.tokens(request_bytes) // side.block_tokens)
        free = np.random.default_rng(seed).permutation(np.arange(1, self.blocks(side)))
        first = share * count % max(1, len(free) - count + 1)
        return tuple(free[first : first + count].tolist())

    def tensors(self, side: Side, rank: int, base: int) -> tuple[PagedTensor, ...]:
        """The caches of one worker, from the address `base` on."""
        heads = self.heads // side.tp
        head_stride, tile_stride = self.cell_bytes * side.block_tokens, self.cell_bytes
        if side.tokens_first:
            head_stride, tile_stride = self.cell_bytes, self.cell_bytes * heads
        return tuple(
            PagedTensor(
                layer=f"layers.{layer}",
                kind="kv",
                group=0,
                base=base + layer * self.blocks(side) * self.block_bytes(side),
                blocks=self.blocks(side),
                block_tokens=side.block_tokens,
                block_stride=self.block_bytes(side),
                heads=Range(rank * heads, (rank + 1) * heads),
                head_stride=head_stride,
                tile_tokens=1,
                tile_stride=tile_stride,
                cell_bytes=self.cell_bytes,
                format=Format(dtype="uint8"),
            )
            for layer in range(self.layers)
        )

    def group(self, side: Side) -> CacheGroup:
        """Their one cache group."""
        return CacheGroup(policy="full", block_tokens=side.block_tokens)


def equal_shards(run_bytes: int, most_bytes: int, pool_bytes: int) -> Scenario:
    """One worker on both sides, equal blocks: a run is a block of a layer."""
    return Scenario(
        name=f"equal shards, {shown_bytes(run_bytes)} runs",
        run_bytes=run_bytes,
        layers=max(1, min(_MOST_LAYERS, MIB // run_bytes)),
        heads=1,
        cell_bytes=run_bytes // _TOKENS,
        producer=Side(),
        consumer=Side(),
        most_bytes=min(most_bytes, run_bytes * _MOST_DESCRIPTORS),
        pool_bytes=pool_bytes,
    )


def unequal_shards(run_bytes: int, most_bytes: int, pool_bytes: int) -> Scenario:
    """TP 2 -> TP 1 and blocks of 16 -> 32 tokens: a run is a head of a producer's block."""
    return replace(
        equal_shards(run_bytes, most_bytes, pool_bytes),
        name=f"TP 2 -> 1, blocks 16 -> 32, {shown_bytes(run_bytes)} runs",
        layers=max(1, min(_MOST_LAYERS, MIB // (4 * run_bytes))),
        heads=2,
        producer=Side(tp=2),
        consumer=Side(block_tokens=2 * _TOKENS),
    )


def other_layout(
    cell_bytes: int, most_bytes: int, pool_bytes: int, *, staged: bool
) -> Scenario:
    """The producer keeps heads outside tokens, the consumer inside: the shared run is one cell."""
    return Scenario(
        name=f"HND -> NHD, {shown_bytes(cell_bytes)} cells, {'staged' if staged else 'direct'}",
        run_bytes=cell_bytes,
        layers=16,
        heads=8,
        cell_bytes=cell_bytes,
        producer=Side(),
        consumer=Side(tokens_first=True),
        most_bytes=min(most_bytes, cell_bytes * 2 * _MOST_DESCRIPTORS),
        pool_bytes=pool_bytes,
        staged=staged,
    )
