"""The behaviour of vLLM's scheduler that kvferry relies on, tested on the scheduler itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness.core.scheduler import BLOCK_TOKENS, tokens

PROMPT = tokens(40)


@pytest.fixture
def make(make_engine: Any) -> Any:
    return functools.partial(
        make_engine, role="kv_both", connector="RecordingConnector", module="tests.engine_core.recorder"
    )


def load_all(request: Any, local: int) -> tuple[int, bool]:
    """Match the whole prompt, once: a preempted or failed request has lost its remote blocks."""
    first = request.num_preemptions == 0 and request.num_output_tokens == 0
    return (request.num_prompt_tokens - local, True) if first else (0, False)


def test_a_load_is_allocated_once_with_its_count_and_once_more_with_zero(make: Any) -> None:
    engine = make(role="kv_consumer")
    engine.connector.match = load_all
    engine.add("d", PROMPT, max_tokens=1)
    engine.step()
    engine.step(loaded={"d"})
    engine.step()
    assert engine.connector.take() == [
        "new d params=None",
        "match d local=0",
        "alloc d external=40 blocks=3",
        "output",
        "output",
        "alloc d external=0 blocks=3",
        "finished d FINISHED_LENGTH_CAPPED blocks=3",
        "output",
    ]


def test_a_request_aborted_before_it_was_scheduled_finishes_with_no_blocks(make: Any) -> None:
    engine = make()
    engine.add("d", PROMPT)
    engine.abort("d")
    assert engine.connector.take() == ["new d params=None", "finished d FINISHED_ABORTED blocks=0"]
    assert engine.step().output.finished_req_ids == {"d"}


def test_a_request_aborted_after_its_load_was_reported_gives_its_blocks_back_at_once(make: Any) -> None:
    engine = make(role="kv_consumer")
    engine.connector.match = load_all
    engine.add("d", PROMPT)
    engine.step()
    engine.step(loaded={"d"})
    engine.abort("d")
    assert engine.is_whole


def test_an_error_ends_the_request_before_the_connector_hears_of_the_failed_load(make: Any) -> None:
    engine = make(role="kv_consumer", policy="fail")
    engine.connector.match = load_all
    engine.add("d", PROMPT)
    engine.step()
    engine.connector.take()
    engine.step(failed={"d"})
    assert engine.connector.take() == ["finished d FINISHED_ERROR blocks=3", "output"]
    assert engine.is_whole


def test_a_failed_load_under_recompute_frees_its_blocks_at_the_next_step_and_asks_again(make: Any) -> None:
    engine = make(role="kv_consumer", policy="recompute")
    answers = iter([(40, True), (0, False)])
    engine.connector.match = lambda request, local: next(answers)
    engine.add("d", PROMPT, max_tokens=1)
    engine.step()
    engine.connector.take()
    engine.step(failed={"d"})
    assert engine.used_blocks == 3
    engine.step()
    assert engine.connector.take()[:3] == ["output", "match d local=0", "alloc d external=0 blocks=3"]


def test_a_preempted_request_is_matched_again_without_a_reason(make: Any) -> None:
    engine = make(num_blocks=7)
    engine.add("old", tokens(47, seed=2), max_tokens=30)
    engine.add("young", tokens(47, seed=3), max_tokens=30)
    while "young" not in engine.scheduler.requests or engine.status("young") != "PREEMPTED":
        engine.step()
    calls = engine.connector.take()
    assert not [call for call in calls if call.startswith("finished")]
    engine.run()
    assert [call for call in engine.connector.take() if call.startswith("match young")]


def test_prompt_logprobs_ask_for_a_match_and_throw_the_answer_away(make: Any) -> None:
    engine = make(role="kv_consumer")
    engine.connector.match = load_all
    engine.add("d", PROMPT, prompt_logprobs=1, max_tokens=1)
    step = engine.step()
    assert step.computed == {"d": 40}
    assert engine.connector.take()[1:3] == ["match d local=0", "alloc d external=0 blocks=3"]


def test_the_local_hit_of_a_whole_prompt_stops_one_block_short(make: Any) -> None:
    engine = make()
    engine.add("first", tokens(3 * BLOCK_TOKENS), max_tokens=1)
    engine.run()
    engine.connector.take()
    engine.add("again", tokens(3 * BLOCK_TOKENS), max_tokens=1)
    engine.step()
    assert engine.connector.take()[1] == f"match again local={2 * BLOCK_TOKENS}"


def test_an_undecided_match_is_asked_for_in_every_step(make: Any) -> None:
    engine = make()
    engine.connector.match = lambda request, local: (None, False)
    engine.add("d", PROMPT)
    engine.step()
    engine.step()
    assert engine.connector.take().count("match d local=0") == 2
    assert engine.scheduler.has_requests()


def test_with_a_full_pool_the_match_is_asked_again_and_nothing_is_allocated(make: Any) -> None:
    engine = make(role="kv_consumer", num_blocks=5)
    engine.connector.match = load_all
    engine.add("first", tokens(50, seed=2))
    engine.add("second", PROMPT)
    engine.step()
    engine.step()
    calls = engine.connector.take()
    assert calls.count("match second local=0") == 2
    assert not [call for call in calls if call.startswith("alloc second")]


@pytest.mark.parametrize("answer", [(41, True), (0, True)])
def test_a_match_beyond_the_prompt_or_an_asynchronous_nothing_would_stop_the_engine(make: Any, answer: Any) -> None:
    engine = make()
    engine.connector.match = lambda request, local: answer
    engine.add("d", PROMPT)
    with pytest.raises(AssertionError):
        engine.step()


def test_the_engine_steps_while_a_request_is_held_or_the_connector_says_that_it_has_work(make: Any) -> None:
    engine = make()
    engine.connector.hold = True
    engine.add("p", PROMPT, max_tokens=1)
    engine.run()
    engine.step()
    assert engine.scheduler.has_requests()
    engine.step(sent={"p"})
    engine.step()
    assert not engine.scheduler.has_requests()
    engine.connector.pending_work = True
    assert engine.scheduler.has_requests()


def test_a_finished_request_without_a_transfer_is_still_reported_to_the_workers(make: Any) -> None:
    engine = make()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    assert engine.schedule().output.finished_req_ids == {"a"}


def test_the_answer_of_a_finished_request_is_written_to_by_the_scheduler(make: Any) -> None:
    engine = make()
    engine.connector.hold = True
    engine.add("p", PROMPT, max_tokens=1)
    assert engine.run()["p"].params == {"do_remote_prefill": True, "remote_prefill_cached_tokens": 0}


def test_a_session_of_streamed_input_announces_only_its_first_chunk(make: Any) -> None:
    engine = make()
    engine.add("s", PROMPT, max_tokens=1, resumable=True)
    engine.step()
    engine.add("s", tokens(8, seed=5), max_tokens=1, resumable=True)
    engine.step()
    assert [call for call in engine.connector.take() if call.startswith(("new", "match"))] == [
        "new s params=None",
        "match s local=0",
    ]


def test_an_overlapping_scheduler_is_a_step_ahead_and_defers_the_frees(make: Any) -> None:
    engine = make(role="kv_consumer", overlap=True)
    engine.add("a", PROMPT, max_tokens=8)
    first = engine.schedule()
    second = engine.schedule()
    assert second.computed == {"a": 1}
    engine.abort("a")
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
