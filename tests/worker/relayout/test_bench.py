"""The variants that bench/relayout.py compares have the same result."""

from __future__ import annotations

import pytest
import torch
from bench.relayout_waves import Memory, Setup, layer_by_layer, moved_bytes, setups, shuffled, waves

from kvferry.worker.relayout.reference import ReferenceRelayout

TOKENS = 192


@pytest.mark.parametrize("setup", setups(), ids=lambda setup: setup.name)
def test_the_relayout_and_layer_by_layer_fill_the_same_cache(setup: Setup) -> None:
    blocks = setup.local.blocks(TOKENS)
    memory = Memory.of(setup, 1, 8 * 2 * TOKENS * setup.remote.block_bytes, blocks, torch.device("cpu"))
    tables = list(waves(setup, memory, TOKENS))
    assert len(tables) == 1
    chunk = int(tables[0].rows[1, 0] - tables[0].rows[0, 0])
    received = memory.pool[:chunk].clone().view(-1, setup.remote.block_bytes)
    memory.pool[chunk : 2 * chunk] = memory.pool[:chunk]
    ReferenceRelayout([memory.pool], [memory.cache]).try_start(tables[0])
    expected = torch.zeros_like(memory.cache)
    theirs = torch.arange(setup.remote.blocks(TOKENS))
    layer_by_layer(setup, received, expected, theirs, torch.from_numpy(shuffled(blocks)))
    assert expected.any()
    assert torch.equal(memory.cache, expected)


def test_a_request_of_many_waves_reads_and_writes_all_of_its_bytes() -> None:
    setup = setups()[0]
    memory = Memory.of(setup, 2, 8 * 1024 * 1024, 20, torch.device("cpu"))
    tables = list(waves(setup, memory, 320))
    assert len(tables) == 3
    assert sum(map(moved_bytes, tables)) == 2 * 320 * 2 * 2 * 8 * 128 * 2
    assert len({int(table.rows[0, 0]) for table in tables}) == 3, "each in its own part of the pool"
