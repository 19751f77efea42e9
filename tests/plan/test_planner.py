"""Which pairs of engines are planned, and that the others hear every reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusal import PlanRefused, Reason
from kvferry.plan.runs import shared_runs
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import Format, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription
from tests.plan.samples import FACTS, engine, other, tensor, worker

OURS = engine(engine_id="D")


def reasons(producer: EngineDescription, consumer: EngineDescription = OURS, index: int = 0) -> tuple[Reason, ...]:
    with pytest.raises(PlanRefused) as refused:
        plan_transfer(consumer, index, producer)
    return refused.value.reasons


def test_equal_engines_are_planned_tensor_by_tensor() -> None:
    layers = [tensor(layer=f"layers.{n}", base=4096 * (n + 1)) for n in range(3)]
    there = [other(layer, base=layer.base + (1 << 30), blocks=3) for layer in reversed(layers)]
    plan = plan_transfer(engine(*layers), 0, engine(*there))
    (route,) = plan.routes
    assert (plan.producer, plan.worker, plan.place, route.worker, route.expected) == ("P", 0, Place(), 0, 1)
    assert [(item.local, item.remote) for item in route.slices] == list(zip(layers, reversed(there), strict=True))
    for item in route.slices:
        assert item.runs == shared_runs(item.local, item.remote)
        assert (item.heads, item.placing, item.block_bytes) == (Range(0, 2), Placing.DIRECT, 64)


def test_strides_bases_and_block_counts_may_differ() -> None:
    nhd = tensor(base=1 << 40, blocks=100, block_stride=640, head_stride=8, tile_stride=16)
    (item,) = plan_transfer(OURS, 0, engine(nhd)).routes[0].slices
    assert [run.length for run in item.runs] == [8] * 8


def test_scheduler_blocks_may_differ_where_kernel_blocks_are_equal() -> None:
    producer = engine(groups=(CacheGroup(policy="full", block_tokens=16),))
    assert plan_transfer(OURS, 0, producer).routes


def test_each_worker_reads_the_producer_worker_of_its_own_place() -> None:
    places = [Place(tp=0), Place(tp=1), Place(pp=1, tp=0), Place(pp=1, tp=1)]
    sizes = Topology(pp=2, tp=2)
    consumer = engine(workers=[worker(place=place) for place in places], topology=sizes)
    producer = engine(workers=[worker(place=place) for place in reversed(places)], topology=sizes)
    for index, place in enumerate(places):
        plan = plan_transfer(consumer, index, producer)
        assert [(route.worker, route.place) for route in plan.routes] == [(3 - index, place)]


@pytest.mark.parametrize("field", ["fingerprint", "dtype", "cache_dtype", "quantization", "speculative"])
def test_another_model_is_refused_by_the_fact_that_differs(field: str) -> None:
    (reason,) = reasons(engine(facts=other(FACTS, **{field: "else"})))
    assert (reason.field, reason.producer) == (f"model.{field}", "'else'")
    assert reason.consumer == repr(getattr(FACTS, field))


def test_the_models_name_and_its_longest_prompt_may_differ() -> None:
    """Weights are compared, not names: a copy in another directory is the same model."""
    assert plan_transfer(OURS, 0, engine(facts=other(FACTS, model="elsewhere", max_model_tokens=9)))


@pytest.mark.parametrize(
    ("size", "field"),
    [
        ("tp", "tensor_parallel_size"),
        ("pp", "pipeline_parallel_size"),
        ("pcp", "prefill_context_parallel_size"),
        ("dcp", "decode_context_parallel_size"),
    ],
)
def test_another_parallel_size_is_refused_by_its_vllm_name(size: str, field: str) -> None:
    (reason,) = reasons(engine(topology=Topology(**{size: 2})))
    assert (reason.field, reason.producer, reason.consumer) == (field, "2", "1")
    assert f"--{field.replace('_', '-')}" in reason.change


def test_another_number_of_cache_groups_is_refused() -> None:
    group = CacheGroup(policy="full", block_tokens=4)
    (reason,) = reasons(engine(groups=(group, group)))
    assert (reason.field, reason.producer, reason.consumer) == ("cache_groups", "2", "1")


@pytest.mark.parametrize(("field", "value"), [("policy", "window"), ("window_tokens", 7)])
def test_a_group_that_forgets_other_tokens_is_refused(field: str, value: Any) -> None:
    group = CacheGroup(policy="full", block_tokens=4)
    (reason,) = reasons(engine(groups=(other(group, **{field: value}),)))
    assert (reason.field, reason.producer) == (f"cache_groups[0].{field}", str(value))
    assert reason.consumer == str(getattr(group, field))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heads", Range(2, 4)),
        ("block_tokens", 2),
        ("tile_tokens", 2),
        ("cell_bytes", 4),
        ("format", Format(dtype="float16", packing="k|v")),
        ("format", Format(dtype="bfloat16", packing="cpu_attn/amx")),
        ("format", Format(dtype="bfloat16", packing="k|v", quantization="fp8_per_tensor")),
    ],
)
def test_a_tensor_whose_bytes_mean_something_else_is_refused_by_layer_and_field(field: str, value: Any) -> None:
    (reason,) = reasons(engine(tensor(**{field: value})))
    assert reason.field == f"layers.0/kv.{field}"
    assert (reason.producer, reason.consumer) == (str(value), str(getattr(tensor(), field)))


def test_a_tensor_of_another_group_is_refused() -> None:
    two = (CacheGroup(policy="full", block_tokens=4), CacheGroup(policy="full", block_tokens=4))
    (reason,) = reasons(engine(tensor(group=1), groups=two), engine(groups=two))
    assert reason.field == "layers.0/kv.group"


def test_a_layer_that_only_one_side_has_is_refused_by_name() -> None:
    (extra,) = reasons(engine(tensor(), tensor(layer="draft.0")))
    assert (extra.field, extra.producer, extra.consumer) == ("tensor draft.0/kv", "present", "absent")
    (missing,) = reasons(OURS, engine(tensor(), tensor(kind="scales")))
    assert (missing.field, missing.producer, missing.consumer) == ("tensor layers.0/scales", "absent", "present")


def test_all_reasons_come_at_once() -> None:
    wrong = engine(
        facts=other(FACTS, dtype="float16", quantization="fp8"),
        topology=Topology(tp=2, pp=2),
        groups=(CacheGroup(policy="window", block_tokens=4, window_tokens=8),),
    )
    assert [reason.field for reason in reasons(wrong)] == [
        "model.dtype",
        "model.quantization",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "cache_groups[0].policy",
        "cache_groups[0].window_tokens",
    ]
    fields = [reason.field for reason in reasons(engine(tensor(cell_bytes=4, block_tokens=2)))]
    assert fields == ["layers.0/kv.block_tokens", "layers.0/kv.cell_bytes"]


def test_the_error_text_numbers_the_reasons_with_both_values_and_what_to_change() -> None:
    with pytest.raises(PlanRefused) as refused:
        plan_transfer(OURS, 0, engine(facts=other(FACTS, dtype="float16"), topology=Topology(tp=2)))
    text = str(refused.value)
    assert "(1) model.dtype: producer 'float16', consumer 'bfloat16'; start both engines with the same --dtype" in text
    assert "(2) tensor_parallel_size: producer 2, consumer 1; " in text
    assert "\n" not in text


def test_a_hundred_different_layers_do_not_flood_the_log() -> None:
    ours, theirs = ([tensor(layer=f"{n}", cell_bytes=size) for n in range(100)] for size in (8, 4))
    found = reasons(engine(*theirs), engine(*ours))
    assert len(found) == 9
    assert found[-1].change == "and 92 more differences"


def test_a_producer_that_does_not_describe_our_place_is_refused() -> None:
    (reason,) = reasons(engine(workers=[worker(place=Place(tp=1))]))
    assert (reason.field, reason.producer, reason.consumer) == ("workers", "none", "tp0")


def test_a_description_that_contradicts_itself_is_an_invalid_message() -> None:
    with pytest.raises(InvalidMessage):
        plan_transfer(OURS, 0, engine(tensor(group=3)))


@pytest.mark.parametrize("many", ["producer", "consumer"])
def test_more_descriptors_than_an_index_can_count_are_refused(many: str) -> None:
    """NIXL's indices are 32 bits wide; a larger one would wrap around to another block."""
    big = tensor(blocks=1 << 31, block_stride=64)
    pair = (engine(big), OURS) if many == "producer" else (OURS, engine(big))
    (reason,) = reasons(*pair)
    assert (reason.field, getattr(reason, many)) == ("descriptors", str(1 << 31))
    ok = tensor(blocks=(1 << 31) - 1)
    assert plan_transfer(OURS, 0, engine(ok))


def test_the_plan_says_in_one_line_who_reads_what_in_which_runs() -> None:
    layers = [tensor(), tensor(layer="layers.1")]
    dense = plan_transfer(engine(*layers), 0, engine(*layers)).describe()
    facts = "producer=P tp0 reads tp0: 2 tensors, 32 B/token, direct, runs of 64 B, 2 descriptors a block"
    assert dense == f"plan {facts}"
    gapped = engine(tensor(head_stride=40), layers[1])
    assert "runs of 32…64 B, 3 descriptors a block" in plan_transfer(engine(*layers), 0, gapped).describe()


def test_a_route_that_only_releases_says_so() -> None:
    plan = TransferPlan("P", Place(tp=1), 1, (Route(0, Place(), (), 1), Route(1, Place(tp=1), (), 1)))
    assert plan.describe().count("release only") == 2
    assert "\n" not in plan.describe()
