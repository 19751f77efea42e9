"""The plan compared with the installed vLLM's functions for the same questions, where both have an answer.

They need sizes that divide, and give out replicas by a rule of their own: equal then are the heads that every rank gets
and how evenly ranks are read, not the ranks.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping, compute_tp_mapping
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import MambaConvSplitInfo
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvferry.plan.cost import Costs
from kvferry.plan.descriptors import route_tables
from kvferry.plan.planner import plan_engine, plan_transfer
from kvferry.plan.transfer_plan import Route, TransferPlan
from tests.plan.engines import CONV_CELL_BYTES, STATE_HEAD_BYTES, sharded

NO_POOL = Costs(staged_run_bytes=0)
POWERS = (1, 2, 4, 8)


def topology(tp: int, rank: int, heads: int, *, is_mla: bool = False, dcp: int = 1) -> Any:
    return TransferTopology(
        tp_rank=rank,
        tp_size=tp,
        block_size=4,
        engine_id="D",
        is_mla=is_mla,
        is_mamba=False,
        total_num_kv_heads=heads,
        attn_backends=[],
        dcp_size=dcp,
    )


def mapping(d_tp: int, p_tp: int, rank: int, heads: int, specs: tuple[type, ...] = (FullAttentionSpec,)) -> TPMapping:
    return compute_tp_mapping(topology(d_tp, rank, heads), p_tp, specs)


def of_group(route: Route, group: int) -> list[Any]:
    return [item for item in route.slices if item.tokens.group == group]


def sources(plan: TransferPlan, group: int = 0) -> tuple[int, ...]:
    return tuple(route.worker for route in plan.routes if of_group(route, group))


def held(tp: int, heads: int, rank: int) -> set[int]:
    if tp > heads:
        return {rank * heads // tp}
    return set(range(rank * heads // tp, (rank + 1) * heads // tp))


@given(d_tp=st.sampled_from(POWERS), p_tp=st.sampled_from(POWERS), heads=st.sampled_from(POWERS))
def test_compute_tp_mapping_gives_every_rank_the_same_heads_from_as_many_ranks(
    d_tp: int, p_tp: int, heads: int
) -> None:
    plans = plan_engine(sharded("D", tp=d_tp, heads=heads), sharded(tp=p_tp, heads=heads))
    ours: Counter[int] = Counter()
    theirs: Counter[int] = Counter()
    for rank, plan in enumerate(plans):
        ranks = mapping(d_tp, p_tp, rank, heads).source_ranks_per_group[0]
        assert len(sources(plan)) == len(ranks)
        wanted = held(d_tp, heads, rank)
        read = {
            head for route in plan.routes for item in route.slices for head in range(item.heads.start, item.heads.stop)
        }
        assert read == wanted <= {head for source in ranks for head in held(p_tp, heads, source)}
        if p_tp <= heads:
            assert sources(plan) == ranks, "where nothing is replicated there is no choice"
        ours.update(sources(plan))
        theirs.update(ranks)
    assert max(ours.values()) <= max(theirs.values()), "no producer is read more often"


@given(d_tp=st.sampled_from(POWERS), p_tp=st.sampled_from(POWERS), heads=st.sampled_from(POWERS))
def test_compute_tp_mapping_has_the_same_slots_and_offsets(d_tp: int, p_tp: int, heads: int) -> None:
    plans = plan_engine(sharded("D", tp=d_tp, heads=heads), sharded(tp=p_tp, heads=heads))
    for rank, plan in enumerate(plans):
        theirs = mapping(d_tp, p_tp, rank, heads)
        own = len(held(d_tp, heads, rank))
        for route in plan.routes:
            for item in route.slices:
                if route.worker in theirs.rank_to_attention_slot:
                    slot = theirs.rank_to_attention_slot[route.worker]
                    assert item.local_heads.start == slot * len(item.heads)
                if p_tp <= heads:
                    assert item.remote_heads.start == theirs.rank_offset_factor * own


@pytest.mark.parametrize(("d_tp", "p_tp", "heads"), [(1, 2, 1), (2, 4, 2), (1, 4, 2), (2, 8, 4), (2, 1, 4), (4, 2, 1)])
def test_compute_tp_mapping_reads_states_from_the_same_ranks(d_tp: int, p_tp: int, heads: int) -> None:
    consumer, producer = (sharded(name, tp=tp, heads=heads, model="hybrid") for name, tp in (("D", d_tp), ("P", p_tp)))
    for rank, plan in enumerate(plan_engine(consumer, producer)):
        theirs = mapping(d_tp, p_tp, rank, heads, (FullAttentionSpec, MambaSpec))
        # Sub-projections of at least a channel a rank; temporal heads may be fewer than ranks, and are then replicas.
        channels = tuple(
            route.worker for route in plan.routes if any(item.local.kind == "conv.x" for item in route.slices)
        )
        assert channels == theirs.source_ranks_per_group[1]
        assert len(sources(plan, 0)) == len(theirs.source_ranks_per_group[0])
        assert {route.worker for route in plan.routes if route.slices} >= set(channels)


@pytest.mark.parametrize(("d_tp", "p_tp"), [(1, 1), (4, 2), (8, 2), (2, 4), (1, 8)])
def test_tp_ratio_and_target_ranks(d_tp: int, p_tp: int) -> None:
    plans = plan_engine(sharded("D", tp=d_tp, heads=8), sharded(tp=p_tp, heads=8))
    for rank, plan in enumerate(plans):
        theirs = topology(d_tp, rank, 8)
        ratio = theirs.tp_ratio(p_tp)
        assert {route.expected for route in plan.routes} == {max(1, ratio)}
        assert len(plan.routes) == max(1, -ratio)
        assert [route.worker for route in plan.routes] == theirs.handshake_target_ranks(p_tp)
        info = EngineTransferInfo(
            remote_tp_size=p_tp, remote_block_len=1, remote_block_size=4, remote_physical_blocks_per_logical=1
        )
        assert theirs.register_remote_engine("P", info) is theirs.register_remote_engine("P", info)
        assert [route.worker for route in plan.routes] == theirs.target_remote_ranks("P")


@pytest.mark.parametrize("there", [1, 2, 4])
def test_block_size_ratio(there: int) -> None:
    (route,) = plan_transfer(sharded("D"), 0, sharded(block_tokens=there)).routes
    tokens = route.slices[0].tokens
    assert tokens.positions(tokens.local) == topology(1, 0, 4).block_size_ratio(there)


@pytest.mark.parametrize(("d_dcp", "p_dcp"), [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4), (8, 2)])
def test_dcp_source_ranks_and_consumer_count(d_dcp: int, p_dcp: int) -> None:
    consumer = sharded("D", tp=d_dcp, dcp=d_dcp, model="mla")
    for rank, plan in enumerate(plan_engine(consumer, sharded(tp=p_dcp, dcp=p_dcp, model="mla"))):
        theirs = topology(d_dcp, rank, 1, is_mla=True, dcp=d_dcp)
        assert [route.worker for route in plan.routes] == theirs.dcp_source_ranks(p_dcp, p_dcp)
        assert {route.expected for route in plan.routes} == {theirs.dcp_consumer_count(p_dcp, p_dcp)}


@pytest.mark.parametrize(("d_tp", "p_tp"), [(2, 4), (1, 4), (4, 2), (4, 1), (2, 2)])
def test_sub_projections_of_a_convolution_state(d_tp: int, p_tp: int) -> None:
    """Their offset in P's page, and their length."""
    parts = ("conv.x", "conv.B", "conv.C")
    sizes = {"conv.x": 16, "conv.B": 8, "conv.C": 8}
    local = tuple(count // d_tp for count in sizes.values())
    ssm_bytes = 4 // d_tp * STATE_HEAD_BYTES
    theirs = MambaConvSplitInfo(
        conv_rows=3,
        local_proj_dims=local,
        conv_dtype_size=2,
        ssm_sizes=(sum(local) * CONV_CELL_BYTES, ssm_bytes),
    )
    ratio = topology(d_tp, 0, 4).tp_ratio(p_tp)
    model = {"layers": 1, "model": "state"}
    for plan in plan_engine(sharded("D", tp=d_tp, **model), sharded(tp=p_tp, **model)):  # type: ignore[arg-type]
        for route in plan.routes:
            page = min(item.remote.base for item in route.slices)
            found = [
                (item.remote.base + item.remote_heads.start * CONV_CELL_BYTES - page, item.state_bytes)
                for kind in parts
                for item in route.slices
                if item.local.kind == kind
            ]
            assert found == theirs.remote_conv_offsets(plan.worker % max(1, ratio), ratio)


@pytest.mark.parametrize(("p_tp", "heads"), [(2, 4), (4, 4), (4, 2), (2, 1)])
def test_split_handles_of_attention(p_tp: int, heads: int) -> None:
    """The local halves, quarters … that vLLM's worker would prepare are the local rows of the routes."""
    plan = plan_transfer(sharded("D", heads=heads, layers=1), 0, sharded(tp=p_tp, heads=heads, layers=1), NO_POOL)
    local = plan.routes[0].slices[0].local
    blocks = [[local.base + block * local.block_stride, local.block_stride, 0] for block in range(local.blocks)]
    fields = SimpleNamespace(
        _group_spec_types=(FullAttentionSpec,),
        _ple_region_index=None,
        _logical_num_blocks=local.blocks,
        _fa_desc_replicated=lambda count, ratio: [False] * count,
    )
    theirs = mapping(1, p_tp, 0, heads)
    handles = NixlBaseConnectorWorker._build_local_splits_from_plan(
        fields, theirs, torch.tensor(blocks).numpy(), len(blocks)
    )
    reading = {route.worker: route for route in plan.routes if route.slices}
    for rank, handle in zip(theirs.all_source_ranks, handles, strict=True):
        (table,) = route_tables(reading[rank], 0, 0)
        ours = [
            (address + step * stride, length, 0)
            for address, length, _, stride, count in table.local_rows.tolist()
            for step in range(count)
        ]
        assert ours == [tuple(entry) for entry in handle]


def test_the_engines_of_these_tests_hold_what_vllms_ranks_hold() -> None:
    for tp in POWERS:
        for rank, of in enumerate(sharded(tp=tp, heads=4).workers):
            heads = {head for one in of.tensors for head in range(one.heads.start, one.heads.stop)}
            assert heads == held(tp, 4, rank)
