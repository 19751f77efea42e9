"""A producer whose ranks are engines of their own behind one front end: data parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvferry.protocol.params import engine_of
from scripts.accuracy.engines import Transfer
from tests.vllm.conftest import START_S
from tests.vllm.forked_server import ForkedServer
from tests.vllm.pair import ServerPair, long_prompt, text_of

RANKS = 2
NAMED = ("remote_engine_id", "remote_host", "remote_port")
"""What a router that sends both legs at once takes from the params of an earlier answer."""


def test_every_rank_of_a_data_parallel_engine_is_a_peer_of_its_own(
    pair: ServerPair, logs: Path
) -> None:
    spec = replace(
        pair.producer.spec,
        name="data-parallel",
        transfer=Transfer("kv_producer"),
        extra_args=("--data-parallel-size", str(RANKS)),
        extra_env={
            "VLLM_CPU_OMP_THREADS_BIND": "0|0"
        },  # the consumer has the other core
    )
    prompts = [long_prompt(f"Rank {rank}") for rank in range(RANKS)]
    want = [pair.plain(pair.producer, prompt) for prompt in prompts]
    assert len(set(want)) == RANKS
    with ForkedServer(spec, logs) as source:
        source.wait_ready(START_S)
        ranked = ServerPair(source, pair.consumer)
        before = pair.consumer.metrics()
        params, answers = [], []
        # One after the other: engines that hold a lease step without end, and two of them leave two cores little.
        for rank, prompt in enumerate(prompts):
            params.append(
                ranked.prefill(prompt, headers={"X-data-parallel-rank": str(rank)})
            )
            answers.append(text_of(ranked.decode(prompt, params[-1])))
        counted = pair.consumer.metrics() - before
        # Both legs at once: the router names rank 0, of an earlier answer, and vLLM has given the prompt to rank 1.
        before = pair.consumer.metrics()
        of_both = {"X-Request-Id": "both-legs"}
        prompt = long_prompt("Rank 1, both legs")
        by_rank_1 = {"X-data-parallel-rank": "1", **of_both}
        params_of_both = ranked.prefill(prompt, headers=by_rank_1)
        named = {key: params[0][key] for key in NAMED}
        answer = ranked.decode(prompt, {**named, "do_remote_prefill": True}, of_both)
        of_other_rank = pair.consumer.metrics() - before
        want_of_both = pair.plain(pair.producer, prompt)
    # A prompt of another rank is not in a rank's cache: what is right was read from the rank that had it.
    assert answers == want
    engines = [engine_of(one["remote_engine_id"]) for one in params]
    assert engines == [
        f"{engines[0].removesuffix('_dp0')}_dp{rank}" for rank in range(RANKS)
    ]
    assert params[1]["remote_port"] == params[0]["remote_port"] + 1
    assert counted.total("vllm:kvferry_loads_total") == RANKS
    assert counted.total("vllm:kvferry_local_recomputes_total") == 0
    # The model is dense: vLLM tells each rank that it is alone.
    assert params_of_both["transfer_mode"] == "push"
    assert text_of(answer) == want_of_both
    assert of_other_rank.total("vllm:kvferry_loads_total") == 1
    assert of_other_rank.total("vllm:kvferry_local_recomputes_total") == 0
