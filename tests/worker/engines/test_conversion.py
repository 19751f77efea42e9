"""Engines whose caches have different dtypes: the values that arrive are those of a cast of the producer's values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvferry.protocol.geometry import Format
from kvferry.protocol.orders import FailureReason
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.rig import Rig

BFLOAT16 = CacheShape(cell_bytes=32, format=Format(dtype="bfloat16"))
FLOAT16 = CacheShape(cell_bytes=32, format=Format(dtype="float16"))
FLOAT8 = CacheShape(
    cell_bytes=16, axes="bth", format=Format(dtype="float8_e4m3", quantization="fp8_per_tensor"), scales=(1.0,)
)
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3": torch.float8_e4m3fn}
PAIRS = {
    "bfloat16 to float8": (BFLOAT16, FLOAT8),
    "float8 to bfloat16": (FLOAT8, BFLOAT16),
    "bfloat16 to float16": (BFLOAT16, replace(FLOAT16, axes="bth", block_tokens=8, blocks=24)),
    "by a scale": (BFLOAT16, replace(FLOAT8, scales=(0.25,))),
    "by a scale for every head": (BFLOAT16, replace(FLOAT8, scales=(0.25, 3.0))),
    "float8 under another scale": (replace(FLOAT8, scales=(2.0,)), replace(FLOAT8, axes="bht", scales=(0.5,))),
}


def values_of(engine: Engine, layer: int, kernel_blocks: list[int]) -> torch.Tensor:
    """The values of the cells of blocks: float32 `[tokens, heads, elements]`."""
    cells = torch.from_numpy(np.ascontiguousarray(engine.caches.cells(layer)[kernel_blocks]))
    stored = cells.view(TYPES[engine.shape.format.dtype]).to(torch.float32)
    scales = torch.tensor(engine.shape.scales or (1.0,)).view(1, -1, 1, 1)
    return (stored * scales).transpose(1, 2).flatten(0, 1)


def cast(values: torch.Tensor, to: CacheShape) -> torch.Tensor:
    """The values as a cache of the shape stores them: rounded to nearest, float8 saturates. float32 `[T, heads, N]`."""
    scales = torch.tensor(to.scales or (1.0,)).view(1, -1, 1)
    scaled = values / scales
    if to.format.dtype == "float8_e4m3":
        scaled = scaled.clamp(-448.0, 448.0)
    return scaled.to(TYPES[to.format.dtype]).to(torch.float32) * scales


def check_values(producer: Engine, consumer: Engine, blocks: tuple[int, ...], load: OrderedLoad, tokens: int) -> None:
    for layer in range(consumer.shape.layers):
        there = values_of(producer, layer, producer.caches.kernel_blocks(blocks))[:tokens]
        here = values_of(consumer, layer, consumer.caches.kernel_blocks(load.blocks))
        torch.testing.assert_close(here[:tokens], cast(there, consumer.shape), rtol=0, atol=0, equal_nan=True)
        assert not here[tokens:].any()


@pytest.mark.parametrize(("there", "here"), PAIRS.values(), ids=PAIRS)
def test_values_arrive_as_a_cast_would_leave_them(any_rig: Rig, there: CacheShape, here: CacheShape) -> None:
    producer, consumer = any_rig.engine("P", shape=there), any_rig.engine("C", shape=here)
    for tokens in (1, 8, 23):
        offer = producer.prefill(tokens=tokens, seed=tokens)
        load = consumer.load(offer.params)
        assert any_rig.until_over(consumer, load) is None
        check_values(producer, consumer, offer.blocks, load, tokens)
        totals = consumer.seen.totals[-1]
        assert totals.staged_bytes == totals.planned_bytes == -(-tokens // there.block_tokens) * there.block_bytes


def test_without_a_pool_the_pair_is_refused_by_the_name_of_the_option(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer = rig.engine("P", shape=BFLOAT16)
    consumer = rig.engine("C", shape=FLOAT8, settings=replace(SETTINGS, staging_pool_bytes=0))
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.PLAN
    assert "layers.0/kv.format: producer bfloat16, consumer float8_e4m3" in caplog.text
    assert "staging_pool_bytes" in caplog.text


def test_scales_that_are_missing_are_named(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = rig.engine("P", shape=BFLOAT16), rig.engine("C", shape=replace(FLOAT8, scales=()))
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.PLAN
    assert "layers.0/kv.scales: producer known, consumer missing" in caplog.text


def test_formats_without_a_conversion_are_refused_by_name(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    producer = rig.engine("P", shape=BFLOAT16)
    packed = replace(FLOAT8, format=Format(dtype="float8_e4m3", quantization="fp8_per_tensor", packing="secret"))
    consumer = rig.engine("C", shape=packed)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.PLAN
    assert "layers.0/kv.format" in caplog.text
    assert "secret" in caplog.text
