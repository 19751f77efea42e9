"""Caches as vLLM configures and views them, moved by NIXL: the consumer's layers read what the producer's have written.

`test_layout_kinds` has all kinds of models and shapes, with memmove for NIXL.
"""

from __future__ import annotations

import itertools
import math

import pytest

from tests.connector.recorded import RECORDED
from tests.connector.recorded_engine import RecordedEngine
from tests.connector.recorded_handover import hand_over
from tests.connector.state_models import orient

pytestmark = pytest.mark.slow

POOLS = {"direct": 0, "staged": 1 << 18}
NUM_TOKENS = 150
_seeds = itertools.count(1)


@pytest.fixture(autouse=True)
def channels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    orient(monkeypatch, "DS")


@pytest.mark.parametrize(
    ("name", "producer", "consumer", "pool"),
    [
        *itertools.product(["Nemotron-H", "Granite, one group"], [4], [2], POOLS),
        *itertools.product(["Nemotron-H", "Granite, one group"], [2], [4], POOLS),
        *itertools.product(["Jamba", "Qwen3-Next"], [4], [2], ["direct"]),
        *itertools.product(["Jamba", "Qwen3-Next"], [2], [4], ["staged"]),
        ("Jamba", 1, 2, "direct"),
        ("Qwen3-Next", 2, 1, "direct"),
    ],
)
def test_states_arrive_right_per_projection_whatever_the_ranks(
    name: str, producer: int, consumer: int, pool: str
) -> None:
    source, target = (
        RecordedEngine(RECORDED[name], producer),
        RecordedEngine(RECORDED[name], consumer),
    )
    moved = hand_over(
        source, target, NUM_TOKENS, next(_seeds), staging_pool_bytes=POOLS[pool]
    )
    tensors = [tensor for one in target.workers for tensor in one.caches.tensors]
    attention = sum(
        len(tensor.heads) * tensor.cell_bytes
        for tensor in tensors
        if tensor.kind in ("k", "v")
    )
    specs = RECORDED[name].specs(consumer)
    states = (
        sum(specs[layer].state_content_size_bytes for layer in RECORDED[name].states)
        * consumer
    )
    unit = math.gcd(source.groups[-1].block_tokens, target.groups[-1].block_tokens)
    if pool == "direct":  # what is staged may bring more of a block than is needed
        assert moved == states + attention * -(-NUM_TOKENS // unit) * unit


@pytest.mark.parametrize("layouts", [("DS", "SD"), ("SD", "SD")])
def test_states_arrive_from_engines_that_keep_a_columns_channels_together(
    layouts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orient(monkeypatch, layouts[0])
    source = RecordedEngine(RECORDED["Nemotron-H"], 2)
    orient(monkeypatch, layouts[1])
    target = RecordedEngine(RECORDED["Nemotron-H"])
    hand_over(
        source, target, NUM_TOKENS, next(_seeds), staging_pool_bytes=POOLS["staged"]
    )


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3.2", "Gemma-3", "Llama-4", "Llama with a drafter"]
)
def test_attention_of_every_kind_arrives_from_layers_that_lie_in_one_block(
    name: str,
) -> None:
    source, target = (
        RecordedEngine(RECORDED[name], layout="BLHNC"),
        RecordedEngine(RECORDED[name], 2),
    )
    hand_over(
        source, target, NUM_TOKENS, next(_seeds), staging_pool_bytes=POOLS["direct"]
    )


@pytest.mark.parametrize(
    "name", ["Qwen3-Next, prefix caching and drafts", "Nemotron-H"]
)
def test_states_arrive_from_a_pipeline_whose_kernel_blocks_are_smaller(
    name: str,
) -> None:
    source = RecordedEngine(RECORDED[name], pp=2, kernel_tokens=32)
    hand_over(
        source,
        RecordedEngine(RECORDED[name], 2),
        NUM_TOKENS,
        next(_seeds),
        staging_pool_bytes=POOLS["direct"],
    )
