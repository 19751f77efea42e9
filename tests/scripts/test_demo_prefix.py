"""The demonstration's prompt that is read from another engine's cache: what is shown, also where it was not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from scripts import demo_prefix
from scripts.accuracy.client import Answer, Client
from scripts.accuracy.metrics import Scrape, parse_metrics
from scripts.demo_prefix import (
    ATTEMPTS,
    PREFIX_TOKENS,
    Pulled,
    SecondPrompt,
    lines_of,
)

READ = """
vllm:kvferry_prefix_tokens_loaded_total{engine="0"} 1024.0
vllm:kvferry_peer_loads_total{engine="0",peer="prefill-0"} 2.0
vllm:kvferry_peer_bytes_total{engine="0",peer="prefill-0"} 4.7e7
vllm:kvferry_peer_load_seconds_total{engine="0",peer="prefill-0"} 0.05
"""
LATE = 'vllm:kvferry_prefixes_not_pulled_total{engine="0",reason="too_late"} 1.0\n'


@dataclass
class Engine:
    """Its counters are all zero at first, then as given, one after another; the last stays."""

    base_url: str
    side_channel_port: int
    counted: list[str] = field(default_factory=list)

    def metrics(self) -> Scrape:
        if len(self.counted) > 1:
            return parse_metrics(self.counted.pop(0))
        return parse_metrics(self.counted[0])


def shown(counted: Sequence[str], error: str = "") -> tuple[list[str], list[Any]]:
    """What is shown, and the bodies that the engine got; checks that the source had each named prefix before."""
    source = Engine("http://source", 5600)
    engine = Engine("http://engine", 5601, list(counted))
    bodies: list[Any] = []
    prefixes: list[list[int]] = []
    named: list[list[int]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.host == "engine":
            bodies.append(body)
            if "kv_transfer_params" in body:
                named.append(body["prompt"][:PREFIX_TOKENS])
            if error and "kv_transfer_params" in body:
                return httpx.Response(500, text=error)
        else:
            prefixes.append(body["prompt"][:PREFIX_TOKENS])
        piece = {"choices": [{"text": " a", "token_ids": [4]}]}
        lines = f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, text=lines)

    async def run() -> tuple[Answer, Pulled]:
        async with Client("m", 5.0, httpx.MockTransport(reply)) as client:
            second = SecondPrompt(client, source, engine)
            return await second.compute(), await second.pull()

    computed, pulled = asyncio.run(run())
    assert named == prefixes
    return lines_of(computed, pulled, "prefill-0", "decode-0"), bodies


def test_a_prompt_that_is_read_is_shown_with_its_tokens_bytes_and_time() -> None:
    (title, computed, read), bodies = shown(["", "", READ])
    assert title == (
        "A prompt of 1,024 + 32 tokens at decode-0; prefill-0 has the first 1,024 in its cache:"
    )
    assert computed.startswith("  computed  first token after ")
    assert read.startswith("  read      first token after ")
    assert read.endswith(" ms: 1,024 tokens, 47.0 MB in 25.0 ms, from prefill-0")
    own, named = bodies
    assert len(own["prompt"]) == len(named["prompt"])
    assert own["prompt"][:PREFIX_TOKENS] != named["prompt"][:PREFIX_TOKENS]
    source = named["kv_transfer_params"]["remote_kv_source"]
    assert source == {
        "kv_request_id": "demo",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
    }


def test_a_machine_that_is_too_slow_is_shown_with_the_reason() -> None:
    late = [text for _ in range(ATTEMPTS) for text in ("", LATE)]
    (_, _, read), bodies = shown(late)
    assert len(bodies) == 1 + ATTEMPTS
    assert read.startswith("  computed  first token after ")
    assert read.endswith(" ms: not read from prefill-0 (too_late)")


def test_a_slow_attempt_is_followed_by_another() -> None:
    (_, _, read), bodies = shown(["", LATE, "", READ])
    assert len(bodies) == 3
    assert read.endswith("from prefill-0")


def test_an_engine_that_asks_nobody_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With vLLM's own connector, or where a failed load ends its request."""
    monkeypatch.setattr(demo_prefix, "COUNTED_S", 0.0)
    (_, _, read), bodies = shown([""])
    assert len(bodies) == 2
    assert read.endswith("not read from prefill-0 (no engine was asked)")


def test_an_error_is_shown() -> None:
    (_, _, read), bodies = shown([""], error="broken")
    assert len(bodies) == 2
    assert "failed: " in read
    assert "broken" in read
