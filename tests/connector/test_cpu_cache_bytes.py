"""vLLM's own CPU attention writes a cache; kvferry's cells are then checked byte by byte.

This test lets `block_layout` believe strides of CPU attention: a cell of K or V holds the bytes of one token
and head as they were given to the write. Where the backend packs a block as it likes, a cell is a whole (block, head):
it must hold everything of that and nothing of any other.
"""

from __future__ import annotations

import pytest
import torch

from tests.connector.cpu_cache import (
    KINDS,
    KV_HEADS,
    PLAIN_KINDS,
    QUERIES_PER_HEAD,
    QUERY_HEADS,
    Cache,
    Kind,
    holds,
    random,
    slots_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
plain_kinds = pytest.mark.parametrize("kind", PLAIN_KINDS, ids=str)


def changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(before != after).ravel()


@plain_kinds
def test_a_token_of_a_head_is_where_the_description_says_with_the_very_bytes_that_were_written(kind: Kind) -> None:
    for block_tokens in (32, 64, 128):
        cache = Cache(kind, num_blocks=4, tokens=block_tokens)
        assert [tensor.kind for tensor in cache.tensors] == ["k", "v"]
        tokens = block_tokens + 5
        written = {"k": random(kind, tokens), "v": random(kind, tokens, seed=1)}
        cache.write(written["k"], written["v"], slots_of([2, 1], tokens, block_tokens))
        for token in (0, 1, block_tokens - 1, block_tokens, tokens - 1):
            for head in range(KV_HEADS):
                for name, source in written.items():
                    where = cache.where(name, [2, 1][token // block_tokens], head, token % block_tokens)
                    assert holds(kind, cache.bytes[where], source[token, head])


@plain_kinds
def test_one_token_more_changes_its_own_cells_and_no_other_byte(kind: Kind) -> None:
    cache = Cache(kind, num_blocks=4)
    before = cache.bytes.clone()
    cache.write(random(kind, 1), random(kind, 1, seed=1), [3 * 32 + 17])
    own = [cache.where(name, 3, head, 17) for name in ("k", "v") for head in range(KV_HEADS)]
    assert set(changed(before, cache.bytes).tolist()) <= set(torch.cat(own).tolist())


@every_kind
@pytest.mark.parametrize("head", range(KV_HEADS))
def test_writing_tokens_of_one_head_changes_bytes_of_its_own_cells_only(kind: Kind, head: int) -> None:
    cache = Cache(kind, num_blocks=5)
    blocks, tokens = [3, 1], 32 + 7
    key, value = random(kind, tokens), random(kind, tokens, seed=1)
    cache.write(key, value, slots_of(blocks, tokens))
    before = cache.bytes.clone()
    key[:, head], value[:, head] = random(kind, tokens, seed=2)[:, head], random(kind, tokens, seed=3)[:, head]
    cache.write(key, value, slots_of(blocks, tokens))
    where = set(changed(before, cache.bytes).tolist())
    cells = [set(cache.cells(block, head).tolist()) for block in blocks]
    assert where <= cells[0] | cells[1]
    assert len(where & cells[0]) > len(cells[0]) / 2, "new numbers change most bytes of a full block"


@every_kind
def test_a_full_block_fills_its_cells_to_the_last_byte_and_touches_nothing_else(kind: Kind) -> None:
    """Equal K and V make equal cells whatever the memory held before, so every byte of a cell is written."""
    key, value = random(kind, 32), random(kind, 32, seed=1)
    seen = []
    for fill in (0x55, 0xAA):
        cache = Cache(kind, num_blocks=4)
        cache.bytes.fill_(fill)
        cache.write(key, value, slots_of([2], 32))
        cells = torch.cat([cache.cells(2, head) for head in range(KV_HEADS)])
        assert len(set(cells.tolist())) == len(cells)
        seen.append(cache.bytes[cells].clone())
        cache.bytes[cells] = fill
        assert bool((cache.bytes == fill).all())
    assert torch.equal(*seen)


@every_kind
def test_every_cell_counts_for_the_attention(kind: Kind) -> None:
    """Otherwise the tests below would also pass with a cell left out."""
    tokens = 2 * 32
    cache = Cache(kind, num_blocks=4)
    cache.write(random(kind, tokens), random(kind, tokens, seed=1), slots_of([3, 1], tokens))
    query = random(kind, 1, QUERY_HEADS, seed=2)
    expected = cache.attend(query, [3, 1], tokens)
    for block in (3, 1):
        for head in range(KV_HEADS):
            cells = cache.cells(block, head)
            kept = cache.bytes[cells].clone()
            cache.bytes[cells] = 0
            differs = (cache.attend(query, [3, 1], tokens) != expected).any(dim=2).ravel().tolist()
            assert [n // QUERIES_PER_HEAD == head for n in range(QUERY_HEADS)] == differs
            cache.bytes[cells] = kept
