"""KV events of real engines, received by a router and through one: a producer and a consumer that publish vLLM's
events."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.engines import Router
from tests.vllm.conftest import START_S
from tests.vllm.load import body_of, prompt_of
from tests.vllm.pair import TIMEOUT_S
from tests.vllm.publishing_engine import BLOCK, publishing_server
from tests.waiting import wait_until


class Followed:
    """An engine whose events a subscriber hears, as a router does."""

    def __init__(self, name: str, core: str, role: str, logs: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        env = {"VLLM_LOGGING_LEVEL": "DEBUG"}
        self.server, self.endpoint = publishing_server(name, core, role, logs, env=env)
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(self.endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._events: list[dict[str, Any]] = []

    def stored(self, prompt: Sequence[int]) -> list[int]:
        """Hashes of blocks of this prompt, in the order in which they came."""
        while self._socket.poll(0):
            _topic, _number, payload = self._socket.recv_multipart()
            self._events += msgspec.msgpack.decode(payload)[1]
        ours = [event for event in self._events if event["type"] == "BlockStored" and _begins(event, prompt)]
        assert {event["medium"] for event in ours} <= {"GPU"}
        return [name for event in ours for name in event["block_hashes"]]

    def hears(self, prompt: Sequence[int]) -> list[int]:
        """As `stored`, when all of the prompt's full blocks have come."""
        wait_until(lambda: len(self.stored(prompt)) >= len(prompt) // BLOCK, "events of the prompt", timeout_s=60)
        return self.stored(prompt)

    def close(self) -> None:
        self._socket.close(linger=0)


def _begins(event: dict[str, Any], prompt: Sequence[int]) -> bool:
    """Prompts here differ in their first tokens, and an engine tells each in one event."""
    return bool(event["token_ids"][:BLOCK] == list(prompt[:BLOCK]))


def post(base_url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer = httpx.post(base_url + "/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def prefill(producer: Followed, prompt: Sequence[int]) -> dict[str, Any]:
    body = body_of(prompt, 1, kv_transfer_params=ASK_FOR_PREFILL)
    return dict(post(producer.server.base_url, body)["kv_transfer_params"])


@pytest.fixture(scope="module")
def received(logs: Path) -> Iterator[tuple[Followed, Followed]]:
    with zmq.Context() as context, ExitStack() as stack:
        producer = Followed("followed-producer", "0", "kv_producer", logs, context)
        consumer = Followed("followed-consumer", "1", "kv_consumer", logs, context)
        for one in (producer, consumer):
            stack.callback(one.close)
            stack.enter_context(one.server)
        for one in (producer, consumer):
            one.server.wait_ready(START_S)
        yield producer, consumer


def test_the_consumer_tells_of_blocks_that_it_loaded_by_the_names_that_the_producer_gives_them(
    received: tuple[Followed, Followed],
) -> None:
    producer, consumer = received
    prompt = prompt_of("events", 0)
    params = prefill(producer, prompt)
    theirs = producer.hears(prompt)
    assert len(theirs) == len(set(theirs)) == len(prompt) // BLOCK
    assert not consumer.stored(prompt)
    before = consumer.server.metrics()
    post(consumer.server.base_url, body_of(prompt, kv_transfer_params=params))
    assert consumer.hears(prompt) == theirs
    moved = consumer.server.metrics() - before
    assert moved.total("vllm:kvferry_planned_bytes_total") > 0
    assert moved.total("vllm:kvferry_local_recomputes_total") == 0


def test_a_load_that_failed_is_reported_once(received: tuple[Followed, Followed]) -> None:
    producer, consumer = received
    prompt = prompt_of("failed", 0)
    params = prefill(producer, prompt)
    params["kvferry"] |= {"mac": "0" * len(params["kvferry"]["mac"])}
    before = consumer.server.metrics()
    post(consumer.server.base_url, body_of(prompt, kv_transfer_params=params))
    assert (consumer.server.metrics() - before).total("vllm:kvferry_failed_loads_total") == 1
    reported = consumer.hears(prompt)
    assert reported == producer.hears(prompt)
    assert len(reported) == len(set(reported)) == len(prompt) // BLOCK


def test_both_engines_ids_contain_the_id_that_the_router_sends(received: tuple[Followed, Followed], logs: Path) -> None:
    with Router(
        [one.server.base_url for one in received[:1]], [received[1].server.base_url], logs, TIMEOUT_S
    ) as router:
        router.wait_ready(60)
        name = post(router.base_url, body_of(prompt_of("routed", 0)))["id"]
    for one, logged in zip(received, ("is to be decoded elsewhere", "are held by engine"), strict=True):
        assert re.search(rf"req={re.escape(name)}\S*[ :].*{logged}", one.server.log_path.read_text())
