"""vllm-router's policy `kv_aware`, which sends a prompt to the producer whose KV events contained its blocks: of real
engines and, for what those on a CPU cannot publish, of made ones."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import zmq

from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.devices import free_ports
from scripts.accuracy.engines import Router
from scripts.accuracy.metrics import scrape
from tests.vllm.conftest import START_S
from tests.vllm.load import body_of, prompt_of
from tests.vllm.pair import TIMEOUT_S
from tests.vllm.publishing_engine import BLOCK, publishing_server
from tests.waiting import wait_until

MADE_BLOCK = 16
"""Tokens of a block for the router's `--pd-kv-events`."""
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""The mode in which an engine shows where it publishes."""


class FollowingRouter(Router):
    """The router with the policy, and its view of the events."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], logs: Path, more: Sequence[str] = ()) -> None:
        (port,) = free_ports(1)
        self._metrics_url = f"http://127.0.0.1:{port}"
        policy = ("--prefill-policy", "kv_aware", "--log-level", "debug", "--prometheus-port", str(port))
        super().__init__(prefill, decode, logs, TIMEOUT_S, (*policy, *more))

    def __enter__(self) -> FollowingRouter:
        self.start()
        return self

    @property
    def credited(self) -> float:
        """Tokens of prompts so far that were with the engine to which they went."""
        return scrape(self._metrics_url).total("vllm_router_pd_credited_prefix_tokens_total")

    def received(self, url: str) -> int:
        """The number of the last batch of an engine's events; they begin with 0. -1 when there was none."""
        log = re.sub(r"\x1b\[[0-9;]*m", "", self.log_path.read_text())
        found = re.findall(rf"live sequence advanced source={re.escape(url)} rank=0 seq=(\d+)", log)
        return max(map(int, found), default=-1)


def post(base_url: str, prompt: Sequence[int] | str, **more: Any) -> None:
    body = body_of((), **more) | {"prompt": prompt}
    answer = httpx.post(base_url + "/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def full(prompt: Sequence[int], block: int) -> int:
    """Tokens in full blocks."""
    return len(prompt) // block * block


class Engines:
    """Two producers and a consumer that publish events, and the router, which finds out by itself where."""

    def __init__(self, logs: Path, stack: ExitStack) -> None:
        first, _ = publishing_server("kv-aware-0", "0", "kv_producer", logs, env=DEV_MODE)
        second, _ = publishing_server("kv-aware-1", "1", "kv_producer", logs, env=DEV_MODE)
        self.producers = (first, second)
        self.consumer, _ = publishing_server("kv-aware-consumer", "1", "kv_consumer", logs, env=DEV_MODE)
        for server in (first, second, self.consumer):
            stack.enter_context(server)
        for server in (first, second, self.consumer):
            server.wait_ready(START_S)
        urls = [server.base_url for server in self.producers]
        self.router = stack.enter_context(FollowingRouter(urls, [self.consumer.base_url], logs / "kv-aware"))
        self.router.wait_ready(60)
        self._asked = 0
        wait_until(self._follows, "the router follows the events", timeout_s=START_S)

    def _follows(self) -> bool:
        """A subscriber hears nothing of what was published before it was connected."""
        deaf = [url for url in (server.base_url for server in self.producers) if self.router.received(url) < 0]
        for url in deaf:
            self._asked += 1
            post(url, prompt_of("first", self._asked), tokens=1)
        return not deaf


@pytest.fixture(scope="module")
def engines(logs: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(logs, stack)


@pytest.mark.parametrize("holder", [0, 1])
def test_a_prompt_goes_to_the_producer_that_published_its_blocks(engines: Engines, holder: int) -> None:
    router, consumer = engines.router, engines.consumer
    producer, other = engines.producers[holder], engines.producers[1 - holder]
    prompt = prompt_of("held by a producer", holder)
    received = router.received(producer.base_url)
    post(producer.base_url, prompt, tokens=1, kv_transfer_params=ASK_FOR_PREFILL)
    wait_until(lambda: router.received(producer.base_url) > received, "the router hears of the prompt", timeout_s=60)
    credited = router.credited
    before = {server: server.metrics() for server in (producer, other, consumer)}
    post(router.base_url, prompt)
    moved = {server: server.metrics() - earlier for server, earlier in before.items()}
    assert router.credited - credited == full(prompt, BLOCK)
    assert moved[producer].total("vllm:prefix_cache_hits_total") == full(prompt[:-1], BLOCK)
    assert moved[other].total("vllm:prefix_cache_queries_total") == 0
    assert moved[consumer].total("vllm:kvferry_loads_total") == 1
    assert moved[consumer].total("vllm:kvferry_local_recomputes_total") == 0


def test_blocks_that_only_the_consumer_holds_count_for_no_producer(engines: Engines) -> None:
    router, consumer = engines.router, engines.consumer
    prompt = prompt_of("held by the consumer", 0)
    post(consumer.base_url, prompt)
    credited, before = router.credited, consumer.metrics()
    post(router.base_url, prompt)
    assert router.credited == credited
    assert (consumer.metrics() - before).total("vllm:prefix_cache_hits_total") == full(prompt[:-1], BLOCK)
    assert router.received(consumer.base_url) == -1


class MadeEngine(ThreadingHTTPServer):
    """A stand-in for an engine: the answers that the router needs, and events of blocks that no engine has."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], block: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.block = block
        self.base_url = f"http://127.0.0.1:{self.server_port}"
        self.prompts: list[Any] = []
        self._events = context.socket(zmq.PUB)
        port = self._events.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": ""}
        self.gets: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"object": "list", "data": [{"id": "model", "object": "model"}]},
            "/kv_event_sources": {"0": config | {"replay_endpoint": None, "buffer_steps": 10_000, "hwm": 100_000}},
            "/server_info?config_format=json": {
                "vllm_config": {"model_config": {"model": "model"}, "cache_config": {"block_size": block}}
            },
        }
        self.asked: set[str] = set()
        self._published = 0
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    def tell(self, prompt: Sequence[int], topic: str = "", **other: Any) -> int:
        """Publish that the prompt's full blocks are stored here, as vLLM would but for `other` fields.

        Returns the batch's number.
        """
        blocks = len(prompt) // self.block
        event = {
            "type": "BlockStored",
            "block_hashes": [abs(hash(tuple(prompt[: self.block * (index + 1)]))) for index in range(blocks)],
            "parent_block_hash": None,
            "token_ids": list(prompt[: self.block * blocks]),
            "block_size": self.block,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        batch = msgspec.msgpack.encode([time.time(), [event | other], 0])
        number, self._published = self._published, self._published + 1
        self._events.send_multipart([topic.encode(), number.to_bytes(8, "big"), batch])
        return number

    def close(self) -> None:
        self._events.close(linger=0)
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        engine = cast(MadeEngine, self.server)
        engine.asked.add(self.path)
        self._answer(engine.gets.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            tokens = list(body["prompt"].encode())
            self._answer({"count": len(tokens), "max_model_len": 1024, "tokens": tokens})
        elif self.path == "/v1/completions":
            cast(MadeEngine, self.server).prompts.append(body["prompt"])
            choice = {"index": 0, "text": "", "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "made", "object": "text_completion", "model": "model", "choices": [choice], "usage": usage}
            self._answer(answer | {"kv_transfer_params": {"do_remote_prefill": True}})
        else:
            self._answer(None)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, answer: dict[str, Any] | None) -> None:
        body = json.dumps(answer or {}).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class MadeEngines:
    """Two made producers and a made consumer. The router is configured with the producers' events or asks for them."""

    def __init__(self, logs: Path, stack: ExitStack, block: int, reported: bool) -> None:
        context = stack.enter_context(zmq.Context())
        made = [MadeEngine(context, block) for _ in range(3)]
        for engine in made:
            stack.callback(engine.close)
        self.producers, self.consumer = made[:2], made[2]
        urls = [engine.base_url for engine in self.producers]
        sources = [f"--pd-kv-events={engine.base_url}={engine.endpoint}" for engine in self.producers if reported]
        folder = logs / f"made-{block}"
        self.router = stack.enter_context(FollowingRouter(urls, [self.consumer.base_url], folder, sources))
        self.router.wait_ready(60)
        wait_until(self._follows, "the router follows the events", timeout_s=60)

    def knows(self, prompt: Sequence[int], holder: MadeEngine, **other: Any) -> None:
        """Publish the event, then one that the router takes, and wait until it did: it takes them in order."""
        last = holder.tell(prompt_of("after it", holder.tell(prompt, **other)))
        wait_until(lambda: self.router.received(holder.base_url) >= last, "the router hears", timeout_s=60)

    def _follows(self) -> bool:
        """A subscriber hears nothing of what is published before it is connected."""
        for engine in self.producers:
            engine.tell(prompt_of("first", 0))
        return all(self.router.received(engine.base_url) >= 0 for engine in self.producers)


@pytest.fixture(scope="module")
def made(logs: Path) -> Iterator[MadeEngines]:
    with ExitStack() as stack:
        yield MadeEngines(logs, stack, MADE_BLOCK, reported=True)


def test_blocks_of_16_tokens_count_at_the_addresses_given(made: MadeEngines) -> None:
    _each_gets_what_it_told_of(made, MADE_BLOCK)


@pytest.mark.parametrize("block", [32, 128])
def test_the_router_asks_the_producers_alone_for_other_blocks(logs: Path, block: int) -> None:
    with ExitStack() as stack:
        made = MadeEngines(logs, stack, block, reported=False)
        _each_gets_what_it_told_of(made, block)
        paths = {"/kv_event_sources", "/server_info?config_format=json"}
        assert all(paths <= producer.asked for producer in made.producers)
        assert not paths & made.consumer.asked


def _each_gets_what_it_told_of(made: MadeEngines, block: int) -> None:
    for index, holder in enumerate(made.producers):
        prompt = prompt_of("made", index)
        assert len(prompt) >= block
        made.knows(prompt, holder)
        credited = made.router.credited
        post(made.router.base_url, prompt)
        assert made.router.credited - credited == full(prompt, block)
        assert [list(prompt) in producer.prompts for producer in made.producers] == [index == 0, index == 1]


@pytest.mark.parametrize("holder", [0, 1])
def test_an_engine_that_renders_nothing_is_asked_for_the_tokens_of_a_text(made: MadeEngines, holder: int) -> None:
    text = f"made {holder}: " + "once upon a time in a land of rivers " * 3
    made.knows(list(text.encode()), made.producers[holder])
    credited = made.router.credited
    post(made.router.base_url, text)
    assert made.router.credited - credited == full(text.encode(), MADE_BLOCK)
    assert made.producers[holder].prompts[-1] == text


@pytest.mark.parametrize(
    "other",
    [
        {"topic": "kv-events"},
        {"block_size": 2 * MADE_BLOCK},
        {"kv_cache_spec_kind": "mla_attention"},
        {"group_idx": 1},
        {"lora_name": "adapter"},
        {"extra_keys": [("salt",)] + [None] * 5},
    ],
    ids=lambda other: next(iter(other)),
)
def test_events_that_the_policy_does_not_count(made: MadeEngines, other: dict[str, Any]) -> None:
    prompt = prompt_of(f"not counted {next(iter(other))}", 0)[: 6 * MADE_BLOCK]
    for producer in made.producers:
        made.knows(prompt, producer, **other)
    credited = made.router.credited
    post(made.router.base_url, prompt)
    assert made.router.credited == credited
