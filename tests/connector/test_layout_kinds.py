"""Models of all kinds: kvferry's descriptions of their caches, compared with vLLM's views and managers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.sharding import Sharding
from kvferry.plan.blocks import first_needed
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.geometry import Interleave, Range
from kvferry.protocol.handshake import CacheGroup
from tests.connector.caches import (
    ALONE,
    all_bytes_of,
    config_of,
    described,
    full,
    group,
    layout_of_packing,
    storage_of,
    views_of,
)
from tests.connector.recorded import RECORDED, attention, latent
from tests.connector.recorded_engine import RecordedEngine, skipped_tokens
from tests.connector.recorded_handover import described_engine, hand_over
from tests.connector.state_models import orient

every_model = pytest.mark.parametrize("name", RECORDED)
POLICIES = {
    "Llama": ["full"],
    "DeepSeek-V3.2": ["full"],
    "Gemma-3": ["window", "window", "full"],
    "Llama-4": ["chunk", "chunk", "chunk", "full"],
    "Nemotron-H": ["state", "state", "full"],
    "Llama with a drafter": ["full"],
}
KINDS = {
    "mla": {"mla"},
    "k_cache": {"indexer"},
    "attn": {"k", "v"},
}


@pytest.fixture(autouse=True)
def channels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    orient(monkeypatch, "DS")


@every_model
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_groups_layers_and_kinds_are_those_of_the_model(name: str, layout: str) -> None:
    found = RecordedEngine(RECORDED[name], tp=2, layout=layout)
    policies = [reported.policy for reported in found.groups]
    assert policies == POLICIES.get(name, ["state", "state", "state", "full"])
    for one in found.workers:
        reported: dict[str, set[str]] = {}
        for tensor in one.caches.tensors:
            reported.setdefault(tensor.layer, set()).add(tensor.kind)
            assert tensor.layer in one.config.kv_cache_groups[tensor.group].layer_names
        states = {
            layer: {*model.projections, *(["ssm"] if model.temporal else [])}
            for layer, model in RECORDED[name].states.items()
        }
        assert reported == {
            layer: states.get(layer) or KINDS[layer.rsplit(".", 1)[-1]]
            for layer in RECORDED[name].specs(2)
        }


@every_model
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_one_allocation_is_registered_once_and_the_cells_of_a_group_overlap_nowhere(
    name: str, layout: str
) -> None:
    """Groups overlay one another: a block belongs to one of them at a time."""
    (one,) = RecordedEngine(RECORDED[name], layout=layout).workers
    (region,) = one.caches.regions()
    assert region.length == len(storage_of(next(iter(one.views.values()))))
    for index in range(len(one.config.kv_cache_groups)):
        mine = np.concatenate(
            [
                all_bytes_of(tensor)
                for tensor in one.caches.tensors
                if tensor.group == index
            ]
        )
        assert len(np.unique(mine)) == len(mine)
        assert region.address <= mine.min()
        assert mine.max() < region.address + region.length


@every_model
@pytest.mark.parametrize(
    ("producer", "consumer", "conv"), [(1, 2, "DS"), (2, 1, "DS"), (4, 2, "SD")]
)
def test_a_sequence_arrives_where_the_layers_read_it(
    name: str, producer: int, consumer: int, conv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution's columns of a channel, or its channels of a column, lie together."""
    orient(monkeypatch, conv)
    source, target = (
        RecordedEngine(RECORDED[name], producer),
        RecordedEngine(RECORDED[name], consumer),
    )
    hand_over(source, target, num_tokens=150)


@pytest.mark.parametrize("name", ["Nemotron-H", "Granite, one group"])
def test_a_single_group_on_a_rank_that_may_be_any_is_paired_with_equal_ranks_only(
    name: str,
) -> None:
    """It is the rank's own or a copy of the only one: kvferry does not guess."""
    known = RECORDED[name]
    unsure = replace(
        known,
        states={
            layer: replace(model, head_groups=None)
            for layer, model in known.states.items()
        },
    )
    hand_over(RecordedEngine(unsure, 4), RecordedEngine(unsure, 4), num_tokens=40)
    with pytest.raises(PlanRefused) as refused:
        hand_over(RecordedEngine(unsure, 4), RecordedEngine(unsure, 1), num_tokens=40)
    assert {reason.field for reason in refused.value.reasons} == {
        f"{layer}/{kind}.format"
        for layer in unsure.states
        for kind in ("conv.B", "conv.C")
    }


def test_copies_of_the_only_group_are_read_from_the_ranks_in_turn() -> None:
    source, target = (
        RecordedEngine(RECORDED["Granite, one group"], tp) for tp in (4, 2)
    )
    held = {
        tensor.heads
        for one in source.workers
        for tensor in one.caches.tensors
        if tensor.kind == "conv.B"
    }
    assert held == {Range(0, 12)}
    read_from = {
        route.place.tp
        for plan in plan_engine(
            described_engine(target, "C"), described_engine(source, "P")
        )
        for route in plan.routes
        for item in route.slices
        if item.local.kind == "conv.B"
    }
    assert len(read_from) == 2


@pytest.mark.parametrize("name", ["Gemma-3", "Nemotron-H"])
@pytest.mark.parametrize(("producer", "consumer"), [(3, 1), (1, 3), (3, 2)])
def test_stages_that_lack_all_layers_of_a_group_keep_its_place(
    name: str, producer: int, consumer: int
) -> None:
    source, target = (
        RecordedEngine(RECORDED[name], pp=producer),
        RecordedEngine(RECORDED[name], pp=consumer),
    )
    assert any(
        not reported.layer_names
        for config in source.configs + target.configs
        for reported in config.kv_cache_groups
    )
    hand_over(source, target, num_tokens=100)


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 127, 128, 129])
def test_of_chunked_attention_only_the_last_chunk_is_moved(num_tokens: int) -> None:
    """Chunks of 64 tokens in blocks of 32, on one layer of each of three groups; one layer holds everything."""
    source, target = (
        RecordedEngine(RECORDED["Llama-4"]),
        RecordedEngine(RECORDED["Llama-4"]),
    )
    moved = hand_over(source, target, num_tokens)
    tokens = -(-num_tokens // 32) * 32
    skipped = num_tokens // 64 * 64
    assert moved == (tokens + 3 * (tokens - skipped)) * 4 * 2 * 8 * 2


@pytest.mark.parametrize("num_tokens", [40, 71, 72, 73, 150])
def test_of_a_sliding_window_only_its_blocks_are_moved(num_tokens: int) -> None:
    source, target = (
        RecordedEngine(RECORDED["Gemma-3"]),
        RecordedEngine(RECORDED["Gemma-3"]),
    )
    moved = hand_over(source, target, num_tokens)
    tokens = -(-num_tokens // 32) * 32
    skipped = max(0, num_tokens - 39) // 32 * 32
    assert moved == (2 * tokens + 4 * (tokens - skipped)) * 4 * 2 * 8 * 2


def test_of_a_state_only_the_block_after_the_last_token_is_moved_whatever_the_drafts() -> (
    None
):
    model = RECORDED["Qwen3-Next, prefix caching and drafts"]
    source, target = RecordedEngine(model), RecordedEngine(model)
    ids = source.place_sequence(100, range(1, 40)).blocks[0]
    assert [block != 0 for block in ids] == [False, False, False, True, True, True]
    moved = hand_over(source, target, num_tokens=100)
    assert (
        moved
        == 3 * model.specs(1)["layers.0.mixer"].state_content_size_bytes
        + 128 * 4 * 2 * 8 * 2
    )


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        (
            attention(1, SinkFullAttentionSpec, sink_len=32),
            CacheGroup(policy="full", block_tokens=32),
        ),
        (attention(1, sliding_window=64), CacheGroup(policy="full", block_tokens=32)),
        (
            attention(1, attention_chunk_size=64),
            CacheGroup(policy="full", block_tokens=32),
        ),
        (
            attention(1, SlidingWindowSpec, sliding_window=64, extra_retained_tokens=2),
            CacheGroup(policy="window", block_tokens=32, window_tokens=66),
        ),
        (latent(), CacheGroup(policy="full", block_tokens=16)),
        (attention(1, non_causal=True), CacheGroup(policy="whole", block_tokens=32)),
        (
            replace(latent(), non_causal=True),
            CacheGroup(policy="whole", block_tokens=16),
        ),
        (
            UniformTypeKVCacheSpecs(
                block_size=32,
                kv_cache_specs={
                    "layers.0": attention(1),
                    "layers.1": attention(2, non_causal=True),
                },
            ),
            CacheGroup(policy="whole", block_tokens=32),
        ),
        (
            SlidingWindowMLASpec(
                block_size=16,
                num_kv_heads=1,
                head_size=24,
                dtype=torch.bfloat16,
                sliding_window=32,
            ),
            CacheGroup(policy="window", block_tokens=16, window_tokens=32),
        ),
        (
            attention(1, ChunkedLocalAttentionSpec, attention_chunk_size=64),
            CacheGroup(policy="chunk", block_tokens=32, window_tokens=64),
        ),
    ],
    ids=[
        "sinks",
        "a window kept whole",
        "chunks kept whole",
        "retained tokens",
        "MLA",
        "a prefix LM",
        "a prefix LM of MLA",
        "a layer of a prefix LM",
        "a window of MLA",
        "chunks",
    ],
)
def test_a_group_says_which_tokens_it_holds(spec: Any, reported: CacheGroup) -> None:
    assert groups_of(config_of(group(spec))) == (reported,)
    if reported.policy in ("window", "chunk"):
        assert [first_needed(reported, token) for token in range(300)] == [
            skipped_tokens(spec, n) for n in range(300)
        ]


def test_ranks_that_share_tokens_out_say_so_of_the_caches_that_vllm_shards() -> None:
    """Decode context parallelism: of the drafter's cache every rank holds all tokens."""
    share = Interleave(ranks=2, rank=1, run_tokens=4)
    config = config_of(
        group(full(), "layers.0"), group(full(dcp_sharded=False), "draft.0")
    )
    views = views_of(config)
    found = discover(
        views,
        config,
        dict.fromkeys(views, layout_of_packing("gpu_rows")),
        ALONE,
        interleave=share,
    )
    reported = {(tensor.layer, tensor.interleave) for tensor in found.tensors}
    assert reported == {("layers.0", share), ("draft.0", Interleave())}
    assert {tensor.block_tokens for tensor in found.tensors} == {32}


@pytest.mark.parametrize(("total", "tp", "dcp"), [(2, 4, 2), (1, 4, 4), (2, 8, 4)])
def test_ranks_that_share_the_tokens_of_a_head_hold_the_same_head(
    total: int, tp: int, dcp: int
) -> None:
    """vLLM lets ranks share tokens out that would otherwise hold copies of a head."""
    config = config_of(group(full(num_kv_heads=1), "layers.0"))
    views = views_of(config)
    held: dict[Range, set[int]] = {}
    for rank in range(tp):
        share = Interleave(ranks=dcp, rank=rank % dcp, run_tokens=4)
        one = discover(
            views,
            config,
            {"layers.0": layout_of_packing("gpu_rows")},
            Sharding(total, rank, tp),
            interleave=share,
        )
        (k, _) = one.tensors
        held.setdefault(k.heads, set()).add(k.interleave.rank)
    assert held == {Range(head, head + 1): set(range(dcp)) for head in range(total)}


def test_states_are_never_shared_out_by_tokens() -> None:
    engine_ = RecordedEngine(RECORDED["Nemotron-H"])
    (one,) = engine_.workers
    share = Interleave(ranks=2, rank=1, run_tokens=4)
    block_layouts = dict.fromkeys(one.views, layout_of_packing("gpu_rows"))
    found = discover(
        one.views, one.config, block_layouts, ALONE, interleave=share, head_groups=4
    )
    assert {x.interleave for x in found.tensors if "mixer" in x.layer} == {Interleave()}
    assert {x.interleave for x in found.tensors if "attn" in x.layer} == {share}


def test_layers_that_share_a_base_address_in_different_shapes_are_both_described() -> (
    None
):
    config = config_of(group(full(), "layers.0", "layers.1"))
    views = views_of(config)
    views["layers.1"] = views["layers.0"][:, :, :, :].as_strided(
        (5, 2, 32, 16), (1024, 16, 32, 1)
    )
    assert len(described(config, views, "gpu_rows").tensors) == 4


@pytest.mark.skipif(
    not hasattr(SlidingWindowSpec, "num_retained_tokens"),
    reason="this vLLM's workers keep every entry of a window's block table",
)
@pytest.mark.parametrize("extra", [0, 2])
def test_all_entries_of_a_windows_block_table_that_vllms_workers_keep_are_loaded(
    extra: int,
) -> None:
    """0.33's second model runner nulls what lies further below a step's first position."""
    spec = attention(
        1, SlidingWindowSpec, sliding_window=64, extra_retained_tokens=extra
    )
    (reported,) = groups_of(config_of(group(spec)))
    for position in range(300):
        kept_from = max(0, position - spec.num_retained_tokens)
        assert first_needed(reported, position) <= kept_from


@pytest.mark.skipif(
    "is_draft" not in {field.name for field in fields(FullAttentionSpec)},
    reason="this vLLM does not mark the layers of drafters",
)
def test_layers_that_are_marked_as_a_drafters_are_carried_like_the_others() -> None:
    def caches(**marked: bool) -> Any:
        config = config_of(group(full(), "layers.0"), group(full(**marked), "draft.0"))
        views = views_of(config)
        tensors = described(config, views).tensors
        lowest = min(tensor.base for tensor in tensors)
        return [structs.replace(each, base=each.base - lowest) for each in tensors]

    assert caches(is_draft=True) == caches()
