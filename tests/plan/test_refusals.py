"""Pairs that cannot work hear every reason at once, each with its field, both values and what to change."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import PlanRefused, Reason
from kvferry.protocol.geometry import Format, Interleave, Place, Range
from kvferry.protocol.handshake import CacheGroup, EngineDescription, Setting
from tests.plan.engines import sharded
from tests.plan.samples import FACTS, engine, other, tensor, worker
from tests.promises import promise

OURS = engine(engine_id="D")
FULL = CacheGroup(policy="full", block_tokens=4)
SCALED = engine(tensor(), tensor(kind="scales"))
DRAFTING = engine(tensor(), tensor(layer="draft.1"), tensor(layer="draft.2"))
BYTES: tuple[tuple[str, Any], ...] = (
    ("cell_bytes", 4),
    ("format", Format(dtype="float16", packing="k|v")),
    ("format", Format(dtype="bfloat16", packing="cpu_attn/amx")),
    ("format", Format(dtype="bfloat16", packing="k|v", quantization="fp8_per_tensor")),
)
"""Tensors whose bytes mean something else."""


def reasons(
    producer: EngineDescription, consumer: EngineDescription = OURS, index: int = 0
) -> tuple[Reason, ...]:
    with pytest.raises(PlanRefused) as refused:
        plan_transfer(consumer, index, producer)
    for reason in refused.value.reasons:
        assert reason.field
        assert len(reason.change) >= 20, "says what an operator can do"
        assert "\n" not in str(reason)
    return refused.value.reasons


@promise(7)
@pytest.mark.parametrize(
    ("field", "change"),
    [
        (
            "fingerprint",
            "serve the same weights on both sides, or name them alike with model_fingerprint",
        ),
        ("dtype", "start both engines with the same --dtype"),
        ("quantization", "start both engines with the same --quantization"),
        ("speculative", "give both engines the same --speculative-config"),
    ],
)
def test_another_model_is_refused_by_the_fact_that_differs(
    field: str, change: str
) -> None:
    (reason,) = reasons(engine(facts=other(FACTS, **{field: "else"})))
    assert (reason.field, reason.producer, reason.change) == (
        f"model.{field}",
        "'else'",
        change,
    )
    assert reason.consumer == repr(getattr(FACTS, field))


@pytest.mark.parametrize(
    ("theirs", "ours", "field", "values"),
    [
        (engine(groups=(FULL, FULL)), OURS, "cache_groups", ("2", "1")),
        (
            engine(groups=(other(FULL, policy="window"),)),
            OURS,
            "cache_groups[0].policy",
            ("window", "full"),
        ),
        (
            engine(groups=(other(FULL, window_tokens=7),)),
            OURS,
            "cache_groups[0].window_tokens",
            ("7", "0"),
        ),
        (engine(tensor(tile_tokens=2)), OURS, "layers.0/kv.tile_tokens", ("2", "1")),
        (
            engine(tensor(group=1), groups=(FULL, FULL)),
            engine(groups=(FULL, FULL)),
            "layers.0/kv.group",
            ("1", "0"),
        ),
        (
            OURS,
            SCALED,
            "tensor layers.0/scales",
            ("no worker holds heads 0…1", "needs them"),
        ),
        (
            DRAFTING,
            OURS,
            "layer draft.1",
            ("has it, and 1 more up to draft.2", "has no such layer"),
        ),
        *(
            (
                engine(tensor(**{of: x})),
                OURS,
                f"layers.0/kv.{of}",
                (str(x), str(getattr(tensor(), of))),
            )
            for of, x in BYTES
        ),
    ],
)
def test_a_single_difference_is_named_with_both_values(
    theirs: EngineDescription,
    ours: EngineDescription,
    field: str,
    values: tuple[str, str],
) -> None:
    (reason,) = reasons(theirs, ours)
    assert (reason.field, reason.producer, reason.consumer) == (field, *values)


def with_settings(**values: str) -> EngineDescription:
    settings = tuple(
        Setting(name=name.replace("__", "."), value=value)
        for name, value in values.items()
    )
    return engine(facts=other(FACTS, settings=settings))


@promise(7)
@pytest.mark.parametrize(
    ("theirs", "ours", "field", "values", "change"),
    [
        (
            {"config__eps": "1"},
            {"config__eps": "2"},
            "model.config.eps",
            ("1", "2"),
            "--hf-overrides",
        ),
        (
            {"config__eps": "1"},
            {},
            "model.config.eps",
            ("1", "not set"),
            "--hf-config-path",
        ),
        (
            {},
            {"draft__weights": "2"},
            "model.draft.weights",
            ("not set", "2"),
            "--speculative-config",
        ),
        (
            {"longrope__x": "l"},
            {"longrope__x": "s"},
            "model.longrope.x",
            ("l", "s"),
            "--max-model-len",
        ),
        (
            {"attention_temperature": "1"},
            {},
            "model.attention_temperature",
            ("1", "not set"),
            "generation-config",
        ),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values_and_the_option_that_changes_it(
    theirs: dict[str, str],
    ours: dict[str, str],
    field: str,
    values: tuple[str, str],
    change: str,
) -> None:
    (reason,) = reasons(with_settings(**theirs), with_settings(**ours))
    assert (reason.field, reason.producer, reason.consumer) == (field, *values)
    assert change in reason.change


def test_the_order_of_settings_does_not_matter() -> None:
    plan_transfer(with_settings(a="1", b="2"), 0, with_settings(b="2", a="1"))


def test_of_many_settings_eight_are_named_and_the_others_counted() -> None:
    found = reasons(with_settings(**{f"s{n}": "1" for n in range(100)}))
    assert len(found) == 9
    assert found[-1].change == "and 92 more differences"


@pytest.mark.parametrize("layers", [1, 3])
def test_a_producer_with_more_heads_serves_another_model(layers: int) -> None:
    """Every head that is wanted is there, but it is not the same head."""
    few, many = (
        engine(
            *(tensor(layer=f"layers.{n}", heads=Range(0, heads)) for n in range(layers))
        )
        for heads in (2, 4)
    )
    (reason,) = reasons(many, few)
    more = ", as have 2 more tensors up to layers.2/kv" if layers == 3 else ""
    assert (reason.field, reason.producer, reason.consumer) == (
        "tensor layers.0/kv",
        f"4 heads{more}",
        "2 heads",
    )
    plan_transfer(few, 0, few)


def test_cells_of_several_tokens_must_divide_the_unit() -> None:
    """Cells of 4 tokens in blocks of 12 and 8: equal cells, and units of 4."""
    groups = (CacheGroup(policy="full", block_tokens=24),)
    fours = [
        engine(tensor(block_tokens=size, tile_tokens=4), groups=groups)
        for size in (12, 8)
    ]
    assert plan_transfer(fours[0], 0, fours[1]).routes
    third = Interleave(ranks=2, rank=0, run_tokens=2)
    other_half = Interleave(ranks=2, rank=1, run_tokens=2)
    halves = [
        worker(
            [tensor(block_tokens=8, tile_tokens=4, interleave=share)],
            Place(tp=rank, dcp=rank),
        )
        for rank, share in enumerate((third, other_half))
    ]
    (reason,) = reasons(engine(workers=halves, groups=groups), fours[0])
    assert (reason.field, reason.producer, reason.consumer) == (
        "layers.0/kv.tile_tokens",
        "runs of 2 tokens",
        "cells of 4 tokens",
    )
    assert "cp_kv_cache_interleave_size" in reason.change


def test_heads_that_no_producer_worker_describes_are_refused() -> None:
    """One rank of four has not described itself."""
    whole = sharded(tp=4, layers=1)
    partial = other(whole, workers=whole.workers[:2] + whole.workers[3:])
    found = reasons(partial, sharded("D", layers=1))
    assert [(reason.field, reason.producer) for reason in found] == [
        (
            "tensor layers.0/k",
            "no worker holds head 2, nor those of 1 more tensors up to layers.0/v",
        ),
    ]
    assert "let every producer worker describe itself" in found[0].change


def test_tokens_that_no_producer_worker_holds_are_refused_by_their_rank() -> None:
    whole = sharded(tp=2, dcp=2, model="mla", layers=1)
    (reason,) = reasons(
        other(whole, workers=whole.workers[:1]), sharded("D", model="mla", layers=1)
    )
    assert (
        reason.producer
        == "no worker holds head 0 of the tokens of context-parallel rank 1"
    )


@promise(7)
def test_all_reasons_come_at_once() -> None:
    wrong = engine(
        tensor(cell_bytes=4, tile_tokens=2, format=Format(dtype="float16")),
        facts=other(FACTS, dtype="float16", quantization="fp8"),
        groups=(CacheGroup(policy="window", block_tokens=4, window_tokens=8),),
    )
    found = reasons(wrong, engine(tensor(), tensor(layer="layers.1")))
    assert "(1) model.dtype: producer 'float16', consumer 'bfloat16'; " in str(
        PlanRefused(found)
    )
    assert [reason.field for reason in found] == [
        "model.dtype",
        "model.quantization",
        "cache_groups[0].policy",
        "cache_groups[0].window_tokens",
        "tensor layers.1/kv",
        "layers.0/kv.format",
        "layers.0/kv.cell_bytes",
        "layers.0/kv.tile_tokens",
    ]


def test_every_worker_of_the_consumer_hears_the_reasons_of_all() -> None:
    """A reason against one worker's part is a reason against the pair: none of the workers starts."""
    consumer = engine(
        workers=[worker(), worker([tensor(layer="layers.9")], Place(pp=1))]
    )
    for index in range(2):
        (reason,) = reasons(OURS, consumer, index)
        assert reason.field == "tensor layers.9/kv"


def test_the_same_difference_on_every_rank_is_reported_once() -> None:
    consumer = sharded("D", tp=4, layers=1)
    sizes = [
        worker([other(one, cell_bytes=4) for one in of.tensors], of.place)
        for of in consumer.workers
    ]
    found = reasons(other(consumer, engine_id="P", workers=tuple(sizes)), consumer)
    assert [reason.field for reason in found] == [
        "layers.0/k.cell_bytes",
        "layers.0/v.cell_bytes",
    ]


def test_a_hundred_different_layers_do_not_flood_the_log() -> None:
    ours, theirs = (
        [tensor(layer=f"{n}", cell_bytes=size) for n in range(100)] for size in (8, 4)
    )
    with pytest.raises(PlanRefused) as refused:
        plan_transfer(engine(*ours), 0, engine(*theirs))
    found = refused.value.reasons
    assert len(found) == 9
    assert found[-1].change == "and 92 more differences"
