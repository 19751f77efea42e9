"""Engines of unequal shards, pipelines and blocks: every pair answers as one engine of the decoder's settings does.

Models of random weights in float32, whose answers tell every wrong byte; the engines are real ones of `forked_engine`.
That a model answers alike on one rank and on two, without a transfer, is tested first: it is what makes a difference
between two engines a fault of the handover. The control is the decoder itself, asked before anything was handed over;
that it answers as an engine without a connector does is tested once.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.accuracy.model import config_of, token_size
from scripts.accuracy.settings import TINY_MODEL, TINY_MODELS
from tests.draws import usual_cases
from tests.vllm.conftest import model_folder
from tests.vllm.forked_engine import ForkedEngine, hand_over, start
from tests.vllm.forked_engine_child import EngineSpec

Tokens = list[int]

_rng = random.Random(5)
PROMPTS: list[Tokens] = [
    [_rng.randrange(3, 49000) for _ in range(n)]
    for n in (3, 31, 32, 33, 127, 128, 129, 300)
]
FEW_HEADS = [name for name, heads in TINY_MODELS.items() if heads <= 2]
"""Of two KV heads two ranks hold one each, and of one both hold a copy. With more they divide them, like the eight of
`test_model_kinds`."""
ON_ANY_CORES = {1: "0", 2: "0|1"}


def answers(engine: ForkedEngine) -> list[Tokens]:
    """The engine's answers to all prompts without a transfer."""
    found = [engine.ask(prompt) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in found}) == len(PROMPTS)
    return found


def hand_over_all(
    producer: ForkedEngine, consumer: ForkedEngine
) -> tuple[list[Tokens], list[int]]:
    """The answers to all prompts, and the bytes that were moved for each."""
    done = [hand_over(producer, consumer, prompt) for prompt in PROMPTS]
    return [answer.tokens for answer, _ in done], [read for _, read in done]


def needed(model: str, prompt: Sequence[int], blocks: int, decoder_tp: int = 1) -> int:
    """Bytes of a prompt's whole blocks of so many tokens, with the copies that a decoder's ranks hold."""
    size = token_size(config_of(model), decoder_tp, "float32")
    assert size is not None
    return math.ceil(len(prompt) / blocks) * blocks * size[0]


@usual_cases(1)
@pytest.mark.parametrize("name", FEW_HEADS)
def test_one_rank_and_two_hand_over_to_each_other_whatever_the_number_of_kv_heads(
    name: str, logs: Path
) -> None:
    model = model_folder(name)
    specs = [
        EngineSpec(f"both-{name}-tp{tp}", model, "kv_both", tp=tp, cores=cores)
        for tp, cores in ON_ANY_CORES.items()
    ]
    with ExitStack() as running:
        one, two = start(running, logs, specs)
        alone, sharded = answers(one), answers(two)
        assert alone == sharded, "control: without a transfer both sizes answer alike"
        for producer, consumer, expected in ((one, two, sharded), (two, one, alone)):
            found, read = hand_over_all(producer, consumer)
            assert found == expected, f"TP {producer.spec.tp} to TP {consumer.spec.tp}"
            stated = [
                needed(model, prompt, 128, consumer.spec.tp) for prompt in PROMPTS
            ]
            assert read == stated


@usual_cases(0)
def test_pipeline_stages_hand_over_to_one_and_take_over_from_others(logs: Path) -> None:
    """One stage and two in both directions, and two ranks to two stages."""
    model = model_folder(TINY_MODEL)
    stages = EngineSpec("stages", model, "kv_both", pp=2, cores="0|1")
    one = EngineSpec("one-stage", model, "kv_both", cores="1")
    ranks = EngineSpec("ranks", model, "kv_producer", tp=2, cores="0|1")
    with ForkedEngine(EngineSpec("plain", model), logs) as plain:
        alone = answers(plain)
    with ExitStack() as running:
        source, target, sharded = start(running, logs, [stages, one, ranks])
        assert answers(target) == alone, "control: as without a connector"
        for producer, consumer in (
            (source, target),
            (target, source),
            (sharded, source),
        ):
            found, read = hand_over_all(producer, consumer)
            assert found == alone, f"{producer.spec.name} to {consumer.spec.name}"
            assert read == [needed(model, prompt, 128) for prompt in PROMPTS]
    (plan,) = set(
        re.findall(
            r"plan producer=\S+ tp0 of \[.*\]: (reads .*)", target.log_path.read_text()
        )
    )
    assert re.findall(r"reads (\S+): ", plan) in (
        ["tp0/pp0…1"],
        ["tp0", "tp0/pp1"],
    )  # stages that are equal are one


def test_blocks_of_another_size_are_filled(logs: Path) -> None:
    """Larger ones and smaller ones, by the cost model's choice, which is to stage them, and with each piece read into
    its place."""
    model = model_folder(TINY_MODEL)
    producers = [
        EngineSpec(f"blocks-{theirs}", model, "kv_producer", block_size=theirs)
        for theirs in (32, 128)
    ]
    staged = EngineSpec("staged", model, "kv_consumer", block_size=64, cores="1")
    direct = replace(staged, name="direct", extra_config={"staging_pool_bytes": 0})
    with ExitStack() as running:
        engines = start(running, logs, [*producers, staged, direct])
        sources = engines[:2]
        targets = engines[2:]
        alone = answers(targets[0])
        for source in sources:
            theirs = source.spec.block_size
            assert theirs is not None
            least, most = (
                [needed(model, prompt, blocks) for prompt in PROMPTS]
                for blocks in (min(theirs, 64), theirs)
            )
            for target, allowed in zip(targets, (most, least), strict=True):
                at = f"{source.spec.name} to {target.spec.name}"
                found, read = hand_over_all(source, target)
                assert found == alone, at
                # What is staged may be read in whole blocks of the producer.
                assert all(
                    low <= moved <= high
                    for low, moved, high in zip(least, read, allowed, strict=True)
                ), at
        for target in targets:
            plans = re.findall(
                r"plan producer=\S+ tp0 of \[.*\]: (reads .*)",
                target.log_path.read_text(),
            )
            assert len(plans) == len(sources)
            is_staged = target.spec is staged
            assert ["staged" in plan for plan in plans] == [is_staged] * len(sources)
