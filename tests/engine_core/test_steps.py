"""Each reason of an engine without requests to step, alone, and what ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from kvferry.connector.scheduler_side.steps import StepReason, Steps
from kvferry.connector.vllm.core import EngineLoop
from kvferry.protocol.queries import Answer, PromptProgress
from tests.engine_core.offers import offer
from tests.engine_core.test_quarantined_blocks import report
from tests.harness.core.scheduler import SchedulerEngine, tokens

pytestmark = pytest.mark.usefixtures("sleeps_long")

REMOTE_DECODE = {"do_remote_decode": True}
PROMPT = tokens(40)


def steps_of(engine: SchedulerEngine) -> Steps:
    steps: Steps = engine.connector.scheduler_side.steps
    return steps


@pytest.fixture
def holding(make_engine: Any) -> SchedulerEngine:
    """An engine without requests that holds a lease, and rests."""
    engine: SchedulerEngine = make_engine()
    engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    engine.run()
    engine.step()
    assert steps_of(engine).reason() is None
    return engine


def test_orders_are_a_reason_until_the_workers_have_them(make_engine: Any) -> None:
    engine = make_engine(states=1)
    engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    while engine.answers["p"].params is None:
        engine.step()
    assert steps_of(engine).reason() is StepReason.ORDERS
    engine.step()
    assert steps_of(engine).reason() is None


def test_pinned_blocks_are_a_reason_until_they_are_reported_free(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", policy="fail")
    engine.add("d", PROMPT, offer(PROMPT))
    engine.step()
    engine.step(worker=report("d", w0={"d"}))
    engine.step()
    assert steps_of(engine).reason() is StepReason.QUARANTINE
    engine.step(worker=report(w0=set()))
    assert steps_of(engine).reason() is None


def test_a_held_lease_is_a_reason_while_the_engine_drains(
    holding: SchedulerEngine,
) -> None:
    steps_of(holding).loop.is_ending = True
    assert steps_of(holding).reason() is StepReason.DRAIN
    holding.step(over={"p"})
    assert steps_of(holding).reason() is None


def test_a_held_lease_is_a_reason_while_the_engine_is_paused(
    holding: SchedulerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineLoop, "is_paused", True)
    assert steps_of(holding).reason() is StepReason.PAUSE
    holding.step(over={"p"})
    assert steps_of(holding).reason() is None


def test_a_held_lease_is_a_reason_for_one_step_after_a_long_rest(
    holding: SchedulerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = steps_of(holding)
    with monkeypatch.context() as changed:
        changed.setattr("kvferry.connector.scheduler_side.steps.MAX_IDLE_S", 0.0)
        assert steps.reason() is StepReason.LONG_SLEEP
    holding.step()
    assert steps.reason() is None


def test_answers_that_one_call_does_not_take_are_a_reason(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvferry.connector.scheduler_side.prompt_queries.MOST_AT_ONCE", 1
    )
    engine = make_engine("kv_consumer")
    queries = engine.connector.scheduler_side.queries
    for number in (7, 8):
        queries.on_answer(
            ("127.0.0.1", 1), Answer(number=number, progress=PromptProgress.UNKNOWN)
        )
    assert engine.connector.has_pending_push_work(), "one of two is taken"
    assert steps_of(engine).reason() is StepReason.ANSWERS
    assert not engine.connector.has_pending_push_work()
    assert steps_of(engine).reason() is None


def test_the_loop_is_told_of_an_answer_that_comes_while_it_takes_the_one_before(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rests when it has taken that one, which may be between any two lines."""
    engine = make_engine("kv_consumer")
    queries = engine.connector.scheduler_side.queries
    told: list[str] = []
    monkeypatch.setattr(EngineLoop, "notify", lambda _: told.append("news"))

    def take_all() -> None:
        assert not list(queries.take_found(lambda tokens: 0.0))
        told.clear()

    for line in range(4):
        queries.on_found(("127.0.0.1", 1), _queued(1))
        with before_line(line, "on_found", take_all):
            queries.on_found(("127.0.0.1", 1), _queued(2))
        assert told or not queries.has_answers
        take_all()


@contextmanager
def before_line(number: int, function: str, call: Callable[[], None]) -> Iterator[None]:
    """Call something, once, before a function executes its line of this number."""
    lines: list[int] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_name == function and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == number + 1:
                call()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _queued(number: int) -> Answer:
    return Answer(number=number, progress=PromptProgress.QUEUED)


def test_a_producer_that_has_answered_is_a_reason(make_engine: Any) -> None:
    engine = make_engine("kv_consumer")
    assert steps_of(engine).reason(has_producers=True) is StepReason.PRODUCERS
    assert steps_of(engine).reason() is None


def test_the_table_has_every_reason() -> None:
    from kvferry.connector.scheduler_side import steps

    rows = [
        line.split(" | ")[0] for line in str(steps.__doc__).splitlines() if "| " in line
    ]
    assert {row.removeprefix("| ") for row in rows} >= {
        reason.name for reason in StepReason
    }
