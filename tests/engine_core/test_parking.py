"""vLLM looks at the first few only of the requests that wait for answers about their prompts."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine_core.test_both_legs import (
    COUNT,
    REMOTE_DECODE,
    check,
    ids,
    leg_params,
    settled,
)
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens

MOST = 2
NAMES = [f"x{n}" for n in range(6)]
PROMPTS = {name: tokens(80, seed=30 + n) for n, name in enumerate(NAMES)}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.connector.scheduler_side.requests.MAX_LOOKED_AT", MOST)


def asking(make: Any) -> tuple[Node, Node]:
    """A producer, and a consumer with a question for every prompt."""
    producer, consumer = (
        make("kv_producer", num_blocks=64),
        make("kv_consumer", num_blocks=64),
    )
    for name, prompt in PROMPTS.items():
        consumer.engine.add(
            ids(name)[1], prompt, leg_params(producer, name), max_tokens=COUNT
        )
    return producer, consumer


def looked_at(consumer: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that vLLM asks about in one step."""
    asked: list[str] = []
    connector, call = (
        consumer.engine.connector,
        consumer.engine.connector.get_num_new_matched_tokens,
    )

    def note(request: Any, num_computed_tokens: int) -> Any:
        asked.append(request.request_id)
        return call(request, num_computed_tokens)

    with monkeypatch.context() as changed:
        changed.setattr(connector.scheduler_side.steps, "may_wait", False)
        changed.setattr(connector, "get_num_new_matched_tokens", note)
        consumer.step()
    return asked


def test_the_first_ones_are_looked_at_and_the_next_when_one_of_them_ends(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, consumer = asking(make)
    legs = [ids(name)[1] for name in NAMES]
    assert looked_at(consumer, monkeypatch) == legs[:2]
    consumer.engine.abort(legs[0], legs[3])
    assert looked_at(consumer, monkeypatch) == [legs[1], legs[2]]
    assert [request.status for request in consumer.engine.scheduler.waiting].count(
        RequestStatus.WAITING
    ) == MOST
    for leg in legs:
        consumer.engine.abort(leg)
    assert consumer.engine.is_whole


@pytest.mark.parametrize(
    "order", [NAMES, NAMES[::-1]], ids=["in their order", "the last ones first"]
)
def test_a_parked_request_is_loaded_as_soon_as_it_is_answered(
    make: Any, order: list[str]
) -> None:
    producer, consumer = asking(make)
    for name in order:
        prefill, decode = ids(name)
        producer.engine.add(prefill, PROMPTS[name], REMOTE_DECODE, max_tokens=1)
        answer = consumer.engine.answers[decode]
        until(
            (producer, consumer),
            lambda answer=answer: answer.finish_reason is not None,  # type: ignore[misc]
        )
        check(consumer, decode, PROMPTS[name])
    assert consumer.engine.counted("loads") == len(NAMES)
    until(
        (producer, consumer),
        lambda: (
            producer.engine.is_whole and consumer.engine.is_whole and settled(consumer)
        ),
    )
