"""What kvferry says about a cache, against where vLLM's own views have their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvferry.connector.layout import Sharding, discover, groups_of
from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusal import PlanRefused
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.protocol.handshake import CacheGroup
from tests.connector.caches import config_of, described, full, group, storage_of, views_of
from tests.plan.samples import cell_address, engine

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
WHOLE_BLOCKS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Layouts in which the bytes of a block lie together."""


def cells(tensor: PagedTensor) -> list[tuple[int, int]]:
    """`[start, stop)` of every cell, in the order of their addresses."""
    found = [
        cell_address(tensor, block, head, tile)
        for block in range(tensor.blocks)
        for head in range(len(tensor.heads))
        for tile in range(tensor.tiles)
    ]
    return sorted((start, start + tensor.cell_bytes) for start in found)


def element_spans(view: Any) -> list[tuple[int, int]]:
    """`[start, stop)` of every element of a view, by its strides."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size)[None, :] * stride).ravel()
    item = view.element_size()
    return [(view.data_ptr() + offset * item, view.data_ptr() + (offset + 1) * item) for offset in offsets.tolist()]


def covers_exactly(tensor: PagedTensor, view: Any) -> bool:
    """Whether the cells are exactly the bytes of the view, each once."""
    told = [byte for start, stop in cells(tensor) for byte in range(start, stop)]
    real = [byte for start, stop in element_spans(view) for byte in range(start, stop)]
    return len(told) == len(set(told)) and set(told) == set(real)


@pytest.mark.parametrize("kernel_tokens", [32, 8])
def test_on_the_cpu_a_head_of_a_kernel_block_is_a_cell(kernel_tokens: int) -> None:
    config = config_of(group(full()))
    views = views_of(config, kernel_block_sizes=[kernel_tokens])
    caches = described(config, views, "cpu_attn/amx")
    assert [tensor.name for tensor in caches.tensors] == [("layers.0", "kv"), ("layers.1", "kv")]
    for tensor in caches.tensors:
        view = views[tensor.layer]
        assert (tensor.base, tensor.blocks) == (view.data_ptr(), 5 * 32 // kernel_tokens)
        assert (tensor.block_tokens, tensor.tile_tokens, tensor.tiles) == (kernel_tokens, kernel_tokens, 1)
        assert (tensor.heads, tensor.cell_bytes) == (Range(0, 2), kernel_tokens * 2 * 8 * 2)
        assert tensor.format == Format(dtype="bfloat16", packing="cpu_attn/amx")
        assert covers_exactly(tensor, view)
        for block in range(tensor.blocks):
            assert [cell_address(tensor, block, head, 0) for head in range(2)] == [
                view[block, head].data_ptr() for head in range(2)
            ]


@pytest.mark.parametrize("layout", WHOLE_BLOCKS)
@pytest.mark.parametrize("heads", [1, 2])
def test_elsewhere_a_block_whose_bytes_lie_together_is_one_opaque_cell(layout: str, heads: int) -> None:
    config = config_of(group(full(num_kv_heads=heads)), layout=layout)
    views = views_of(config, layout)
    for tensor in described(config, views, "flash_attn").tensors:
        view = views[tensor.layer]
        assert (tensor.tiles, tensor.heads, tensor.cell_bytes) == (1, Range(0, 1), 32 * heads * 32)
        assert [cell_address(tensor, block, 0, 0) for block in range(5)] == [
            view[block].data_ptr() for block in range(5)
        ]
        assert covers_exactly(tensor, view)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - set(WHOLE_BLOCKS)))
def test_a_block_whose_bytes_are_scattered_is_refused_by_layer_with_what_to_set(layout: str) -> None:
    config = config_of(group(full()), layout=layout)
    with pytest.raises(InvalidConfig, match=r"cache of layer layers.0 is .*set VLLM_KV_CACHE_LAYOUT to LBHNC"):
        described(config, views_of(config, layout), "flash_attn")


def planned(layouts: tuple[str, str], packings: tuple[str, str] = ("flash_attn",) * 2, **spec: Any) -> Any:
    sides = []
    for layout, packing in zip(layouts, packings, strict=True):
        config = config_of(group(full(**spec)), layout=layout)
        views = views_of(config, layout)
        sides.append(engine(*described(config, views, packing).tensors, groups=groups_of(config)))
        del views
    return plan_transfer(sides[0], 0, sides[1])


@pytest.mark.parametrize("heads_first", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("tokens_first", ["LBNHC", "BLNHC"])
def test_opaque_blocks_of_other_inner_order_are_never_taken_for_equal(heads_first: str, tokens_first: str) -> None:
    """They have the same size, and copying one over the other would give every head another head's tokens."""
    for pair in ((heads_first, tokens_first), (tokens_first, heads_first)):
        with pytest.raises(PlanRefused) as refused:
            planned(pair)
        assert refused.value.reasons[0].field == "layers.0/kv.format"
    assert planned((heads_first, tokens_first), num_kv_heads=1).routes, "with one head there is only one order"


@pytest.mark.parametrize(("here", "there"), [("LBHNC", "BLHNC"), ("LBNHC", "BLNHC"), ("LBHNC", "LBHNC")])
def test_layers_may_lie_anywhere_as_long_as_the_blocks_are_equal_inside(here: str, there: str) -> None:
    assert [len(item.runs) for item in planned((here, there)).routes[0].slices] == [1, 1]


def test_other_backends_and_instruction_sets_are_refused() -> None:
    for packings in (("flash_attn", "flashinfer"), ("cpu_attn/vec", "cpu_attn/amx"), ("cpu_attn/vec", "flash_attn")):
        with pytest.raises(PlanRefused, match=r"layers\.0/kv\.format"):
            planned(("LBHNC", "LBHNC"), packings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mla_is_one_head_that_everybody_holds_in_any_layout(layout: str) -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    config = config_of(group(spec), layout=layout)
    views = views_of(config, layout)
    for rank in (0, 3):
        for tensor in described(config, views, "cpu_mla", Sharding(total_heads=1, rank=rank, size=4)).tensors:
            assert (tensor.heads, tensor.cell_bytes) == (Range(0, 1), 16 * 24 * 2)
            assert covers_exactly(tensor, views[tensor.layer])


def test_groups_that_overlay_the_same_bytes_are_all_described() -> None:
    """vLLM gives every cache group the same memory: a block belongs to one of them at a time."""
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=50)
    config = config_of(group(full(), "full.0", "full.1"), group(window, "window.0", "window.1"))
    views = views_of(config)
    assert views["full.0"].data_ptr() == views["window.0"].data_ptr()
    caches = described(config, views)
    assert [(tensor.layer, tensor.group) for tensor in caches.tensors] == [
        ("full.0", 0),
        ("full.1", 0),
        ("window.0", 1),
        ("window.1", 1),
    ]
    assert groups_of(config) == (
        CacheGroup(policy="full", block_tokens=32),
        CacheGroup(policy="window", block_tokens=32, window_tokens=50),
    )


def test_a_layer_that_shares_anothers_cache_is_described_once() -> None:
    config = config_of(group(full()))
    views = views_of(config)
    config.kv_cache_groups[0].layer_names.append("layers.2")
    views["layers.2"] = views["layers.1"]
    assert [tensor.layer for tensor in described(config, views).tensors] == ["layers.0", "layers.1"]


def test_one_allocation_is_registered_once_and_every_cell_lies_in_it() -> None:
    config = config_of(group(full()))
    views = views_of(config)
    caches = described(config, views)
    (region,) = caches.regions()
    assert (region.address, region.length) == (storage_of(views["layers.0"]).data_ptr(), 2 * 5 * 32 * 64)
    spans = [span for tensor in caches.tensors for span in cells(tensor)]
    assert min(start for start, _ in spans) == region.address
    assert max(stop for _, stop in spans) == region.address + region.length


def test_layers_of_other_pipeline_stages_are_left_out_and_none_at_all_is_refused() -> None:
    config = config_of(group(full()))
    views = views_of(config)
    del views["layers.0"]
    assert [tensor.layer for tensor in described(config, views).tensors] == ["layers.1"]
    with pytest.raises(InvalidConfig, match=r"kv_caches is .*at least one layer"):
        discover({}, config, {}, Sharding(2, 0, 1))


def test_groups_that_are_not_transferred_do_not_count() -> None:
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=9)
    config = config_of(group(full(), "kept.0", enable_kv_transfer=False), group(window, "window.0"))
    (tensor,) = described(config, views_of(config)).tensors
    assert (tensor.layer, tensor.group) == ("window.0", 0)
    assert [group_.policy for group_ in groups_of(config)] == ["window"]


def test_layers_of_one_group_may_differ_in_their_heads() -> None:
    specs = {"wide": full(head_size=16), "narrow": full(head_size=8)}
    config = config_of(group(UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs), *specs))
    views = views_of(config)
    by_layer = {tensor.layer: tensor for tensor in described(config, views).tensors}
    assert {layer: tensor.cell_bytes for layer, tensor in by_layer.items()} == {"wide": 2048, "narrow": 1024}
    assert all(covers_exactly(tensor, views[layer]) for layer, tensor in by_layer.items())
    assert groups_of(config) == (CacheGroup(policy="full", block_tokens=32),)


def test_padding_after_a_page_is_stepped_over() -> None:
    config = config_of(group(full(page_size_padded=4096)))
    views = views_of(config)
    for tensor in described(config, views).tensors:
        assert (tensor.block_stride, tensor.block_bytes) == (4096, 2048)
        assert covers_exactly(tensor, views[tensor.layer])


@pytest.mark.parametrize(
    ("total", "size", "local", "expected"),
    [
        (8, 2, 4, [(0, 4), (4, 8)]),
        (2, 4, 1, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, 1, [(0, 1), (0, 1), (0, 1)]),
        (4, 4, 1, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (6, 3, 2, [(0, 2), (2, 4), (4, 6)]),
    ],
)
def test_each_rank_holds_the_heads_that_vllm_gives_it(
    total: int, size: int, local: int, expected: list[tuple[int, int]]
) -> None:
    found = [Sharding(total, rank, size).heads(local) for rank in range(size)]
    assert found == [Range(*pair) for pair in expected]


def test_the_heads_of_a_rank_are_global_on_the_cpu_and_its_own_where_blocks_are_opaque() -> None:
    config = config_of(group(FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)))
    views = views_of(config)
    second = Sharding(total_heads=4, rank=1, size=2)
    assert {tensor.heads for tensor in described(config, views, "cpu_attn/vec", second).tensors} == {Range(2, 4)}
    assert {tensor.heads for tensor in described(config, views, "flash_attn", second).tensors} == {Range(1, 2)}
