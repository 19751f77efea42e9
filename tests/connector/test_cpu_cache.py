"""Caches of vLLM's own CPU attention: cells hold the bytes that it wrote, and moved sequences give the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.connector.layout.discovery import groups_of
from kvferry.plan.blocks import RequestBlocks
from kvferry.protocol.geometry import Place, Topology
from tests.connector.cpu_cache import (
    ALONE,
    KINDS,
    KV_HEADS,
    PLAIN_KINDS,
    QUERY_HEADS,
    Cache,
    Kind,
    holds,
    random,
    slots_of,
)
from tests.connector.recorded_handover import move_by_plan
from tests.plan.samples import engine, worker

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
plain_kinds = pytest.mark.parametrize("kind", PLAIN_KINDS, ids=str)


@plain_kinds
def test_a_token_of_a_head_is_where_the_description_says_with_the_very_bytes_that_were_written(
    kind: Kind,
) -> None:
    for block_tokens in (32, 64, 128):
        cache = Cache(kind, num_blocks=4, tokens=block_tokens)
        assert [tensor.kind for tensor in cache.tensors] == ["k", "v"]
        tokens = block_tokens + 5
        written = {"k": random(kind, tokens), "v": random(kind, tokens, seed=1)}
        cache.write(written["k"], written["v"], slots_of([2, 1], tokens, block_tokens))
        for token in (0, 1, block_tokens - 1, block_tokens, tokens - 1):
            for head in range(KV_HEADS):
                for name, source in written.items():
                    where = cache.where(
                        name, [2, 1][token // block_tokens], head, token % block_tokens
                    )
                    assert holds(kind, cache.bytes[where], source[token, head])


def engine_of(caches: list[Cache]) -> Any:
    workers = [
        worker(cache.caches.tensors, Place(tp=rank))
        for rank, cache in enumerate(caches)
    ]
    return engine(
        workers=workers,
        topology=Topology(tp=len(caches)),
        groups=groups_of(caches[0].config),
    )


def move(
    sources: list[Cache],
    targets: list[Cache],
    theirs: list[int],
    ours: list[int],
    tokens: int,
) -> int:
    """Carry out the workers' plan, with memmove in place of NIXL. Returns the bytes that moved."""
    consumer, producer = engine_of(targets), engine_of(sources)
    request = RequestBlocks(
        local=[ours],
        remote=[theirs],
        first_token=0,
        stop_token=tokens,
        num_tokens=tokens,
    )
    return move_by_plan(consumer, producer, request)


@every_kind
def test_a_sequence_moved_by_the_plan_gives_the_same_attention_from_other_blocks_of_another_cache(
    kind: Kind,
) -> None:
    tokens = 2 * 32 + 9
    key, value = random(kind, tokens), random(kind, tokens, seed=1)
    query = random(kind, 5, QUERY_HEADS, seed=2)
    source, target = Cache(kind, num_blocks=5), Cache(kind, num_blocks=9)
    theirs, ours = [4, 1, 3], [7, 8, 2]
    source.write(key, value, slots_of(theirs, tokens))
    expected = source.attend(query, theirs, tokens)
    assert bool(torch.isfinite(expected).all())
    target.bytes.fill_(0)
    assert not torch.equal(target.attend(query, ours, tokens), expected)
    before = target.bytes.clone()
    moved = move([source], [target], theirs, ours, tokens)
    assert (
        moved == 2 * 3 * KV_HEADS * 32 * 2 * kind.head_size * source.view.element_size()
    )
    assert torch.equal(target.attend(query, ours, tokens), expected)
    written = torch.zeros(len(before), dtype=torch.bool)
    for tensor in target.caches.tensors:
        for block in ours:
            start = tensor.base + block * tensor.block_stride - target.bytes.data_ptr()
            written[start : start + tensor.block_extent] = True
    assert torch.equal(target.bytes[~written], before[~written])


@every_kind
@pytest.mark.parametrize(("here", "there"), [(1, 3), (3, 1)])
def test_ranks_of_another_number_give_the_same_attention(
    kind: Kind, here: int, there: int
) -> None:
    tokens = 32 + 9
    sources, targets = (
        [
            Cache(kind, num_blocks=4, sharding=replace(ALONE, rank=rank, size=size))
            for rank in range(size)
        ]
        for size in (there, here)
    )
    key, value = random(kind, tokens), random(kind, tokens, seed=1)
    query = random(kind, 2, QUERY_HEADS, seed=2)
    for sharded in (sources, targets):
        for cache in sharded:
            cache.bytes.fill_(0)
    for cache in sources:
        held = slice(
            cache.sharding.rank * cache.heads, (cache.sharding.rank + 1) * cache.heads
        )
        cache.write(
            key[:, held].contiguous(),
            value[:, held].contiguous(),
            slots_of([3, 1], tokens),
        )
    move(sources, targets, [3, 1], [1, 2], tokens)

    def attend(caches: list[Cache], blocks: list[int]) -> torch.Tensor:
        shares = query.chunk(len(caches), dim=1)
        return torch.cat(
            [
                cache.attend(share.contiguous(), blocks, tokens)
                for cache, share in zip(caches, shares, strict=True)
            ],
            dim=1,
        )

    assert torch.equal(attend(targets, [1, 2]), attend(sources, [3, 1]))
