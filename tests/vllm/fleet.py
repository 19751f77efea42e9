"""Two producers, two consumers and an engine without a connector, on two cores; and what holds of them when idle."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvferry.cli.plan.describe import fetch
from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.engines import EngineSpec, Transfer
from tests.vllm.forked_server import ForkedServer
from tests.vllm.load import TIMEOUT_S, Outage, Outcome, Tokens, ask, body_of, prompt_of
from tests.vllm.pair import Server
from tests.waiting import wait_until

START_S = 300.0
LEASE_S = 12.0
SETTLE_S = 120.0
_CACHE_BLOCKS = 256
_LONGEST = 8192
_BATCH = 32
_BLOCK = 128
_ENDED_BY_POLICY = "failed with an internal error during generation"
"""vLLM's words for a request that the policy `fail` has ended."""


@dataclass(frozen=True)
class Fleet:
    """All engines. The first producer has the same engine id in every boot, the second another each time; the first
    consumer computes what could not be loaded, the second ends such requests."""

    plain: ForkedServer
    producers: tuple[ForkedServer, ForkedServer]
    consumers: tuple[ForkedServer, ForkedServer]

    def right(self, outcomes: Sequence[Outcome]) -> dict[Tokens, Tokens]:
        """By prompt, what an engine without a connector answers."""
        longest: dict[Tokens, int] = {}
        for outcome in outcomes:
            if outcome.tokens:
                longest[outcome.prompt] = max(
                    longest.get(outcome.prompt, 0), len(outcome.tokens)
                )
        found: dict[Tokens, Tokens] = {}
        for tokens in set(longest.values()):
            prompts = [prompt for prompt, length in longest.items() if length == tokens]
            for first in range(0, len(prompts), _BATCH):
                some = prompts[first : first + _BATCH]
                body = body_of((), tokens) | {
                    "prompt": [list(prompt) for prompt in some]
                }
                for choice in _answer(self.plain, body)["choices"]:
                    found[some[choice["index"]]] = tuple(choice["token_ids"])
        return found | {
            outcome.prompt: () for outcome in outcomes if outcome.prompt not in found
        }


@contextmanager
def running(model: str, logs: Path) -> Iterator[Fleet]:
    """Start a fleet, and end it."""

    def server(name: str, core: str, transfer: Transfer | None = None) -> ForkedServer:
        spec = EngineSpec(
            name,
            model,
            devices=(core,),
            block_size=_BLOCK,
            max_model_len=_LONGEST,
            transfer=transfer,
            extra_args=(
                *(
                    "--skip-tokenizer-init",
                    "--num-gpu-blocks-override",
                    str(_CACHE_BLOCKS),
                ),
                *("--hf-overrides", json.dumps({"max_position_embeddings": _LONGEST})),
            ),
        )
        return stack.enter_context(ForkedServer(spec, logs))

    short = {"kv_lease_duration": LEASE_S}
    long_timeouts = {"handshake_timeout_s": 15}  # a busy machine must not decide
    with ExitStack() as stack:
        fleet = Fleet(
            server("plain", "0"),
            (
                server(
                    "producer-0",
                    "0",
                    Transfer("kv_producer", engine_id="producer-0", extra_config=short),
                ),
                server("producer-1", "0", Transfer("kv_producer", extra_config=short)),
            ),
            (
                server(
                    "consumer-recompute",
                    "1",
                    Transfer("kv_consumer", extra_config=long_timeouts),
                ),
                server(
                    "consumer-fail",
                    "1",
                    Transfer(
                        "kv_consumer", failure_policy="fail", extra_config=long_timeouts
                    ),
                ),
            ),
        )
        for each in (fleet.plain, *fleet.producers, *fleet.consumers):
            each.wait_ready(START_S)
        yield fleet


def prefill(producer: ForkedServer, prompt: Tokens) -> dict[str, Any]:
    """Prefill as a router does; the params of the answer."""
    params = _answer(producer, body_of(prompt, 1, kv_transfer_params=ASK_FOR_PREFILL))[
        "kv_transfer_params"
    ]
    assert params
    return dict(params)


def hand_over(
    producer: ForkedServer, consumer: ForkedServer, prompt: Tokens
) -> Outcome:
    """Prefill and decode as a router does."""
    return ask(consumer.base_url, prompt, kv_transfer_params=prefill(producer, prompt))


@contextmanager
def outage(outages: list[Outage], *servers: ForkedServer) -> Iterator[float]:
    """Kill servers, and start them again after the body. Gives when they were dead; adds the outage to the list."""
    began_s = time.monotonic()
    for server in servers:
        server.kill()
    yield time.monotonic()
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready(START_S)
    outages.append(Outage(began_s, time.monotonic()))


def check_idle(
    name: str, producers: Sequence[ForkedServer], consumers: Sequence[ForkedServer]
) -> None:
    """Check engines after the last request: nothing is held, nothing stopped, no internal error.

    Every producer hands over to every consumer once more, and takes back an unread lease: so all threads live.
    """
    servers = (*producers, *consumers)
    for server in servers:
        wait_until(
            partial(is_idle, server),
            f"{server.spec.name} is idle: {_held(server)}",
            SETTLE_S,
        )
    for number, (producer, consumer) in enumerate(
        (p, c) for p in producers for c in consumers
    ):
        _check_pair(f"{name}, idle, {number}", producer, consumer)
    for server in servers:
        wait_until(
            partial(is_idle, server), f"{server.spec.name} is idle again", SETTLE_S
        )
        assert (
            httpx.get(
                server.base_url + "/health", timeout=TIMEOUT_S, trust_env=False
            ).status_code
            == 200
        )
        assert not (bad := _bad_lines(server)), f"{server.log_path}:\n" + "\n".join(bad)


def _check_pair(name: str, producer: ForkedServer, consumer: ForkedServer) -> None:
    """A load, and then a prompt that shares only what the consumer has by now: it gives the lease back unread."""
    before, before_p = consumer.metrics(), producer.metrics()
    first, other = (
        (prompt_of(f"{name} {which}", 0) * 4)[: 2 * _BLOCK + 40] for which in "ab"
    )
    other = first[: 2 * _BLOCK] + other[2 * _BLOCK :]
    answers = [hand_over(producer, consumer, first)]
    answers.append(
        ask(consumer.base_url, other, kv_transfer_params=prefill(producer, first))
    )
    assert [answer.tokens for answer in answers] == [
        ask(producer.base_url, prompt).tokens for prompt in (first, other)
    ]
    moved = consumer.metrics() - before
    assert moved.total("vllm:kvferry_loads_total") == 1
    assert moved.total("vllm:kvferry_local_recomputes_total") == 0
    assert moved.total("vllm:kvferry_failed_loads_total") == 0
    wait_until(
        lambda: (
            (producer.metrics() - before_p).by_label(
                "vllm:kvferry_leases_released_total", "how"
            )
            == {"done": 1.0, "release": 1.0}
        ),
        f"{producer.spec.name} has both leases back from {consumer.spec.name}",
        SETTLE_S,
    )
    assert fetch("127.0.0.1", producer.side_channel_port, SETTLE_S).engine_id


def _bad_lines(server: ForkedServer) -> list[str]:
    """Lines that must not be in the log of a started engine."""
    _, ready, log = server.log_path.read_text().partition(
        "Application startup complete"
    )
    assert ready, server.log_path
    bad = re.findall(
        r"^.*(?:Traceback|internal error| ERROR | CRITICAL ).*$", log, re.MULTILINE
    )
    return [line for line in bad if _ENDED_BY_POLICY not in line]


def _held(server: Server) -> dict[str, float]:
    """Counts of everything that an engine still holds, by kind."""
    seen = server.metrics()
    return {
        "requests": seen.total("vllm:num_requests_running")
        + seen.total("vllm:num_requests_waiting"),
        "leases": seen.total("vllm:kvferry_leases_opened_total")
        - seen.total("vllm:kvferry_leases_released_total"),
        "share of blocks": seen.total("vllm:kv_cache_usage_perc"),
        "blocks in quarantine": seen.total("vllm:kvferry_quarantined_blocks_now"),
    }


def is_idle(server: Server) -> bool:
    """Whether an engine holds nothing, as of its last step."""
    return not any(_held(server).values())


def _answer(server: ForkedServer, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(
        server.base_url + "/v1/completions",
        json=body,
        timeout=TIMEOUT_S,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
