"""The behaviour of vLLM's scheduler that kvferry relies on, tested on the scheduler itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness.core.scheduler import tokens

PROMPT = tokens(40)


@pytest.fixture
def make(make_engine: Any) -> Any:
    return functools.partial(
        make_engine,
        role="kv_both",
        connector="RecordingConnector",
        module="tests.engine_core.recorder",
    )


def load_all(request: Any, local: int) -> tuple[int, bool]:
    """Match the whole prompt, once: a preempted or failed request has lost its remote blocks."""
    first = request.num_preemptions == 0 and request.num_output_tokens == 0
    return (request.num_prompt_tokens - local, True) if first else (0, False)


def test_a_load_is_allocated_once_with_its_count_and_once_more_with_zero(
    make: Any,
) -> None:
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


def test_an_error_ends_the_request_before_the_connector_hears_of_the_failed_load(
    make: Any,
) -> None:
    engine = make(role="kv_consumer", policy="fail")
    engine.connector.match = load_all
    engine.add("d", PROMPT)
    engine.step()
    engine.connector.take()
    engine.step(failed={"d"})
    assert engine.connector.take() == ["finished d FINISHED_ERROR blocks=3", "output"]
    assert engine.is_whole


def test_a_failed_load_under_recompute_frees_its_blocks_at_the_next_step_and_asks_again(
    make: Any,
) -> None:
    engine = make(role="kv_consumer", policy="recompute")
    answers = iter([(40, True), (0, False)])
    engine.connector.match = lambda request, local: next(answers)
    engine.add("d", PROMPT, max_tokens=1)
    engine.step()
    engine.connector.take()
    engine.step(failed={"d"})
    assert engine.used_blocks == 3
    engine.step()
    assert engine.connector.take()[:3] == [
        "output",
        "match d local=0",
        "alloc d external=0 blocks=3",
    ]


def test_with_a_full_pool_the_match_is_asked_again_and_nothing_is_allocated(
    make: Any,
) -> None:
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
def test_a_match_beyond_the_prompt_or_an_asynchronous_nothing_would_stop_the_engine(
    make: Any, answer: Any
) -> None:
    engine = make()
    engine.connector.match = lambda request, local: answer
    engine.add("d", PROMPT)
    with pytest.raises(AssertionError):
        engine.step()


def test_the_answer_of_a_finished_request_is_written_to_by_the_scheduler(
    make: Any,
) -> None:
    engine = make()
    engine.connector.hold = True
    engine.add("p", PROMPT, max_tokens=1)
    assert engine.run()["p"].params == {
        "do_remote_prefill": True,
        "remote_prefill_cached_tokens": 0,
    }


@pytest.mark.parametrize("report", ["loaded", "sent"])
def test_a_report_for_an_unknown_request_would_stop_the_engine(
    make: Any, report: str
) -> None:
    engine = make()
    engine.add("a", PROMPT)
    with pytest.raises(AssertionError):
        engine.step(**{report: {"unknown"}})
