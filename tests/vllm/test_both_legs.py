"""Both legs of a request at once: as vllm-router sends them, and one by one as other routers might."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.cli.plan.describe import fetch
from kvferry.protocol.ids import BootId
from kvferry.protocol.params import announced_id
from scripts.accuracy.engines import EngineSpec, Router, Transfer
from scripts.accuracy.metrics import Scrape
from tests.vllm.checked import broken_of
from tests.vllm.conftest import START_S
from tests.vllm.fleet import SETTLE_S, is_idle
from tests.vllm.forked_server import ForkedServer
from tests.vllm.pair import (
    TIMEOUT_S,
    Params,
    Server,
    ServerPair,
    long_prompt,
    post,
    text_of,
)
from tests.waiting import wait_until

APART_S = 2.0
BODY: Params = {"model": "model", "max_tokens": 8, "temperature": 0}
SMALLEST_LEN = 1024
LAYERS, HEADS, HEAD_DIM, FLOAT, BLOCK = 4, 4, 32, 4, 128
BLOCK_BYTES = LAYERS * HEADS * 2 * HEAD_DIM * FLOAT * BLOCK


@pytest.fixture(scope="module")
def front(pair: ServerPair, logs: Path) -> Iterator[str]:
    """A router that sends both legs at once from now on: the first answer that it sees says `push`."""
    assert pair.hand_over(long_prompt("Both legs, first contact")).status_code == 200
    with Router(
        [pair.producer.base_url], [pair.consumer.base_url], logs, TIMEOUT_S
    ) as router:
        router.wait_ready(60)
        answer = post(
            router.base_url, BODY | {"prompt": long_prompt("Both legs, in sequence")}
        )
        assert answer.status_code == 200, answer.text
        yield router.base_url


@pytest.fixture(scope="module")
def other(model: Path, logs: Path) -> Iterator[ForkedServer]:
    """An engine that reads and is read from, announces nothing, takes shorter prompts, and computes one at a time."""
    config = {"kv_lease_duration": 12.0, "streaming": "off"}
    transfer = Transfer("kv_both", extra_config=config)
    spec = EngineSpec(
        "other",
        str(model),
        max_model_len=SMALLEST_LEN,
        max_num_seqs=1,
        transfer=transfer,
    )
    with ForkedServer(spec, logs) as server:
        server.wait_ready(START_S)
        yield server


@pytest.fixture(autouse=True)
def _nothing_leaks(pair: ServerPair) -> Iterator[None]:
    """All leases, blocks and requests of both engines are gone after every test, and all books are right."""
    yield
    for server in (pair.producer, pair.consumer):
        wait_until(partial(is_idle, server), f"{server.spec.name} is idle", SETTLE_S)
        assert broken_of(server.log_path) == []


class Counted:
    """What the consumer counts meanwhile."""

    def __init__(self, pair: ServerPair) -> None:
        self._consumer = pair.consumer
        self._before = pair.consumer.metrics()

    @property
    def loads(self) -> float:
        return self._moved.total("vllm:kvferry_loads_total")

    @property
    def recomputes(self) -> dict[str, float]:
        """By reason."""
        return self._moved.by_label("vllm:kvferry_local_recomputes_total", "reason")

    @property
    def _moved(self) -> Scrape:
        return self._consumer.metrics() - self._before


def leg(
    engine: Server,
    name: str,
    prompt: str | Sequence[str],
    params: Mapping[str, Any],
    tokens: int = 8,
) -> httpx.Response:
    """One leg, with the id that a router gives it."""
    body = BODY | {
        "prompt": prompt,
        "max_tokens": tokens,
        "kv_transfer_params": dict(params),
    }
    return post(engine.base_url, body, headers={"x-request-id": name})


def prefill(
    engine: Server, name: str, prompt: str | Sequence[str], **more: Any
) -> httpx.Response:
    """The leg of the producer."""
    return leg(engine, name, prompt, {"do_remote_decode": True, **more}, tokens=1)


def decode_params(producer: Server, name: str | None = None, **more: Any) -> Params:
    """The params of a decode leg that is sent before the answer to its prefill leg: who the producer is, as vllm-router
    knows it from earlier answers."""
    port = producer.side_channel_port
    description = fetch("127.0.0.1", port, TIMEOUT_S)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": announced_id(
            BootId(description.boot), description.engine_id
        ),
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "remote_request_id": name,
        **more,
    }


def texts(answer: httpx.Response) -> list[str]:
    """Of all choices, in their order."""
    assert answer.status_code == 200, answer.text
    return [
        str(choice["text"])
        for choice in sorted(
            answer.json()["choices"], key=lambda choice: choice["index"]
        )
    ]


def plain(pair: ServerPair, prompts: Sequence[str]) -> list[str]:
    return [pair.plain(pair.producer, prompt) for prompt in prompts]


def test_the_decoder_answers_from_the_producers_cache_and_computes_one_token(
    pair: ServerPair,
) -> None:
    prompt = long_prompt("A good one")
    want = pair.plain(pair.producer, prompt)
    before, before_p = pair.consumer.metrics(), pair.producer.metrics()
    params = pair.prefill(prompt)
    answer = pair.decode(prompt, params)
    assert text_of(answer) == want
    moved = pair.consumer.metrics() - before
    blocks = len(params["remote_block_ids"][0])
    assert blocks == -(-params["remote_num_tokens"] // BLOCK)
    assert moved.total("vllm:kvferry_planned_bytes_total") == blocks * BLOCK_BYTES
    assert moved.total("vllm:nixl_bytes_transferred_sum") == blocks * BLOCK_BYTES
    assert moved.total("vllm:kvferry_local_recomputes_total") == 0
    # vLLM's own count: all prompt tokens came from outside but the last, which it always computes itself.
    external = moved.total(
        "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"
    )
    assert external >= params["remote_num_tokens"] - 1
    assert (
        moved.total("vllm:prompt_tokens_by_source_total", source="local_compute") <= 1
    )
    wait_until(
        lambda: (
            (pair.producer.metrics() - before_p).total(
                "vllm:kvferry_leases_released_total", how="done"
            )
            == 1
        ),
        "the producer's blocks are free",
    )


def test_every_prompt_is_loaded_and_answered_as_one_engine_would(
    pair: ServerPair, front: str
) -> None:
    prompts = [long_prompt(f"At once {n}", 10 + 30 * n) for n in range(6)]
    counted = Counted(pair)
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(
            clients.map(lambda prompt: post(front, BODY | {"prompt": prompt}), prompts)
        )
    assert [text_of(answer) for answer in answers] == plain(pair, prompts)
    assert (counted.loads, counted.recomputes) == (len(prompts), {})
    for engine, logged in (
        (pair.producer, "is to be decoded elsewhere"),
        (pair.consumer, "are held by engine"),
    ):
        routed = rf"req={re.escape(answers[0].json()['id'])}\S*[ :].*{logged}"
        assert re.search(routed, engine.log_path.read_text()), (
            "both engines' ids contain the router's"
        )


def test_clients_that_leave_at_any_time_leave_nothing_behind(
    pair: ServerPair, front: str
) -> None:
    def leave(n: int) -> None:
        body = BODY | {
            "prompt": long_prompt(f"Client {n} leaves", 150),
            "max_tokens": 800,
            "stream": True,
        }
        patience = httpx.Timeout(TIMEOUT_S, read=0.01 * 1.5**n)
        with (
            suppress(httpx.ReadTimeout),
            httpx.stream(
                "POST",
                front + "/v1/completions",
                json=body,
                timeout=patience,
                trust_env=False,
            ) as answer,
        ):
            next(answer.iter_lines())

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(leave, range(12)))
    prompts = [long_prompt(f"Client {n} leaves", 150) for n in (0, 11)]
    assert [
        text_of(post(front, BODY | {"prompt": prompt})) for prompt in prompts
    ] == plain(pair, prompts)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_legs_may_come_seconds_apart(pair: ServerPair, first: str) -> None:
    name, prompt = f"apart-{first}-first", long_prompt(f"Apart, {first} first")
    params, counted = decode_params(pair.producer, name), Counted(pair)
    legs = [
        partial(prefill, pair.producer, name, prompt),
        partial(leg, pair.consumer, name, prompt, params),
    ]
    with ThreadPoolExecutor(2) as router:
        early = router.submit(legs[first == "decode"])
        time.sleep(APART_S)
        late = router.submit(legs[first == "prefill"])
        answers = [each.result() for each in (early, late)]
    assert text_of(answers[first == "prefill"]) == pair.plain(pair.producer, prompt)
    assert (counted.loads, counted.recomputes) == (1, {})


def test_one_transfer_id_joins_legs_with_different_request_ids(
    pair: ServerPair,
) -> None:
    prompts = [long_prompt(f"Joined {n}") for n in range(2)]
    params, counted = decode_params(pair.producer, transfer_id="joined"), Counted(pair)
    with ThreadPoolExecutor(2) as router:
        decoded = router.submit(leg, pair.consumer, "of-the-decode", prompts, params)
        prefill(pair.producer, "of-the-prefill", prompts, transfer_id="joined")
        assert texts(decoded.result()) == plain(pair, prompts)
    assert (counted.loads, counted.recomputes) == (len(prompts), {})


def test_a_prompt_that_the_producer_refuses_is_computed(
    pair: ServerPair, other: ForkedServer
) -> None:
    prompt = long_prompt("Too long there", 180)
    params, counted = decode_params(other, "refused"), Counted(pair)
    with ThreadPoolExecutor(2) as router:
        decoded = router.submit(leg, pair.consumer, "refused", prompt, params)
        assert prefill(other, "refused", prompt).status_code == 400
        assert text_of(decoded.result()) == pair.plain(pair.producer, prompt)
    assert (counted.loads, counted.recomputes) == (0, {"prompt_unknown": 1})


def test_both_legs_may_meet_on_one_engine(
    pair: ServerPair, other: ForkedServer
) -> None:
    prompt = long_prompt("On one engine")
    params, before = decode_params(other, "one-engine"), other.metrics()
    with ThreadPoolExecutor(2) as router:
        decoded = router.submit(leg, other, "one-engine", prompt, params)
        assert prefill(other, "one-engine", prompt).status_code == 200
        assert text_of(decoded.result()) == pair.plain(pair.producer, prompt)
    reasons = (other.metrics() - before).by_label(
        "vllm:kvferry_local_recomputes_total", "reason"
    )
    assert reasons == {"local_engine": 1}
    wait_until(partial(is_idle, other), "its leases have ended", SETTLE_S)
    assert broken_of(other.log_path) == []


def test_a_router_stays_sequential_if_the_producer_announces_nothing_and_it_still_answers(
    pair: ServerPair, other: ForkedServer, logs: Path
) -> None:
    with Router([other.base_url], [pair.consumer.base_url], logs, TIMEOUT_S) as router:
        router.wait_ready(60)
        for name in ("One", "Two", "Three"):
            assert (
                post(
                    router.base_url,
                    BODY | {"prompt": long_prompt(f"{name} in sequence")},
                ).status_code
                == 200
            )
        prompts = [long_prompt(f"In sequence {n}") for n in range(2)]
        counted = Counted(pair)
        assert texts(post(router.base_url, BODY | {"prompt": prompts})) == plain(
            pair, prompts
        )
        assert sum(counted.recomputes.values()) == 1, (
            "one answer has the params of one prompt"
        )
    prompt, counted = long_prompt("Asked all the same"), Counted(pair)
    params = decode_params(other, "asked")
    with ThreadPoolExecutor(2) as clients:
        decoded = clients.submit(leg, pair.consumer, "asked", prompt, params)
        assert (
            prefill(other, "asked", prompt).json()["kv_transfer_params"][
                "transfer_mode"
            ]
            == "pull"
        )
        assert text_of(decoded.result()) == pair.plain(pair.producer, prompt)
    assert (counted.loads, counted.recomputes) == (1, {})


def test_a_producer_that_is_killed_with_the_prompt_in_its_queue_costs_a_prefill(
    pair: ServerPair, other: ForkedServer
) -> None:
    prompt = long_prompt("Killed")
    params, counted = decode_params(other, "killed"), Counted(pair)

    def busy_until_killed() -> None:
        with suppress(httpx.TransportError):
            leg(other, "busy", "A long story", {}, tokens=SMALLEST_LEN - 24)

    def prefill_until_killed() -> None:
        with suppress(httpx.TransportError):
            prefill(other, "killed", prompt)

    with ThreadPoolExecutor(3) as router:
        router.submit(busy_until_killed)
        wait_until(
            lambda: other.metrics().total("vllm:num_requests_running") == 1,
            "it is busy",
        )
        router.submit(prefill_until_killed)
        decoded = router.submit(leg, pair.consumer, "killed", prompt, params)
        other.kill()
        assert text_of(decoded.result()) == pair.plain(pair.producer, prompt)
    assert (counted.loads, counted.recomputes) == (0, {"prompt_unknown": 1})
