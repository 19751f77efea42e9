"""kvferry's description of a cache, compared with the bytes of vLLM's own views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.sharding import Sharding
from kvferry.plan.planner import plan_engine, plan_transfer
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Format, PagedTensor, Place, Range, Topology
from kvferry.worker.caches import KvCaches
from tests.connector.caches import (
    all_bytes_of,
    bytes_of,
    config_of,
    described,
    full,
    group,
    views_of,
)
from tests.plan.samples import engine, worker

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
WHOLE_BLOCKS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Layouts in which the bytes of a block are contiguous."""


def covers_exactly(tensors: Sequence[PagedTensor], view: Any) -> bool:
    """Whether the cells of these tensors are exactly the bytes of the view, each once."""
    reported = np.concatenate([all_bytes_of(tensor) for tensor in tensors])
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size)[None, :] * stride).ravel()
    item = view.element_size()
    real = (
        view.data_ptr() + offsets[:, None] * item + np.arange(item)[None, :]
    ).ravel()
    return bool(np.array_equal(np.sort(reported), np.sort(real)))


def of_layer(caches: KvCaches, layer: str) -> list[PagedTensor]:
    return [tensor for tensor in caches.tensors if tensor.layer == layer]


@pytest.mark.parametrize("kernel_tokens", [32, 8])
def test_where_cpu_attention_packs_as_it_likes_a_head_of_a_kernel_block_is_a_cell(
    kernel_tokens: int,
) -> None:
    config = config_of(group(full()))
    views = views_of(config, kernel_block_sizes=[kernel_tokens])
    caches = described(config, views, "cpu_attn/amx")
    assert [tensor.name for tensor in caches.tensors] == [
        ("layers.0", "kv"),
        ("layers.1", "kv"),
    ]
    for tensor in caches.tensors:
        view = views[tensor.layer]
        assert (tensor.base, tensor.blocks) == (
            view.data_ptr(),
            5 * 32 // kernel_tokens,
        )
        assert (tensor.block_tokens, tensor.tile_tokens, tensor.tiles) == (
            kernel_tokens,
            kernel_tokens,
            1,
        )
        assert (tensor.heads, tensor.cell_bytes) == (
            Range(0, 2),
            kernel_tokens * 2 * 8 * 2,
        )
        assert tensor.format == Format(dtype="bfloat16", packing="cpu_attn/amx")
        assert covers_exactly([tensor], view)
        for block in range(tensor.blocks):
            assert [bytes_of(tensor, block, head, 0)[0] for head in range(2)] == [
                view[block, head].data_ptr() for head in range(2)
            ]


@pytest.mark.parametrize("layout", WHOLE_BLOCKS)
@pytest.mark.parametrize("heads", [1, 2])
def test_elsewhere_a_block_whose_bytes_lie_together_is_one_opaque_cell(
    layout: str, heads: int
) -> None:
    config = config_of(group(full(num_kv_heads=heads)), layout=layout)
    views = views_of(config, layout)
    for tensor in described(config, views, "flash_attn").tensors:
        view = views[tensor.layer]
        assert (tensor.tiles, tensor.heads, tensor.cell_bytes) == (
            1,
            Range(0, 1),
            32 * heads * 32,
        )
        assert [bytes_of(tensor, block, 0, 0)[0] for block in range(5)] == [
            view[block].data_ptr() for block in range(5)
        ]
        assert covers_exactly([tensor], view)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - set(WHOLE_BLOCKS)))
def test_a_block_whose_bytes_are_scattered_is_refused_by_layer_with_what_to_set(
    layout: str,
) -> None:
    config = config_of(group(full()), layout=layout)
    with pytest.raises(
        InvalidConfig,
        match=r"cache of layer layers.0 is .*set VLLM_KV_CACHE_LAYOUT to LBHNC",
    ):
        described(config, views_of(config, layout), "flash_attn")


def planned(
    layouts: tuple[str, str],
    packings: tuple[str, str] = ("flash_attn",) * 2,
    **spec: Any,
) -> Any:
    sides = []
    for layout, packing in zip(layouts, packings, strict=True):
        config = config_of(group(full(**spec)), layout=layout)
        views = views_of(config, layout)
        sides.append(
            engine(*described(config, views, packing).tensors, groups=groups_of(config))
        )
        del views
    return plan_transfer(sides[0], 0, sides[1])


def sharded_engine(tp: int, packing: str, model: Sharding, **spec: Any) -> Any:
    """An engine of `tp` workers that each hold `spec`."""
    config = config_of(group(full(**spec)))
    workers = []
    for rank in range(tp):
        tensors = described(
            config, views_of(config), packing, replace(model, rank=rank, size=tp)
        ).tensors
        workers.append(worker(tensors, Place(tp=rank)))
    return engine(workers=workers, topology=Topology(tp=tp), groups=groups_of(config))


@pytest.mark.parametrize("heads_first", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("tokens_first", ["LBNHC", "BLNHC"])
def test_opaque_blocks_of_other_inner_order_are_never_taken_for_equal(
    heads_first: str, tokens_first: str
) -> None:
    """They have the same size, and copying one over the other would give every head another head's tokens."""
    for pair in ((heads_first, tokens_first), (tokens_first, heads_first)):
        with pytest.raises(PlanRefused) as refused:
            planned(pair)
        assert refused.value.reasons[0].field == "layers.0/kv.format"
    assert planned((heads_first, tokens_first), num_kv_heads=1).routes, (
        "with one head there is only one order"
    )


@pytest.mark.parametrize(
    ("packings", "field"),
    [
        (("flash_attn", "flashinfer"), "layers.0/kv.format"),
        (("cpu_attn/amx", "cpu_attn/neon"), "layers.0/kv.format"),
        (("cpu_attn/amx", "flash_attn"), "tensor layers.0/kv"),
        (("cpu_attn/vec", "cpu_attn/amx"), "tensor layers.0/k"),
        (("cpu_attn/amx", "cpu_attn/vec"), "tensor layers.0/kv"),
    ],
)
def test_block_layouts_that_differ_are_refused(
    packings: tuple[str, str], field: str
) -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(("LBHNC", "LBHNC"), packings)
    assert refused.value.reasons[0].field == field


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("backend", "kind", "tile"),
    [("flashmla", "kv", 16), ("amx_mla", "kv", 16), ("cpu_mla", "mla", 1)],
)
def test_mla_is_one_head_that_everybody_holds_in_any_layout(
    layout: str, backend: str, kind: str, tile: int
) -> None:
    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
    )
    config = config_of(group(spec), layout=layout)
    views = views_of(config, layout)
    for rank in (0, 3):
        for tensor in described(
            config, views, backend, Sharding(total_heads=8, rank=rank, size=4)
        ).tensors:
            assert (tensor.kind, tensor.heads, tensor.cell_bytes) == (
                kind,
                Range(0, 1),
                tile * 24 * 2,
            )
            assert (tensor.tile_tokens, "tp" in tensor.format.packing) == (tile, False)
            assert covers_exactly([tensor], views[tensor.layer])


def test_a_layer_that_shares_anothers_cache_is_described_once() -> None:
    config = config_of(group(full()))
    views = views_of(config)
    config.kv_cache_groups[0].layer_names.append("layers.2")
    views["layers.2"] = views["layers.1"]
    assert [tensor.layer for tensor in described(config, views).tensors] == [
        "layers.0"
    ] * 2 + ["layers.1"] * 2


def test_layers_of_other_pipeline_stages_are_left_out_and_none_at_all_is_refused() -> (
    None
):
    config = config_of(group(full()))
    views = views_of(config)
    del views["layers.0"]
    assert [tensor.layer for tensor in described(config, views).tensors] == [
        "layers.1"
    ] * 2
    with pytest.raises(InvalidConfig, match=r"kv_caches is .*at least one layer"):
        discover({}, config, {}, Sharding(2, 0, 1))


def test_groups_that_are_not_transferred_do_not_count() -> None:
    window = SlidingWindowSpec(
        block_size=32,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.bfloat16,
        sliding_window=9,
    )
    config = config_of(
        group(full(), "kept.0", enable_kv_transfer=False), group(window, "window.0")
    )
    found = described(config, views_of(config)).tensors
    assert [(tensor.layer, tensor.group) for tensor in found] == [("window.0", 0)] * 2
    assert [group_.policy for group_ in groups_of(config)] == ["window"]


@pytest.mark.parametrize("packing", ["cpu_attn/vec", "cpu_attn/amx", "flash_attn"])
def test_a_single_head_that_may_be_any_is_paired_with_equal_ranks_only(
    packing: str,
) -> None:
    """Two ranks with one head each may hold two heads or copies of one: if layers differ, the configuration does not
    show which. With equal tensor-parallel sizes, equal ranks hold the same in either case."""
    unsure = Sharding(total_heads=2, rank=0, size=1, uniform=False)
    two = sharded_engine(2, packing, unsure, num_kv_heads=1)
    assert [plan.routes[0].place for plan in plan_engine(two, two)] == [
        Place(tp=0),
        Place(tp=1),
    ]
    for consumer, producer in ((1, 2), (2, 1), (4, 2)):
        sides = [
            sharded_engine(tp, packing, unsure, num_kv_heads=1)
            for tp in (consumer, producer)
        ]
        with pytest.raises(PlanRefused):
            plan_engine(*sides)


def test_layers_that_show_other_head_counts_make_single_heads_uncertain() -> None:
    specs = {"many": full(num_kv_heads=4), "one": full(num_kv_heads=1)}
    config = config_of(
        group(UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs), *specs)
    )
    caches = described(
        config,
        views_of(config),
        "cpu_attn/vec",
        Sharding(total_heads=2, rank=1, size=2),
    )
    packings = {
        tensor.layer: (tensor.heads, tensor.format.packing) for tensor in caches.tensors
    }
    assert packings == {
        "many": (Range(4, 8), "plain"),
        "one": (Range(1, 2), "plain/tp2"),
    }
