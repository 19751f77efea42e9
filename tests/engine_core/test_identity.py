"""Other conditions for using blocks: adapters, salts and pauses."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

COUNT = 4
PROMPT = tokens(40)
ADAPTER = LoRARequest("french", 1, "/nowhere")
OTHER_ADAPTER = LoRARequest("german", 1, "/nowhere")


@pytest.fixture
def pair(make: Any) -> tuple[Node, Node]:
    return make("kv_producer"), make("kv_consumer")


@pytest.mark.parametrize(
    ("made", "asked", "loads"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 1),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({}, {"cache_salt": "a"}, 0),
        ({"lora_request": ADAPTER}, {"lora_request": ADAPTER}, 1),
        ({"lora_request": ADAPTER}, {"lora_request": OTHER_ADAPTER}, 0),
        ({"lora_request": ADAPTER}, {}, 0),
    ],
)
def test_blocks_are_taken_only_under_the_same_adapter_and_salt(
    pair: tuple[Node, Node], made: dict[str, Any], asked: dict[str, Any], loads: int
) -> None:
    producer, consumer = pair
    params = producer.prefill("p", PROMPT, **made)
    consumer.engine.add("d", PROMPT, params, max_tokens=COUNT, **asked)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    assert consumer.engine.counted("loads") == loads


def test_a_load_ends_while_its_engine_is_paused_and_is_used_when_it_goes_on(pair: tuple[Node, Node]) -> None:
    producer, consumer = pair
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=COUNT)
    consumer.step()
    consumer.engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    consumer.until(lambda: "d" in consumer.engine.scheduler.finished_recving_kv_req_ids)
    consumer.step()
    assert consumer.engine.status("d") == "WAITING_FOR_REMOTE_KVS"
    consumer.engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    producer.until(lambda: producer.engine.is_whole)
