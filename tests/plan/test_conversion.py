"""Which formats are converted on the way, how that is planned, and what is refused instead."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.plan.conversion import (
    DtypeConversion,
    conversion_of,
    is_convertible,
    needs_conversion,
)
from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import Placing, Route
from kvferry.protocol.geometry import Format, PagedTensor, Range
from tests.plan.samples import engine, other, tensor

ELEMENTS = 4
ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}


def cache(dtype: str, scales: tuple[float, ...] = (), **changed: Any) -> PagedTensor:
    """Two heads of four tokens a block, four elements a head and token, heads outermost."""
    item = ITEM_BYTES[dtype]
    quantization = "fp8_per_tensor" if item == 1 else "none"
    usual: dict[str, Any] = {
        "cell_bytes": ELEMENTS * item,
        "tile_stride": ELEMENTS * item,
        "head_stride": 4 * ELEMENTS * item,
        "block_stride": 8 * ELEMENTS * item,
        "scales": scales,
        "format": Format(dtype=dtype, quantization=quantization),
    }
    return tensor(**{**usual, **changed})


BFLOAT16, FLOAT16, FLOAT32 = cache("bfloat16"), cache("float16"), cache("float32")
FLOAT8 = cache("float8_e4m3", (0.5,))


def route_of(
    local: PagedTensor, remote: PagedTensor, costs: Costs | None = None
) -> Route:
    (route,) = plan_transfer(engine(local), 0, engine(remote), costs or Costs()).routes
    return route


def fields(
    local: PagedTensor, remote: PagedTensor, costs: Costs | None = None
) -> list[str]:
    with pytest.raises(PlanRefused) as refused:
        route_of(local, remote, costs)
    return [reason.field for reason in refused.value.reasons]


def test_without_a_pool_what_may_be_mapped_is_planned_and_refused_if_it_is_not() -> (
    None
):
    consumer, producer = engine(FLOAT16), engine(BFLOAT16)
    no_pool = Costs(staged_run_bytes=0)
    with pytest.raises(PlanRefused) as refused:
        plan_transfer(consumer, 0, producer, no_pool)
    planned = plan_transfer(consumer, 0, producer, no_pool, mappable=(0,))
    (route,) = planned.routes
    assert route.unless_mapped == refused.value.reasons
    assert {item.placing for item in route.slices} == {Placing.MAPPED}
    assert route.unit_descriptors == 0
    with pytest.raises(PlanRefused) as not_mapped:
        planned.with_mapped(())
    assert not_mapped.value.reasons == refused.value.reasons
    (mapped,) = planned.with_mapped((0,)).routes
    assert not mapped.unless_mapped
    assert mapped.slices == route.slices


@pytest.mark.parametrize(
    ("one", "two", "needed"),
    [
        (BFLOAT16, BFLOAT16, False),
        (BFLOAT16, FLOAT16, True),
        (FLOAT8, FLOAT8, False),
        (FLOAT8, cache("float8_e4m3", (0.25,)), True),
        (cache("float8_e4m3"), cache("float8_e4m3", (1.0,)), False),
        (FLOAT8, cache("float8_e5m2", (0.5,)), True),
    ],
)
def test_bytes_that_mean_the_same_are_not_converted(
    one: PagedTensor, two: PagedTensor, needed: bool
) -> None:
    assert needs_conversion(one, two) is needs_conversion(two, one) is needed


@pytest.mark.parametrize(
    ("changed", "possible"),
    [
        ({}, True),
        ({"element_bytes": 2, "element_stride": 16}, True),
        ({"element_bytes": 4, "element_stride": 16}, False),
        ({"cell_bytes": 6}, False),
        ({"format": Format(dtype="bfloat16", packing="cpu_attn/amx")}, False),
        ({"format": Format(dtype="bfloat16", quantization="int4")}, False),
        ({"format": Format(dtype="uint8")}, False),
    ],
)
def test_only_formats_whose_strides_say_everything_are_convertible(
    changed: dict[str, Any], possible: bool
) -> None:
    assert is_convertible(other(BFLOAT16, **changed), FLOAT8) is possible
    assert is_convertible(FLOAT8, other(BFLOAT16, **changed)) is possible


def test_scales_are_those_of_the_global_head_on_either_side() -> None:
    here = cache("float8_e4m3", (0.5, 0.25), heads=Range(4, 6))
    there = cache("float8_e5m2", (8.0, 4.0, 2.0), heads=Range(3, 6))
    assert conversion_of(here, there, 5) == DtypeConversion(
        "float8_e5m2", "float8_e4m3", 2.0, 0.25
    )
    assert conversion_of(BFLOAT16, FLOAT8, 1) == DtypeConversion(
        "float8_e4m3", "bfloat16", 0.5, 1.0
    )


@pytest.mark.parametrize(
    ("local", "remote"), [(FLOAT8, BFLOAT16), (BFLOAT16, FLOAT8), (BFLOAT16, FLOAT32)]
)
def test_what_is_converted_is_staged_whatever_the_costs_are(
    local: PagedTensor, remote: PagedTensor
) -> None:
    route = route_of(local, remote, Costs(direct_min_bytes=1, relayout_gb_s=1e-6))
    (item,) = route.slices
    assert item.placing is Placing.STAGED
    assert item.reason == f"{remote.format.dtype} becomes {local.format.dtype}"
    (source,) = route.sources
    (placement,) = source.placements
    assert placement.dtypes == (remote.format.dtype, local.format.dtype)
    assert placement.run == 8 * ELEMENTS, (
        "elements: the whole block lies in one run on both sides"
    )
    assert source.bundle.run_bytes == remote.block_stride
    assert [piece.scales for piece in placement.pieces] == [
        ((remote.scales or (1.0,))[0], (local.scales or (1.0,))[0])
    ]


def test_heads_with_scales_of_their_own_are_pieces_of_their_own() -> None:
    route = route_of(cache("float8_e4m3", (0.5, 0.25)), BFLOAT16)
    assert [item.heads for item in route.slices] == [Range(0, 1), Range(1, 2)]
    pieces = [
        (piece.offset, piece.local_base, piece.scales)
        for source in route.sources
        for placement in source.placements
        for piece in placement.pieces
    ]
    head = 4 * ELEMENTS
    assert sorted(pieces) == [
        (0, 4096, (1.0, 0.5)),
        (2 * head, 4096 + head, (1.0, 0.25)),
    ]


def test_the_run_of_a_conversion_is_as_long_as_both_sides_have_it() -> None:
    """Tokens outermost on the producer: four elements of one head and token."""
    there = cache("bfloat16", head_stride=8, tile_stride=16)
    ((placement,),) = (source.placements for source in route_of(FLOAT8, there).sources)
    assert placement.run == ELEMENTS
    assert sorted(axis.steps for axis in placement.axes) == [2, 4]


@pytest.mark.parametrize(
    ("local", "remote"),
    [(cache("float8_e4m3"), BFLOAT16), (BFLOAT16, cache("float8_e4m3"))],
)
def test_without_scales_a_quantised_cache_is_not_converted(
    local: PagedTensor, remote: PagedTensor
) -> None:
    with pytest.raises(PlanRefused) as refused:
        route_of(local, remote)
    (reason,) = refused.value.reasons
    assert reason.field == "layers.0/kv.scales"
    assert (reason.producer, reason.consumer) == (
        ("known", "missing") if remote is BFLOAT16 else ("missing", "known")
    )
    assert "--kv-cache-dtype" in reason.change


def test_without_a_pool_nothing_is_converted() -> None:
    assert fields(FLOAT8, BFLOAT16, Costs(staged_run_bytes=0)) == ["layers.0/kv.format"]
    assert fields(FLOAT8, BFLOAT16, Costs(staged_run_bytes=7)) == [
        "layers.0/kv.format"
    ], "nor by one of 7 bytes"


def test_a_host_buffer_without_a_pool_is_refused_as_that_and_not_as_a_format() -> None:
    with pytest.raises(PlanRefused) as refused:
        route_of(BFLOAT16, BFLOAT16, Costs(staged_run_bytes=0, reaches_caches=False))
    (reason,) = refused.value.reasons
    assert reason.field == "layers.0/kv"
    assert reason.consumer == "no host buffer, or a staging pool for runs of up to 0 B"
    assert "kv_buffer_device" in reason.change
    assert "dtype" not in str(reason)


def test_unequal_numbers_of_elements_are_refused_as_unequal_cells() -> None:
    wide = cache(
        "bfloat16", cell_bytes=16, tile_stride=16, head_stride=64, block_stride=128
    )
    found = fields(FLOAT8, wide)
    assert {"layers.0/kv.format", "layers.0/kv.cell_bytes"} <= set(found)


def test_keys_and_values_are_read_in_one_run_and_converted_apart() -> None:
    """Packed on both sides: each has scales of its own."""
    k_here, k_there = (
        cache(dtype, scales, kind="k")
        for dtype, scales in (("float8_e4m3", (0.5,)), ("bfloat16", ()))
    )
    wide_here = other(k_here, tile_stride=8, head_stride=32, block_stride=64)
    wide_there = other(k_there, tile_stride=16, head_stride=64, block_stride=128)
    here = wide_here, other(wide_here, kind="v", base=wide_here.base + 4)
    there = wide_there, other(wide_there, kind="v", base=wide_there.base + 8)
    (route,) = plan_transfer(engine(*here), 0, engine(*there)).routes
    (source,) = route.sources
    assert source.bundle.run_bytes == 128
    (placement,) = source.placements
    assert placement.run == ELEMENTS
    assert [(piece.offset, piece.local_base) for piece in placement.pieces] == [
        (0, 4096),
        (8, 4100),
    ]


def test_the_stride_of_elements_that_are_contiguous_means_nothing() -> None:
    """A description may have one, however large: nothing may be read that far away."""
    hostile = cache("float16", element_stride=1 << 47)
    assert not hostile.element_bytes
    (source,) = route_of(BFLOAT16, hostile).sources
    assert source.placements == route_of(BFLOAT16, FLOAT16).sources[0].placements
    assert all(
        axis.remote_stride < source.bundle.run_bytes
        for one in source.placements
        for axis in one.axes
    )
