"""Decode context parallelism: the caches of which a worker holds a share, and the reads between workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.sharding import Sharding
from kvferry.plan.planner import plan_engine
from kvferry.protocol.geometry import Interleave, Place, Topology
from tests.connector.caches import config_of, full, group, layout_of_packing, views_of
from tests.connector.state_models import orient
from tests.plan.samples import engine, worker

RANKS = 2


def sharing(config: Any, views: Any, rank: int) -> Any:
    """The tensors of one of `RANKS` ranks that have the same head, and every second 16 tokens each."""
    block_layouts = dict.fromkeys(views, layout_of_packing("cpu_attn/vec"))
    sharding = Sharding(total_heads=1, rank=rank, size=RANKS)
    share = Interleave(ranks=RANKS, rank=rank, run_tokens=16)
    return discover(views, config, block_layouts, sharding, interleave=share).tensors


def test_attention_is_shared_out_and_states_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    orient(monkeypatch, "DS")
    config = config_of(group(full(num_kv_heads=1), "attention"))
    views = views_of(config)
    shapes: Any = ((16, 3), (2, 4, 4))
    state = MambaSpec(block_size=32, shapes=shapes, dtypes=(torch.float32, torch.float32))
    config.kv_cache_groups.append(group(state, "state"))
    views["state"] = torch.zeros(config.num_blocks, 1, 1, state.page_size_bytes, dtype=torch.int8)
    held = {(tensor.layer, tensor.interleave) for tensor in sharing(config, views, rank=1)}
    assert held == {("attention", Interleave(ranks=RANKS, rank=1, run_tokens=16)), ("state", Interleave())}


def test_a_consumer_that_holds_every_token_reads_from_every_rank_that_shares_them_out() -> None:
    config = config_of(group(full(num_kv_heads=1)))
    ranks = [worker(sharing(config, views_of(config), rank), Place(tp=rank, dcp=rank)) for rank in range(RANKS)]
    producer = engine(workers=ranks, topology=Topology(tp=RANKS, dcp=RANKS), groups=groups_of(config))
    views = views_of(config)
    alone = Sharding(total_heads=1, rank=0, size=1)
    tensors = discover(views, config, dict.fromkeys(views, layout_of_packing("cpu_attn/vec")), alone).tensors
    (plan,) = plan_engine(engine(*tensors, groups=groups_of(config)), producer)
    assert [route.worker for route in plan.routes] == [0, 1]
