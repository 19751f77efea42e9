"""Other conditions for using blocks: adapters, salts, versions of the weights, and pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from tests.connector.test_adapters import adapter
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

COUNT = 4
PROMPT = tokens(40)


def local_of(node: Node) -> Any:
    return node.engine.connector.scheduler_side.channel.local


def french(folder: Path, version: int = 1) -> LoRARequest:
    """A version of an adapter, in a folder of its own."""
    return LoRARequest("french", 1, str(adapter(folder / f"v{version}", fill=version)))


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
        ({"adapter": 1}, {"adapter": 1}, 1),
        ({"adapter": 1}, {"adapter": 2}, 0),
        ({"adapter": 1}, {}, 0),
        ({}, {"adapter": 1}, 0),
    ],
)
def test_blocks_are_taken_only_under_the_same_content_of_an_adapter_and_salt(
    pair: tuple[Node, Node],
    tmp_path: Path,
    made: dict[str, Any],
    asked: dict[str, Any],
    loads: int,
) -> None:
    """Both engines know the adapter by the same name and number."""
    producer, consumer = pair
    made, asked = dict(made), dict(asked)
    for request in (made, asked):
        if "adapter" in request:
            request["lora_request"] = french(tmp_path, request.pop("adapter"))
    params = producer.prefill("p", PROMPT, **made)
    consumer.engine.add("d", PROMPT, params, max_tokens=COUNT, **asked)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    assert consumer.engine.counted("loads") == loads


@pytest.mark.parametrize(
    ("versions", "loads"),
    [
        (("", ""), 1),
        (("step-7", "step-7"), 1),
        (("step-7", ""), 0),
        (("", "step-7"), 0),
    ],
)
def test_blocks_are_taken_only_under_the_same_version_of_the_weights(
    pair: tuple[Node, Node],
    monkeypatch: pytest.MonkeyPatch,
    versions: tuple[str, str],
    loads: int,
) -> None:
    producer, consumer = pair
    for node, version in zip(pair, versions, strict=True):
        weights = local_of(node).weights
        monkeypatch.setattr(weights, "is_attached", True)
        monkeypatch.setattr(weights, "version", lambda version=version: version)
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=COUNT)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    assert consumer.engine.counted("loads") == loads
    assert consumer.engine.counted("local_recomputes", "other_prompt") == 1 - loads


def test_a_prompt_that_is_computed_again_with_new_weights_is_offered_as_theirs(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had begun with the old ones: its digests too are made again."""
    producer, consumer = pair
    long = tokens(300)
    producer.engine.add("p", long, {"do_remote_decode": True}, max_tokens=1)
    producer.step()
    assert producer.engine.scheduler.reset_prefix_cache(True, True)
    weights = local_of(producer).weights
    monkeypatch.setattr(weights, "is_attached", True)
    monkeypatch.setattr(weights, "version", lambda: "step-7")
    params = producer.answer("p").params
    assert params is not None
    consumer.engine.add("d", long, params, max_tokens=COUNT)
    assert consumer.answer("d").tokens == expected_tokens(long, COUNT)
    assert consumer.engine.counted("loads") == 0


def test_a_load_ends_while_its_engine_is_paused_and_is_used_when_it_goes_on(
    pair: tuple[Node, Node],
) -> None:
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
