"""Requests that are computed here: in their params other connectors find their own keys, vLLM none of a transfer."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.engine_core.offers import offer
from tests.engine_core.test_both_legs import leg_params
from tests.harness.core.scheduler import tokens

PROMPT = tokens(40)
OTHERS = {
    "max_load_tokens": 16,
    "remote_kv_source": {"kv_request_id": "x"},
    "load_tiers": [{"medium": "cpu"}],
}
COMPUTED_HERE: dict[str, Any] = {
    "of a stock producer": {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_blocks_expiry_time": 1.0,
    },
    "only the wish": {"do_remote_prefill": True},
    "of another role": {"do_remote_decode": True},
    "at a host that is not allowed": offer(PROMPT, remote_host="10.9.9.9"),
    "of another prompt": offer(tokens(40, seed=9)),
}


@pytest.mark.parametrize("others", [OTHERS, {}], ids=["with keys of others", "without"])
@pytest.mark.parametrize("kind", COMPUTED_HERE)
def test_they_keep_the_keys_of_others_alone(
    make_engine: Any, kind: str, others: dict[str, Any]
) -> None:
    engine = make_engine("kv_consumer", extra={"allowed_hosts": ["127.0.0.1"]})
    sent = {**COMPUTED_HERE[kind], **others, "remote_prefill_cached_tokens": 3}
    before = copy.deepcopy(sent)
    request = engine.add("d", PROMPT, sent)
    assert request.kv_transfer_params == (others or None)
    assert sent == before, "siblings may have the same object"
    assert engine.counted("local_recomputes") == 0, "it is counted with the next step"
    assert not any(engine.scheduler._kv_fetch_counts.values()), (
        "vLLM waits for no transfer"
    )
    assert engine.run()["d"].finish_reason == "length"
    assert engine.counted("local_recomputes") == 1


@pytest.mark.parametrize(
    "params",
    [
        "text",
        7,
        ["a"],
        {"do_remote_prefill": True, **dict.fromkeys(map(str, range(99)))},
    ],
)
def test_of_what_is_no_object_or_too_large_nothing_is_left(
    make_engine: Any, params: Any
) -> None:
    engine = make_engine("kv_consumer")
    assert engine.add("d", PROMPT, params).kv_transfer_params is None
    assert engine.run()["d"].finish_reason == "length"


def test_a_prompt_that_its_producer_does_not_know_keeps_the_keys_of_others(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 0.1)
    producer, consumer = make("kv_producer"), make("kv_consumer")
    request = consumer.engine.add(
        "cmpl-x-0-89efcdab", PROMPT, {**leg_params(producer, "x"), **OTHERS}
    )
    consumer.answer("cmpl-x-0-89efcdab")
    assert request.kv_transfer_params == OTHERS
    assert not any(consumer.engine.scheduler._kv_fetch_counts.values())
