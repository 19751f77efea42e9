"""A conversation of three turns over two real engines of unequal blocks: its answers are those of one engine, and each
turn moves only what the one before did not."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from scripts.accuracy.metrics import Scrape
from scripts.accuracy.model import config_of, token_size
from scripts.accuracy.settings import TINY_MODEL
from tests.vllm.conftest import model_folder
from tests.vllm.forked_engine import ForkedEngine
from tests.vllm.forked_engine_child import EngineSpec

_rng = random.Random(11)
SAID = [[_rng.randrange(3, 49000) for _ in range(count)] for count in (150, 40, 75)]
"""The user's prompts, turn by turn."""
COUNT = 50
"""Tokens of an answer."""
PREFILLER_BLOCK, DECODER_BLOCK = 32, 64


def read(counted: Scrape) -> int:
    """Bytes that an engine has loaded, as NIXL counted them."""
    assert counted.total("vllm:kvferry_local_recomputes_total") == 0
    assert counted.total("vllm:nixl_bytes_transferred_sum") == counted.total(
        "vllm:kvferry_planned_bytes_total"
    )
    return int(counted.total("vllm:kvferry_planned_bytes_total"))


def tokens_read(cached: int, stop_token: int, here: int, there: int) -> int:
    """Tokens in the blocks of `there` that hold what a prefix cache of blocks of `here` lacks of `stop_token` tokens,
    of which it has seen `cached`."""
    first_token = cached // here * here
    return (-(-stop_token // there) - first_token // there) * there


def test_three_turns_answer_as_one_engine_and_move_only_what_is_new(logs: Path) -> None:
    model = model_folder(TINY_MODEL)
    size = token_size(config_of(model), 1, "float32")
    assert size is not None
    token_bytes, _ = size
    cached = {"enable_prefix_caching": True}
    both = EngineSpec(
        "turns-prefill",
        model,
        "kv_both",
        block_size=PREFILLER_BLOCK,
        extra_config={"bidirectional_kv_xfer": True, "kv_recompute_threshold": 32},
        engine_args=cached,
    )
    with ExitStack() as running:
        alone = EngineSpec("turns-alone", model, block_size=DECODER_BLOCK)
        single, prefiller, decoder = (
            running.enter_context(ForkedEngine(spec, logs))
            for spec in (
                alone,
                both,
                replace(both, name="turns-decode", block_size=DECODER_BLOCK),
            )
        )
        text: list[int] = []
        offer = None
        in_prefiller = in_decoder = 0
        for said in SAID:
            text = [*text, *said]
            before = prefiller.metrics(), decoder.metrics()
            prefilled = prefiller.answer(text, offer or {"do_remote_decode": True}, 1)
            answer = decoder.answer(text, prefilled.params, COUNT)
            assert answer.tokens == single.ask(text, tokens=COUNT)
            held = len(text) - len(said) - 1
            expected = (
                tokens_read(in_prefiller, held, PREFILLER_BLOCK, DECODER_BLOCK)
                if offer
                else 0
            )
            assert read(prefiller.metrics() - before[0]) == expected * token_bytes
            expected = tokens_read(
                in_decoder, len(text), DECODER_BLOCK, PREFILLER_BLOCK
            )
            assert read(decoder.metrics() - before[1]) == expected * token_bytes
            in_prefiller, in_decoder = len(text), len(text) + COUNT - 1
            text, offer = [*text, *answer.tokens], answer.params
            assert offer is not None
            assert offer["remote_num_tokens"] == in_decoder
        counted = decoder.metrics()
        assert counted.total("vllm:kvferry_turns_offered_total") == 3
        assert counted.total("vllm:kvferry_turns_released_total", how="done") == 2
