"""Nothing of a request is left on the scheduler side when it has ended, however far it had come."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kvferry.connector.scheduler_side import requests
from kvferry.connector.scheduler_side.requests import EngineRequest
from tests.engine_core.test_both_legs import COUNT, REMOTE_DECODE, ids, leg_params
from tests.engine_core.test_stalls import fail, load, run_until, unpin
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens

NAMES = ("a", "b", "c", "d", "e")


def records() -> list[EngineRequest]:
    gc.collect()
    # Not `isinstance`: that asks objects which warn when they are asked for their class.
    return [found for found in gc.get_objects() if type(found) is EngineRequest]


class Remembered:
    """The requests of which anything still holds the record, those of earlier tests apart."""

    def __init__(self) -> None:
        self._earlier = {id(record) for record in records()}

    def names(self) -> list[str]:
        return sorted(
            record.request_id for record in records() if id(record) not in self._earlier
        )

    def check_empty(self, *nodes: Node) -> None:
        for node in nodes:
            node.step()  # the first step after an admission takes the list of what was admitted
        assert self.names() == []
        for node in nodes:
            table = node.engine.connector.scheduler_side.requests.table
            assert not table


@pytest.fixture
def remembered() -> Remembered:
    return Remembered()


def test_a_prompt_that_is_handed_over_at_once_leaves_nothing(
    make: Any, remembered: Remembered
) -> None:
    producer, consumer = make("kv_producer", max_step_tokens=64), make("kv_consumer")
    prefill, decode = ids("x")
    prompt = tokens(140, seed=3)
    consumer.engine.add(decode, prompt, leg_params(producer, "x"), max_tokens=COUNT)
    producer.engine.add(prefill, prompt, REMOTE_DECODE, max_tokens=1)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    until(
        (producer, consumer),
        lambda: producer.engine.is_whole and consumer.engine.is_whole,
    )
    remembered.check_empty(producer, consumer)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_requests_that_are_aborted_at_any_time_leave_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch, remembered: Remembered, steps: int
) -> None:
    """Some are looked at and some are parked, some have a ticket, some load."""
    monkeypatch.setattr(requests, "MAX_LOOKED_AT", 2)
    config = {"num_blocks": 64, "max_step_tokens": 64}
    producer, consumer = make("kv_producer", **config), make("kv_consumer", **config)
    for seed, name in enumerate(NAMES):
        prefill, decode = ids(name)
        prompt = tokens(100, seed=seed)
        consumer.engine.add(
            decode, prompt, leg_params(producer, name), max_tokens=COUNT
        )
        producer.engine.add(prefill, prompt, REMOTE_DECODE, max_tokens=1)
    for _ in range(steps):
        producer.step()
        consumer.step()
    for name in NAMES:
        prefill, decode = ids(name)
        producer.engine.abort(prefill)
        consumer.engine.abort(decode)
    until(
        (producer, consumer),
        lambda: producer.engine.is_whole and consumer.engine.is_whole,
    )
    remembered.check_empty(producer, consumer)


@pytest.mark.parametrize("ends", ["aborted", "computed"])
def test_a_failed_load_and_what_waits_beside_it_leave_nothing(
    make_engine: Any, remembered: Remembered, ends: str
) -> None:
    engine = make_engine("kv_consumer", num_blocks=28)
    load(engine, 250)
    fail(engine, {"c0"}, alive={"c0"})
    engine.add("waits", tokens(200, seed=7))
    engine.step()
    engine.step()
    assert remembered.names() == ["c0", "waits"]
    if ends == "aborted":
        engine.abort("c0", "waits")
    unpin(engine)
    if ends == "computed":
        run_until(engine, "c0", "waits")
    engine.step()
    remembered.check_empty()
