"""Every kind of model that vLLM's CPU engine serves: what one engine prefilled, another decodes as it would alone.

Models of random weights (`small_models`) on real engines (`forked_engine`). The control is the decoder itself,
asked without params before anything was handed over. `docs/compatibility.md` names these tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.accuracy.model import default_cache_dir
from tests.draws import usual_cases
from tests.vllm.forked_engine import (
    EngineFailed,
    ForkedEngine,
    difference,
    hand_over,
    hand_over_at_once,
    start,
)
from tests.vllm.forked_engine_child import Answer, EngineSpec
from tests.vllm.model_extras import IMAGE_PIXELS, adapter, multimodal
from tests.vllm.model_kinds import DRAFTED, EXACT, GDN, K_AND_V, LLAMA, Kind
from tests.vllm.small_models import FIRST_TOKEN, VOCABULARY, small_model

_rng = random.Random(5)
LENGTHS = (4, 31, 127, 128, 129, 200, 300, 420)
PROMPTS = [[_rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(n)] for n in LENGTHS]
SOME = PROMPTS[1::2]
"""For pairs of two ranks, which take longer."""

PART_TOKENS = 128
"""Of a prompt that is computed in parts."""

NOISE = 1e-3
"""Log-probabilities in float32 differ by less when the same is computed in another order; 6e-5 was seen."""
BFLOAT16_NOISE = 0.5
"""0.19 was seen of one engine alone, and 0.32 between one rank and two where AMX multiplies."""
NO_FP8 = "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"

NO_MAMBA_1 = "'_OpNamespace' '_C' object has no attribute 'selective_scan_fwd'"


def answers(engine: ForkedEngine) -> list[Answer]:
    """The engine's answers to all prompts without a transfer."""
    found = [engine.answer(prompt) for prompt in PROMPTS]
    assert len({tuple(answer.tokens) for answer in found}) == len(PROMPTS)
    return found


def continuations(
    engine: ForkedEngine, prompts: Sequence[list[int]]
) -> list[tuple[list[int], Answer]]:
    """Prompts that end with a token of the engine's own, and what it says next: it has decoded that token, like any
    decoder, and not prefilled it."""
    found = []
    for prompt in prompts:
        said = engine.answer(prompt, tokens=9)
        found.append(
            (
                [*prompt, said.tokens[0]],
                Answer(said.tokens[1:], said.logprobs[1:], None),
            )
        )
    assert len({tuple(answer.tokens) for _, answer in found}) == len(prompts)
    return found


def assert_handed_over(
    producer: ForkedEngine,
    consumer: ForkedEngine,
    prompts: Sequence[list[int]],
    expected: Sequence[Answer],
    kind: Kind,
) -> None:
    """The prompts are answered as expected, and move what they need."""
    for prompt, answer in zip(prompts, expected, strict=True):
        found, read = hand_over(producer, consumer, prompt)
        at = f"{producer.spec.name} to {consumer.spec.name}, {len(prompt)} tokens"
        assert difference(found, answer) < NOISE, at
        assert read == kind.needed(prompt, consumer.spec.tp), at


def assert_every_byte_counts(
    producer: ForkedEngine, consumer: ForkedEngine, states: Sequence[int] = (0, 1)
) -> None:
    """One byte that is not the producer's, in any cache group and state, is seen in the answer."""
    prompt = PROMPTS[0]
    right, again = (hand_over(producer, consumer, prompt)[0] for _ in range(2))
    assert right == again, "control: the decoder gives the same numbers every time"
    for index, layers in enumerate(producer.groups()):
        for state in states:
            params = producer.prefill(prompt)
            producer.flip_a_byte(layers[0], params["remote_block_ids"][index][0], state)
            assert consumer.answer(prompt, params).logprobs != right.logprobs, (
                layers,
                state,
            )


def assert_read_while_it_grows(
    producer: ForkedEngine, consumer: ForkedEngine, expected: Answer, kind: Kind
) -> None:
    """What grows of a hybrid is read while the longest prompt is computed in parts; its windows and states when it is
    complete."""
    prompt = PROMPTS[-1]
    held_at = 2 * PART_TOKENS
    answer, counted = hand_over_at_once(
        producer, consumer, prompt, "both-legs", held_at
    )
    assert difference(answer, expected) < NOISE
    assert counted.by_label("vllm:kvferry_local_recomputes_total", "reason") == {}
    most = math.ceil(len(prompt) / kind.block_tokens) * kind.block_bytes
    early = counted.total("vllm:kvferry_early_bytes_total")
    assert kind.block_bytes <= early <= most


@usual_cases(2)
@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.model)
def test_a_model_is_handed_over_alone_and_between_one_rank_and_two(
    kind: Kind, logs: Path
) -> None:
    with ExitStack() as running:
        one, twin, two = start(
            running,
            logs,
            [
                kind.spec("one"),
                kind.spec("twin", cores="1", max_num_batched_tokens=PART_TOKENS),
                kind.spec("two", 2),
            ],
        )
        alone = answers(one)
        assert_handed_over(one, twin, PROMPTS, alone, kind)
        assert_handed_over(
            one, two, SOME, [two.answer(prompt) for prompt in SOME], kind
        )
        assert_handed_over(two, one, SOME, alone[1::2], kind)
        assert_every_byte_counts(one, twin)
        # By the same engines: each that starts takes longer than all of its prompts.
        if kind.is_hybrid:
            assert_read_while_it_grows(twin, one, alone[-1], kind)


def test_a_gated_delta_net_is_handed_over_exactly_between_equals_and_else_within_its_rounding(
    logs: Path,
) -> None:
    """In bfloat16 a token is another when it is one of many or when ranks add up: equal numbers can be asked for only
    where every token is computed as in the control. Between one rank and two it is the next token, and how likely it
    is, unless two are as likely."""
    with ExitStack() as running:
        specs = [GDN.spec("one"), GDN.spec("twin", cores="1"), GDN.spec("two", 2)]
        one, twin, two = start(running, logs, specs)
        for prompt, expected in continuations(one, PROMPTS):
            found, read = hand_over(one, twin, prompt)
            assert (found.tokens, found.logprobs) == (
                expected.tokens,
                expected.logprobs,
            ), len(prompt)
            assert read == GDN.needed(prompt)
        for producer, consumer in ((one, two), (two, one)):
            same = 0
            for prompt, expected in continuations(consumer, SOME):
                found, read = hand_over(producer, consumer, prompt)
                same += found.tokens[0] == expected.tokens[0]
                assert abs(found.logprobs[0] - expected.logprobs[0]) < BFLOAT16_NOISE, (
                    producer.spec.name,
                    len(prompt),
                )
                assert read == GDN.needed(prompt, consumer.spec.tp)
            assert same >= len(SOME) - 1, (
                f"{producer.spec.name}: two likeliest tokens may be as likely, once"
            )
        # A byte of the temporal state is lost in rounding: it decays with every token.
        assert_every_byte_counts(one, twin, states=(0,))


def test_adapters_and_salts_belong_to_what_is_handed_over(logs: Path) -> None:
    """A request is served from another's blocks only with the same adapter and the same salt."""
    lora = str(adapter())
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    prompt = PROMPTS[6]
    with ExitStack() as running:
        specs = [
            LLAMA.spec("adapted", **settings),
            LLAMA.spec("adapted-too", cores="1", **settings),
        ]
        producer, consumer = start(running, logs, specs)
        plain, adapted = consumer.answer(prompt), consumer.answer(prompt, lora=lora)
        assert plain.tokens != adapted.tokens
        equals: list[tuple[dict[str, Any], Answer]] = [
            ({}, plain),
            ({"lora": lora}, adapted),
            ({"salt": "pepper"}, plain),
            ({"lora": lora, "salt": "pepper"}, adapted),
        ]
        for more, expected in equals:
            found, read = hand_over(producer, consumer, prompt, **more)
            assert (difference(found, expected) < NOISE, read) == (
                True,
                LLAMA.needed(prompt),
            ), more
        others: list[tuple[dict[str, Any], dict[str, Any], Answer]] = [
            ({"lora": lora}, {}, plain),
            ({}, {"lora": lora}, adapted),
            ({"salt": "pepper"}, {"salt": "salt"}, plain),
            ({"salt": "pepper"}, {}, plain),
        ]
        for asked, given, expected in others:
            before = consumer.metrics()
            found = consumer.answer(prompt, producer.prefill(prompt, **asked), **given)
            counted = consumer.metrics() - before
            assert difference(found, expected) < NOISE, (asked, given)
            assert counted.by_label(
                "vllm:kvferry_local_recomputes_total", "reason"
            ) == {"other_prompt": 1}
            assert counted.total("vllm:nixl_bytes_transferred_sum") == 0


def test_images_belong_to_what_is_handed_over(logs: Path) -> None:
    """Tokens of an image are equal for all images: what tells them apart is the digest of what is in them."""
    from PIL import Image

    numbers = np.random.default_rng(5)
    pixels = numbers.integers(
        0, 256, (2, IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8
    )
    first, second = (Image.fromarray(each) for each in pixels)
    prompt = PROMPTS[1]
    model = str(multimodal())
    settings: dict[str, Any] = {"max_model_len": 512, "skip_tokenizer_init": False}
    with ExitStack() as running:
        specs = [
            EngineSpec(
                f"images-{name}", model, "kv_both", cores=cores, engine_args=settings
            )
            for name, cores in (("one", "0"), ("twin", "1"))
        ]
        one, twin = start(running, logs, specs)
        alone, of_second = (
            twin.answer(prompt, image=image) for image in (first, second)
        )
        assert alone.tokens != of_second.tokens
        found, read = hand_over(one, twin, prompt, image=first)
        assert (difference(found, alone) < NOISE, read) == (True, 128 * 2 * 2 * K_AND_V)
        before = twin.metrics()
        found = twin.answer(prompt, one.prefill(prompt, image=first), image=second)
        counted = twin.metrics() - before
        assert difference(found, of_second) < NOISE
        assert counted.by_label("vllm:kvferry_local_recomputes_total", "reason") == {
            "other_prompt": 1
        }
        assert counted.total("vllm:nixl_bytes_transferred_sum") == 0


@usual_cases(1)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_decoder_that_drafts_is_given_the_prompt_and_its_drafters_cache(
    method: str, logs: Path
) -> None:
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "ngram":
        settings |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        settings["model"] = str(small_model("small-draft", default_cache_dir()))
    kind = LLAMA if method == "ngram" else DRAFTED
    with ExitStack() as running:
        specs = [
            kind.spec(f"{method}-{name}", cores=cores, speculative_config=settings)
            for name, cores in (("one", "0"), ("twin", "1"))
        ]
        one, twin = start(running, logs, specs)
        assert_handed_over(one, twin, PROMPTS, answers(twin), kind)


def test_a_cache_of_fp8_is_handed_over_where_the_processor_can_attend_to_one(
    logs: Path,
) -> None:
    with ExitStack() as running:
        specs = [
            LLAMA.spec(f"fp8-{name}", cores=cores, kv_cache_dtype="fp8")
            for name, cores in (("one", "0"), ("twin", "1"))
        ]
        try:
            one, twin = start(running, logs, specs)
        except EngineFailed as failed:
            if NO_FP8 not in str(failed):
                raise
            pytest.skip(f"vLLM: {NO_FP8}")
        for prompt, expected in continuations(twin, PROMPTS):
            found, read = hand_over(one, twin, prompt)
            assert (found.tokens, read) == (expected.tokens, LLAMA.needed(prompt) // 4)


def test_mamba_1_is_not_served_by_vllm_on_a_cpu(logs: Path) -> None:
    """It starts, and ends with its first request. When this fails, the model belongs to those above."""
    spec = replace(Kind("small-mamba1-hybrid").spec("plain"), role="")
    with (
        ForkedEngine(spec, logs) as engine,
        pytest.raises(EngineFailed, match="has ended"),
    ):
        engine.ask(PROMPTS[0])
    assert NO_MAMBA_1 in engine.log_path.read_text()
