"""Models whose prompts are not causal (prefix LM): a token's keys and values depend on where the prompt ends."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.layout import discovery
from tests.engine_core.conversation import TURNS
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

COUNT = 3
PROMPT = tokens(600)


@pytest.fixture
def not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every full attention layer is one of a prefix LM."""
    policy_of = discovery.policy_of

    def changed(layer: str, spec: Any) -> tuple[str, int]:
        policy, window = policy_of(layer, spec)
        return ("whole" if policy == "full" else policy), window

    monkeypatch.setattr(discovery, "policy_of", changed)


PROMPTS = {
    "equal": (PROMPT, 1),
    "a token more": ([*PROMPT, 7], 0),
    "a chunk more": ([*PROMPT, *tokens(256, seed=3)], 0),
    "a token less": (PROMPT[:-1], 0),
    "whole chunks less": (PROMPT[:512], 0),
    "another end": ([*PROMPT[:590], *tokens(10, seed=4)], 0),
}


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.usefixtures("not_causal")
def test_only_the_whole_prompt_is_taken_and_for_no_other_prompt(
    make: Any, case: str
) -> None:
    asked, loads = PROMPTS[case]
    producer, consumer = (
        make(role, num_blocks=80, max_tokens=1024)
        for role in ("kv_producer", "kv_consumer")
    )
    params = producer.prefill("p", PROMPT)
    consumer.engine.add("d", asked, params, max_tokens=COUNT)
    assert consumer.answer("d").tokens == expected_tokens(asked, COUNT)
    assert consumer.engine.counted("loads") == loads
    assert consumer.engine.counted("local_recomputes", "other_prompt") == 1 - loads


def test_of_causal_models_what_prompts_share_is_taken(make: Any) -> None:
    producer, consumer = (
        make(role, num_blocks=80, max_tokens=1024)
        for role in ("kv_producer", "kv_consumer")
    )
    asked = PROMPTS["a chunk more"][0]
    consumer.engine.add("d", asked, producer.prefill("p", PROMPT), max_tokens=COUNT)
    assert consumer.answer("d").tokens == expected_tokens(asked, COUNT)
    assert consumer.engine.counted("loads") == 1


@pytest.mark.usefixtures("not_causal")
def test_answers_are_not_offered_and_prompts_not_read_while_they_are_computed(
    make: Any,
) -> None:
    node = make("kv_both", extra=TURNS)
    side = node.engine.connector.scheduler_side
    assert not side.channel.local.offers_turns
    assert not side.tickets.can_stream


@pytest.mark.usefixtures("not_causal")
def test_an_engine_that_takes_every_token_for_causal_is_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make("kv_producer", num_blocks=80, max_tokens=1024)
    monkeypatch.undo()
    consumer = make("kv_consumer", num_blocks=80, max_tokens=1024)
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=COUNT)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    assert consumer.engine.counted("failed_loads", "plan") == 1
