"""vllm-router's policy `kv_aware`, which sends a prompt to the producer whose KV events contained its blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.devices import free_ports
from scripts.accuracy.engines import Router, Transfer
from scripts.accuracy.metrics import scrape
from tests.vllm.conftest import START_S
from tests.vllm.forked_server import ForkedServer, small_server
from tests.vllm.load import body_of, prompt_of
from tests.vllm.pair import TIMEOUT_S
from tests.waiting import wait_until

BLOCK = 32
"""The least that vLLM's attention on a CPU takes."""
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""The mode in which an engine shows where it publishes."""


def publishing_server(name: str, core: str, role: str, logs: Path) -> ForkedServer:
    """A server that publishes vLLM's KV events."""
    (port,) = free_ports(1)
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    args = ("--kv-events-config", json.dumps(config))
    return small_server(name, core, Transfer(role), logs, block_size=BLOCK, blocks=256, args=args, env=DEV_MODE)


class FollowingRouter(Router):
    """The router with the policy, and its view of the events."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], logs: Path) -> None:
        (port,) = free_ports(1)
        self._metrics_url = f"http://127.0.0.1:{port}"
        policy = ("--prefill-policy", "kv_aware", "--log-level", "debug", "--prometheus-port", str(port))
        super().__init__(prefill, decode, logs, TIMEOUT_S, policy)

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


def post(base_url: str, prompt: Sequence[int], **more: Any) -> None:
    answer = httpx.post(base_url + "/v1/completions", json=body_of(prompt, **more), timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def full(prompt: Sequence[int]) -> int:
    """Tokens in full blocks."""
    return len(prompt) // BLOCK * BLOCK


class Engines:
    """Two producers and a consumer that publish events, and the router, which finds out by itself where."""

    def __init__(self, logs: Path, stack: ExitStack) -> None:
        self.producers = tuple(
            stack.enter_context(publishing_server(f"kv-aware-{core}", core, "kv_producer", logs)) for core in "01"
        )
        self.consumer = stack.enter_context(publishing_server("kv-aware-consumer", "1", "kv_consumer", logs))
        for server in (*self.producers, self.consumer):
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
    assert router.credited - credited == full(prompt)
    assert moved[producer].total("vllm:prefix_cache_hits_total") == full(prompt[:-1])
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
    assert (consumer.metrics() - before).total("vllm:prefix_cache_hits_total") == full(prompt[:-1])
    assert router.received(consumer.base_url) == -1
