"""Token ids that no digest covers. vLLM does not check the ids that clients send where it has no tokenizer
(`--skip-tokenizer-init`), and with several ranks a negative one does no harm to its model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_core.test_both_legs import REMOTE_DECODE, ids, leg_params
from tests.harness.core.scheduler import tokens
from tests.promises import promise


def uncovered(count: int, token: int = -1) -> list[int]:
    prompt = tokens(count)
    prompt[5] = token
    return prompt


@promise(6)
@pytest.mark.parametrize("states", [0, 1], ids=["attention", "states"])
@pytest.mark.parametrize("count", [40, 300], ids=["one step", "several"])
@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_prompt_for_another_engine_is_answered_without_params(
    make_engine: Any, token: int, count: int, states: int
) -> None:
    engine = make_engine("kv_producer", states=states)
    engine.add("p", uncovered(count, token), REMOTE_DECODE, max_tokens=1)
    assert engine.run()["p"].params is None
    engine.step(over={"p"})
    assert engine.is_whole
    assert engine.counted("prefills_kept") == 1
    assert not len(engine.connector.scheduler_side.leases)


@promise(6)
def test_a_prompt_from_another_engine_is_computed_here(make: Any) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    params = producer.prefill("p", tokens(40))
    _, decode = ids("x")
    for name, source in (("d", params), (decode, leg_params(producer, "x"))):
        consumer.decode(name, uncovered(40), source, producer)
    assert consumer.engine.counted("local_recomputes", "invalid_params") == 2


@promise(6)
def test_an_answer_to_a_prompt_whose_beginning_was_loaded_is_not_offered(
    begin: Any,
) -> None:
    prefiller, decoder, _ = begin(first=False)
    prompt = tokens(40)
    params = prefiller.prefill("p", prompt)
    decoder.decode("d", [*prompt, *uncovered(20)], params, prefiller)
    assert decoder.engine.answers["d"].params is None
    decoder.until(lambda: decoder.engine.is_whole)
    assert decoder.engine.counted("loads") == 1
