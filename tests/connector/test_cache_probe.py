"""The probe's result for a backend, from its writes: one pattern explains every byte, or the cache is opaque."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from kvferry.connector.layout.block_layout import BY_HEAD, OPAQUE
from kvferry.connector.layout.discovery import discover
from kvferry.connector.layout.probe import block_layouts_of
from kvferry.connector.layout.probe_writes import Scratch
from kvferry.protocol.geometry import Format, PagedTensor, Range
from tests.connector.caches import (
    ALONE,
    all_bytes_of,
    bytes_of,
    config_of,
    full,
    group,
    storage_of,
    views_of,
)
from tests.connector.written_caches import (
    HEADS,
    LAYER,
    TOKENS,
    WIDTH,
    Constant,
    HeadsExchanged,
    Interleaved,
    NotedInAll,
    OneElementRounded,
    OneTokenElsewhere,
    Planes,
    Raises,
    Rows,
    TurnedByHead,
    WritesNothing,
    WritesOutside,
    WritesWhatWasThere,
    Written,
    layer_of,
    spec_of,
)

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def tensors_of(cache: Written) -> list[PagedTensor]:
    block_layouts = block_layouts_of(
        dict.fromkeys(cache.views, cache.layer), cache.views, cache.config, cache.dtype
    )
    found = discover(cache.views, cache.config, block_layouts, ALONE).tensors
    return [tensor for tensor in found if tensor.layer == LAYER]


def assert_reported_where_it_writes(cache: Written, widths: dict[str, int]) -> None:
    """Let the backend write into the cache itself: only the bytes that the description names have changed."""
    tensors = tensors_of(cache)
    assert [(one.kind, one.tile_tokens, one.format.packing) for one in tensors] == [
        (k, 1, "plain") for k in widths
    ]
    blocks, source = [3, 1], torch.Generator().manual_seed(0)
    written = {
        kind: torch.randn(2 * TOKENS, HEADS, width, generator=source).to(cache.dtype)
        for kind, width in widths.items()
    }
    slots = torch.tensor(
        [block * TOKENS + token for block in blocks for token in range(TOKENS)]
    )
    whole = storage_of(cache.view)
    before = whole.clone()
    cache.layer.impl.do_kv_cache_update(
        cache.layer, written["k"], written["v"], cache.view, slots
    )
    for tensor in tensors:
        assert tensor.heads == Range(0, HEADS)
        for head in range(HEADS):
            for token, value in enumerate(written[tensor.kind][:, head]):
                there = (
                    bytes_of(tensor, blocks[token // TOKENS], head, token % TOKENS)
                    - whole.data_ptr()
                )
                assert torch.equal(
                    whole[torch.from_numpy(there)], value.view(torch.uint8)
                )
                before[torch.from_numpy(there)] = value.view(torch.uint8)
    assert torch.equal(whole, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width_v", [WIDTH, 4])
def test_rows_of_k_and_v_are_found_in_every_layout_and_are_where_the_description_says(
    layout: str, width_v: int
) -> None:
    cache = Written(layer_of(Rows()), spec_of(head_size_v=width_v), layout)
    assert cache.block_layout().pattern == "rows"
    assert_reported_where_it_writes(cache, {"k": WIDTH, "v": width_v})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes_of_k_and_v_are_found_and_are_where_the_description_says(
    layout: str,
) -> None:
    spec = spec_of(num_head_slots=2, state_content_bytes=HEADS * WIDTH * 2)
    cache = Written(layer_of(Planes()), spec, layout)
    assert cache.block_layout().pattern == "planes"
    assert_reported_where_it_writes(cache, {"k": WIDTH, "v": WIDTH})


@pytest.mark.parametrize(
    "backend",
    [
        OneTokenElsewhere,
        HeadsExchanged,
        OneElementRounded,
        WritesOutside,
        WritesWhatWasThere,
        WritesNothing,
    ],
)
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_a_backend_with_one_unexplained_byte_is_opaque(
    backend: type[Rows], layout: str, ferry_log: pytest.LogCaptureFixture
) -> None:
    """It may still keep heads apart, which does not show what is in them."""
    cache = Written(layer_of(backend()), layout=layout)
    expected = BY_HEAD if (backend, layout) == (OneTokenElsewhere, "LBHNC") else OPAQUE
    assert cache.block_layout().pattern == expected
    (tensor,) = tensors_of(cache)
    assert (tensor.kind, tensor.tile_tokens) == ("kv", TOKENS)
    if expected == OPAQUE:
        assert (
            "layer layers.0 and of those like it (some_backend) is not recognised: no block layout"
            in ferry_log.text
        )
        assert (
            "moved whole, between engines of equal tensor-parallel size"
            in ferry_log.text
        )


@pytest.mark.parametrize(
    ("backend", "pattern"),
    [
        (Interleaved, BY_HEAD),
        (TurnedByHead, OPAQUE),
        (NotedInAll, OPAQUE),
        (Constant, OPAQUE),
    ],
)
def test_heads_are_apart_where_each_has_all_of_its_own_and_nothing_of_another_wherever_it_is(
    backend: type[Rows], pattern: str
) -> None:
    cache = Written(layer_of(backend()))
    assert cache.block_layout().pattern == pattern
    (tensor,) = tensors_of(cache)
    assert tensor.format.packing == (
        "some_backend" if pattern else "some_backend/heads2.tokens16.content16"
    )
    assert len(tensor.heads) == (HEADS if pattern else 1)


def test_a_backend_that_several_patterns_explain_is_opaque(
    ferry_log: pytest.LogCaptureFixture,
) -> None:
    """With one token a block, rows and columns are the same bytes and cannot be distinguished."""
    assert (
        Written(layer_of(Rows()), spec_of(block_size=1)).block_layout().pattern
        == OPAQUE
    )
    assert "2 block layouts explain what it writes" in ferry_log.text


def test_a_backend_that_raises_is_opaque_and_the_start_goes_on(
    ferry_log: pytest.LogCaptureFixture,
) -> None:
    assert Written(layer_of(Raises())).block_layout().pattern == OPAQUE
    (line,) = [
        record.getMessage()
        for record in ferry_log.records
        if record.levelno == logging.WARNING
    ]
    assert "cannot be tried: RuntimeError: no kernel image is available;" in line


@pytest.mark.parametrize(
    ("impl", "attributes", "reason"),
    [
        (SimpleNamespace(), {}, "it has no cache write of its own"),
        (None, {}, "it has no cache write of its own"),
        (
            SimpleNamespace(do_kv_cache_update=lambda key: None),
            {},
            "cannot be tried: TypeError",
        ),
        (
            Rows(),
            {"kv_sharing_target_layer_name": "layers.9"},
            "another layer writes its cache",
        ),
    ],
)
def test_a_backend_that_cannot_be_called_is_opaque_with_the_reason(
    impl: Any,
    attributes: dict[str, Any],
    reason: str,
    ferry_log: pytest.LogCaptureFixture,
) -> None:
    assert Written(layer_of(impl, **attributes)).block_layout().pattern == OPAQUE
    assert reason in ferry_log.text


@pytest.mark.parametrize(
    "cache_dtype",
    ["nvfp4", "int8_per_token_head", "fp8_per_token_head", "turboquant_4bit_nc"],
)
def test_a_cache_with_scales_beside_the_data_is_not_probed(cache_dtype: str) -> None:
    """A backend may keep views of the scales in its cache, and the probe's are temporary."""
    layer = layer_of(Rows(), kv_cache_dtype=cache_dtype)
    assert Written(layer, spec_of(cache_dtype)).block_layout().pattern == OPAQUE
    assert layer.impl.calls == 0


def test_a_probe_leaves_everything_as_it_was() -> None:
    class Careless(Rows):
        def put(
            self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
        ) -> None:
            super().put(layer, cache, blocks, tokens, key, value)
            self.seen = cache
            layer.seen = cache
            layer._k_scale.fill_(7.0)

    layer = layer_of(Careless(), _k_scale=torch.tensor(2.0))
    cache = Written(layer)
    attributes, own, before = (
        copy.copy(vars(layer)),
        copy.copy(vars(layer.impl)),
        storage_of(cache.view).clone(),
    )
    generator = torch.get_rng_state()
    assert cache.block_layout().pattern == "rows"
    assert (vars(layer), vars(layer.impl)) == (attributes, own)
    assert layer._k_scale.item() == 2.0
    assert torch.equal(storage_of(cache.view), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not torch.is_inference_mode_enabled()


def test_a_layer_that_shares_anothers_cache_is_like_it_and_is_not_tried() -> None:
    config = config_of(group(spec_of(), "0"))
    views = views_of(config)
    views["1"] = views["0"]
    layers = {
        "0": layer_of(Rows()),
        "1": layer_of(Raises(), kv_sharing_target_layer_name="0"),
    }
    found = block_layouts_of(layers, views, config, torch.bfloat16)
    assert found["1"] == found["0"]
    assert found["0"].pattern == "rows"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_a_probe_has_the_shape_and_the_order_of_the_cache_and_stays_small(
    layout: str,
) -> None:
    config = config_of(
        group(full(num_kv_heads=8, head_size=128, block_size=16), *map(str, range(4))),
        layout=layout,
    )
    (small,) = {
        Scratch(view).view.stride() for view in views_of(config, layout).values()
    }
    assert small == views_of(config, layout)["0"].stride()
    view = views_of(config, layout)["0"]
    strides = [stride * (5000 if stride > 16 * 256 else 1) for stride in view.stride()]
    huge = torch.empty_strided(
        (5000, *view.shape[1:]), strides, dtype=view.dtype, device="meta"
    )
    scratch = Scratch(huge)
    assert scratch.raw.numel() <= 64 << 20
    assert np.array_equal(np.argsort(scratch.view.stride()), np.argsort(huge.stride()))
    assert scratch.view.shape[1:] == huge.shape[1:]


def test_the_cache_of_a_sparse_indexer_is_a_block_that_everybody_holds() -> None:
    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    config = config_of(group(spec))
    views = views_of(config)
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(
            get_name=lambda: "DEEPSEEK_V32_INDEXER"
        )
    )
    block_layouts = block_layouts_of(
        dict.fromkeys(views, layer), views, config, torch.bfloat16
    )
    for rank in (0, 3):
        found = discover(
            views, config, block_layouts, replace(ALONE, rank=rank, size=4)
        ).tensors
        for tensor in found:
            assert (tensor.kind, tensor.heads, tensor.tile_tokens) == (
                "indexer",
                Range(0, 1),
                64,
            )
            assert tensor.cell_bytes == 64 * 132 == len(all_bytes_of(tensor)) // 5
            assert tensor.format == Format(
                dtype="uint8", packing="deepseek_v32_indexer/tokens64.content132"
            )
