"""The driver itself, with vLLM's own NixlConnector in it: it shows the scheduler's own behaviour, without kvferry."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness.core.scheduler import BLOCK_TOKENS, SAMPLED, tokens

PROMPT = tokens(40)


@pytest.fixture
def make(make_engine: Any) -> Any:
    return functools.partial(make_engine, role="kv_both", connector="NixlConnector", module=None)


def remote(blocks: int, request_id: str = "elsewhere") -> dict[str, Any]:
    """The params of a stock producer's response."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_engine_id": "producer",
        "remote_request_id": request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    }


def test_a_plain_request_runs_to_its_end_and_gives_all_blocks_back(make: Any) -> None:
    engine = make()
    engine.add("a", PROMPT, max_tokens=3)
    answer = engine.run()["a"]
    assert (answer.tokens, answer.finish_reason, answer.params) == ([SAMPLED] * 3, "length", None)
    assert engine.is_whole


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_after_the_last(make: Any) -> None:
    engine = make()
    engine.add("a", tokens(200), max_tokens=1)
    first = engine.step()
    assert first.computed == {"a": 128}
    assert engine.answers["a"].tokens == []
    assert engine.run()["a"].tokens == [SAMPLED]


def test_a_finished_remote_decode_is_held_until_the_workers_report_it_sent(make: Any) -> None:
    engine = make(role="kv_producer")
    engine.add("p", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    params = engine.run()["p"].params
    assert params is not None
    assert params["do_remote_prefill"]
    assert len(params["remote_block_ids"][0]) == -(-len(PROMPT) // BLOCK_TOKENS)
    assert engine.used_blocks == 3
    assert engine.scheduler.has_requests(), "the engine must keep stepping while blocks are held"
    engine.step(sent={"p"})
    assert engine.is_whole
    engine.step()
    assert not engine.scheduler.has_requests()


def test_a_remote_prefill_waits_for_its_load_and_computes_one_token(make: Any) -> None:
    engine = make(role="kv_consumer")
    engine.add("d", PROMPT, remote(3))
    waiting = engine.step()
    assert waiting.computed == {}
    assert engine.status("d") == "WAITING_FOR_REMOTE_KVS"
    assert set(waiting.metadata.reqs_to_recv) == {"d"}
    engine.step(loaded={"d"})
    assert engine.step().computed == {"d": 1}
    assert engine.run()["d"].finish_reason == "length"
    assert engine.is_whole


def test_a_request_aborted_while_loading_keeps_its_blocks_until_the_load_is_reported(make: Any) -> None:
    engine = make(role="kv_consumer")
    engine.add("d", PROMPT, remote(3))
    engine.step()
    engine.abort("d")
    engine.step()
    assert engine.used_blocks == 3
    engine.step(loaded={"d"})
    assert engine.is_whole


def test_a_failed_load_is_computed_locally_under_recompute(make: Any) -> None:
    engine = make(role="kv_consumer", policy="recompute")
    engine.add("d", PROMPT, remote(3))
    engine.step()
    engine.step(failed={"d"})
    assert engine.step().computed == {"d": len(PROMPT)}
    assert engine.run()["d"].finish_reason == "length"
    assert engine.is_whole


def test_a_failed_load_ends_the_request_with_an_error_under_fail(make: Any) -> None:
    engine = make(role="kv_consumer", policy="fail")
    engine.add("d", PROMPT, remote(3))
    engine.step()
    engine.step(failed={"d"})
    assert engine.answers["d"].finish_reason == "error"
    assert engine.is_whole


def test_too_few_blocks_preempt_the_youngest_request_and_it_ends_all_the_same(make: Any) -> None:
    engine = make(num_blocks=7)  # one of them is the null block
    engine.add("old", tokens(47, seed=2), max_tokens=30)
    engine.add("young", tokens(47, seed=3), max_tokens=30)
    seen = set()
    for _ in range(128):
        if not engine.scheduler.get_num_unfinished_requests():
            break
        engine.step()
        seen |= {f"{name} {engine.status(name)}" for name in engine.scheduler.requests}
    assert "young PREEMPTED" in seen
    assert {name: len(answer.tokens) for name, answer in engine.answers.items()} == {"old": 30, "young": 30}
    assert engine.is_whole


def test_an_overlapping_scheduler_is_a_step_ahead_and_defers_the_frees(make: Any) -> None:
    engine = make(role="kv_consumer", overlap=True)
    engine.add("a", PROMPT, max_tokens=8)
    first = engine.schedule()
    second = engine.schedule()
    assert second.computed == {"a": 1}
    engine.abort("a")
    assert engine.free_blocks < engine.blocks_at_start
    engine.finish(first)
    assert engine.free_blocks < engine.blocks_at_start
    engine.finish(second)
    assert engine.is_whole


@pytest.mark.parametrize("report", ["loaded", "sent"])
def test_a_report_for_an_unknown_request_would_stop_the_engine(make: Any, report: str) -> None:
    engine = make()
    engine.add("a", PROMPT)
    with pytest.raises(AssertionError):
        engine.step(**{report: {"unknown"}})
