"""One producer, one consumer: what a user sees, and what an operator reads."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.accuracy.engines import Router
from tests.vllm.pair import TIMEOUT_S, Pair, long_prompt, post, text_of
from tests.waiting import wait_until

LAYERS, HEADS, HEAD_DIM, FLOAT, BLOCK = 4, 4, 32, 4, 128
BLOCK_BYTES = LAYERS * HEADS * 2 * HEAD_DIM * FLOAT * BLOCK


def test_the_decoder_answers_from_the_producers_cache_and_computes_one_token(pair: Pair) -> None:
    prompt = long_prompt("A good one")
    want = pair.plain(pair.producer, prompt)
    before, before_p = pair.consumer.metrics(), pair.producer.metrics()
    params = pair.prefill(prompt)
    answer = pair.decode(prompt, params)
    assert text_of(answer) == want
    moved = pair.consumer.metrics() - before
    blocks = len(params["remote_block_ids"][0])
    assert blocks == -(-params["remote_num_tokens"] // BLOCK)
    assert moved.total("vllm:kvferry_planned_bytes_total") == blocks * BLOCK_BYTES
    assert moved.total("vllm:nixl_bytes_transferred_sum") == blocks * BLOCK_BYTES
    assert moved.total("vllm:kvferry_local_recomputes_total") == 0
    # vLLM's own count: all prompt tokens came from outside but the last, which it always computes itself.
    external = moved.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert external >= params["remote_num_tokens"] - 1
    assert moved.total("vllm:prompt_tokens_by_source_total", source="local_compute") <= 1
    wait_until(
        lambda: (pair.producer.metrics() - before_p).total("vllm:kvferry_leases_released_total", how="done") == 1,
        "the producer's blocks are free",
    )


def test_a_batch_through_the_router_answers_every_prompt_with_its_own_text(pair: Pair, logs: Path) -> None:
    prompts = [long_prompt("Alpha"), long_prompt("Beta")]
    want = [pair.plain(pair.producer, prompt) for prompt in prompts]
    before, before_p = pair.consumer.metrics(), pair.producer.metrics()
    with Router([pair.producer.base_url], [pair.consumer.base_url], logs, TIMEOUT_S) as router:
        router.wait_ready(60)
        body = {"model": "model", "prompt": prompts, "max_tokens": 8, "temperature": 0}
        answer = post(router.base_url, body)
        assert answer.status_code == 200, answer.text
        got = {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
        assert [got[0], got[1]] == want
        # The peer's bug leaves the decoder's prefix cache poisoned for the second prompt: ask for it plainly.
        assert [pair.plain(pair.consumer, prompt) for prompt in prompts] == want
        for engine, logged in ((pair.producer, "is to be decoded elsewhere"), (pair.consumer, "are held by engine")):
            routed = rf"req={re.escape(answer.json()['id'])}\S*[ :].*{logged}"
            assert re.search(routed, engine.log_path.read_text()), "both engines' ids contain the router's"
        several = post(router.base_url, body | {"prompt": prompts[0], "n": 2, "temperature": 0.7, "seed": 5})
        assert several.status_code == 200, several.text
        assert len(several.json()["choices"]) == 2
    moved = pair.consumer.metrics() - before
    # The router sends both legs at once, so each prompt of the batch, and each sibling of n=2, has a lease of its own.
    assert moved.total("vllm:kvferry_loads_total") == len(prompts) + 2
    assert moved.total("vllm:kvferry_local_recomputes_total") == 0
    # Siblings' leases are bounded, and counted when they end.
    opened = (pair.producer.metrics() - before_p).total("vllm:kvferry_leases_opened_total")
    wait_until(
        lambda: (pair.producer.metrics() - before_p).total("vllm:kvferry_leases_released_total") == opened,
        "every lease has ended",
    )
