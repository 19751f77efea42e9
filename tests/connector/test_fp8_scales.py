"""Caches of float8: the measured format and scales, and the pairing of engines with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

from kvferry.connector.layout.block_layout import BY_HEAD
from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.probe import block_layouts_of
from kvferry.connector.layout.probe_writes import VALUES, scales_of
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Format, PagedTensor, Place, Topology
from tests.connector.caches import ALONE, bytes_of, storage_of
from tests.connector.written_caches import (
    HEADS,
    LAYER,
    TOKENS,
    WIDTH,
    Float8,
    Interleaved,
    Written,
    float8_layer,
    layer_of,
    spec_of,
)
from tests.plan.samples import engine, worker

FLOAT8 = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def tensors_of(cache: Written, tp: int = 1, rank: int = 0) -> list[PagedTensor]:
    block_layouts = block_layouts_of(
        dict.fromkeys(cache.views, cache.layer), cache.views, cache.config, cache.dtype
    )
    sharding = replace(ALONE, total_heads=HEADS * tp, rank=rank, size=tp)
    return list(discover(cache.views, cache.config, block_layouts, sharding).tensors)


def float8_cache(
    impl: Any,
    k_scale: Any = 0.5,
    v_scale: Any = 0.037,
    dtype: torch.dtype = torch.bfloat16,
) -> Written:
    return Written(float8_layer(impl, k_scale, v_scale), spec_of("fp8"), dtype=dtype)


@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.037), (0.0123, 17.25)])
def test_which_float8_it_is_and_its_scales_are_part_of_the_description(
    name: str, activation: torch.dtype, scales: tuple[float, float]
) -> None:
    """The measured format counts, not its name."""
    cache = float8_cache(Float8(FLOAT8[name]), *scales, dtype=activation)
    k, v = (tensor for tensor in tensors_of(cache) if tensor.layer == LAYER)
    for tensor, kind, scale in ((k, "k", scales[0]), (v, "v", scales[1])):
        assert tensor.kind == kind
        assert tensor.format == Format(
            dtype=name, quantization="fp8_per_tensor", packing="plain"
        )
        assert tensor.scales == pytest.approx((scale,))
        assert tensor.cell_bytes == WIDTH


@pytest.mark.parametrize("per_head", ["tensors", "numbers"])
def test_scales_are_described_by_head_or_as_their_largest_as_the_backend_uses_them(
    per_head: str,
) -> None:
    use = {"tensors": "_scale", "numbers": "_scale_float"}[per_head]
    cache = float8_cache(Float8(torch.float8_e4m3fn, use), [0.5, 0.3], [1.0, 4.0])
    k, v = (tensor for tensor in tensors_of(cache) if tensor.layer == LAYER)
    expected = [(0.5, 0.3), (1.0, 4.0)] if per_head == "tensors" else [(0.5,), (4.0,)]
    assert [k.scales, v.scales] == [pytest.approx(scales) for scales in expected]


def test_the_description_yields_the_values_that_were_written() -> None:
    """value = stored · scale, from the description alone."""
    cache = float8_cache(Float8(torch.float8_e4m3fn), [0.5, 0.3], [1.0, 4.0])
    values = (
        VALUES[
            torch.randint(
                len(VALUES), (2, TOKENS, HEADS, WIDTH), generator=torch.Generator()
            )
        ]
    ).bfloat16()
    slots = 3 * TOKENS + torch.arange(TOKENS)
    cache.layer.impl.do_kv_cache_update(
        cache.layer, values[0], values[1], cache.view, slots
    )
    whole = storage_of(cache.view)
    for tensor, written in zip(
        (one for one in tensors_of(cache) if one.layer == LAYER), values, strict=True
    ):
        for head in range(HEADS):
            for token in range(TOKENS):
                there = torch.from_numpy(
                    bytes_of(tensor, 3, head, token) - whole.data_ptr()
                )
                stored = whole[there].view(FLOAT8[tensor.format.dtype]).float()
                torch.testing.assert_close(
                    stored * tensor.scales[head],
                    written[token, head].float(),
                    rtol=0.07,
                    atol=0,
                )


@pytest.mark.parametrize("use", ["", "_other_scale"])
def test_a_backend_that_stores_by_other_scales_than_the_layers_is_opaque(
    use: str,
) -> None:
    cache = float8_cache(Float8(torch.float8_e4m3fn, use))
    cache.layer._k_other_scale, cache.layer._v_other_scale = 0.25, 0.037
    assert cache.block_layout().pattern == BY_HEAD
    (tensor,) = (tensor for tensor in tensors_of(cache) if tensor.layer == LAYER)
    assert tensor.format.packing == "some_backend/fp8_e4m3/k=0.5/v=0.0370000005"
    assert (tensor.format.dtype, tensor.scales) == ("uint8", ())


@pytest.mark.parametrize(
    "scales",
    [
        (([0.5, 0.5], [0.25, 0.25]), ([0.5, 0.3], [0.25, 0.25])),
        (([0.5], [1.0]), ([0.25], [2.0])),
    ],
    ids=["of heads, equal in one layer", "of a layer"],
)
def test_layers_of_one_kind_have_their_own_scales(scales: Any) -> None:
    """Where all heads have the same scale, the place that the backend takes it from does not matter."""
    layers = {
        f"layers.{at}": float8_layer(Float8(torch.float8_e4m3fn), *one)
        for at, one in enumerate(scales)
    }
    cache = Written(layers["layers.0"], spec_of("fp8"))
    found = block_layouts_of(layers, cache.views, cache.config, cache.dtype)
    assert [one.pattern for one in found.values()] == ["rows", "rows"]
    for one, (k, v) in zip(found.values(), scales, strict=True):
        assert one.scales == {
            "k": pytest.approx(tuple(k)),
            "v": pytest.approx(tuple(v)),
        }


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_scales_are_refused_at_the_start_by_layer(scale: float) -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"cache of layer layers\.0 is .*v scales .*; expected static scales",
    ):
        float8_cache(Float8(torch.float8_e4m3fn), 1.0, scale).block_layout()


def test_mla_in_float8_has_the_one_scale_of_its_rows() -> None:
    class Latent:
        def do_kv_cache_update(
            self, latent: Any, rope: Any, cache: Any, slots: Any, dtype: str, scale: Any
        ) -> None:
            assert dtype == "fp8"
            rows = torch.cat([latent, rope[:, 0]], dim=1).float() / scale
            cache[slots // cache.shape[1], slots % cache.shape[1]] = rows.to(
                torch.float8_e4m3fn
            ).view(torch.uint8)

    layer = layer_of(
        Latent(),
        kv_lora_rank=16,
        kv_cache_dtype="fp8",
        _k_scale=torch.tensor(0.3),
        _k_scale_float=0.3,
    )
    spec = MLAAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        head_size=24,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        cache_dtype_str="fp8",
    )
    for tensor in tensors_of(Written(layer, spec)):
        assert (tensor.kind, tensor.cell_bytes) == ("mla", 24)
        assert tensor.scales == pytest.approx((0.3,))
        assert tensor.format == Format(
            dtype="float8_e4m3", quantization="fp8_per_tensor", packing="plain"
        )


def test_scales_that_a_running_engine_calculates_are_refused_at_the_start_by_layer() -> (
    None
):
    cache = float8_cache(Float8(torch.float8_e4m3fn))
    cache.layer.calculate_kv_scales = True
    with pytest.raises(
        InvalidConfig,
        match=r"cache of layer layers\.0 is 'calculate_kv_scales'; expected static",
    ):
        cache.block_layout()


def engine_of(scales: tuple[Any, Any], impl: Any = None, tp: int = 1) -> Any:
    workers = []
    for rank in range(tp):
        cache = float8_cache(impl or Float8(torch.float8_e4m3fn), *scales)
        workers.append(worker(tensors_of(cache, tp, rank), Place(tp=rank)))
    return engine(
        workers=workers, topology=Topology(tp=tp), groups=groups_of(cache.config)
    )


def test_opaque_blocks_of_other_scales_are_never_taken_for_equal() -> None:
    class Odd(Float8, Interleaved):
        pass

    equal = [engine_of((0.5, 1.0), Odd(torch.float8_e4m3fn)) for _ in range(2)]
    assert plan_engine(*equal)[0].routes
    with pytest.raises(PlanRefused) as refused:
        plan_engine(equal[0], engine_of((0.25, 1.0), Odd(torch.float8_e4m3fn)))
    assert "k=0.5" in refused.value.reasons[0].consumer
    assert "k=0.25" in refused.value.reasons[0].producer


def attention_layer(cache_dtype: str, heads: int) -> Any:
    layer: Any = torch.nn.Module()
    layer.kv_cache_dtype, layer.num_kv_heads = cache_dtype, heads
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
        layer.register_buffer(name, torch.tensor(1.0))
    for name in ("_q_scale_float", "_k_scale_float", "_v_scale_float"):
        setattr(layer, name, 1.0)
    layer._k_scale_cpu, layer._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)
    return layer


def test_scales_are_read_where_vllm_leaves_those_of_a_checkpoint_one_for_all_heads() -> (
    None
):
    layer = attention_layer("fp8", HEADS)
    method: Any = BaseKVCacheMethod.__new__(BaseKVCacheMethod)
    method.create_weights(layer)
    for name, scale in (("k_scale", 0.125), ("v_scale", 0.3)):
        getattr(layer, name).data.fill_(scale)
    method.process_weights_after_loading(layer)
    reported = scales_of(layer, LAYER, spec_of("fp8"))
    assert reported == {"tensors": {"k": (0.125,), "v": (pytest.approx(0.3),)}}


def test_scales_are_read_where_vllm_leaves_those_of_a_checkpoint_one_for_each_head() -> (
    None
):
    layer = attention_layer("fp8", HEADS)
    method: Any = CompressedTensorsKVCacheMethod.__new__(CompressedTensorsKVCacheMethod)
    scheme = {"strategy": "attn_head"}
    method.quant_config = type("Config", (), {"kv_cache_scheme": scheme})()
    method.create_weights(layer)
    layer.k_scale.data.copy_(torch.tensor([0.5, 0.25]))
    layer.v_scale.data.copy_(torch.tensor([2.0, 4.0]))
    method.process_weights_after_loading(layer)
    assert scales_of(layer, LAYER, spec_of("fp8")) == {
        "tensors": {"k": (0.5, 0.25), "v": (2.0, 4.0)},
        "numbers": {"k": (0.5,), "v": (4.0,)},
    }
