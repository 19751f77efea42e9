"""A prefill engine and a decode engine, spoken to as a router would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.engines import Engine
from tests.vllm.forked_server import ForkedServer

Server = Engine | ForkedServer
"""As a user starts it, or forked."""
Params = dict[str, Any]
Change = Callable[[Params], Any]

TIMEOUT_S = 120.0


def long_prompt(name: str, sentences: int = 25) -> str:
    """A prompt of its own that begins with `name` and spans several blocks."""
    return (
        f"{name}: once upon a time in a land of rivers "
        + "and mountains and quiet valleys, " * sentences
    )


def post(
    base_url: str,
    body: Params,
    path: str = "/v1/completions",
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    """One request; any status is an answer."""
    return httpx.post(
        base_url + path, json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
    )


@dataclass(frozen=True)
class ServerPair:
    """Both engines."""

    producer: Server
    consumer: Server

    def prefill(
        self, prompt: str, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Params:
        """Prefill as a router does and return the params of the answer."""
        body = self._body(prompt, 1) | {"kv_transfer_params": ASK_FOR_PREFILL} | more
        answer = post(self.producer.base_url, body, headers=headers)
        assert answer.status_code == 200, answer.text
        params = answer.json()["kv_transfer_params"]
        assert params, answer.text
        return dict(params)

    def decode(
        self,
        prompt: str,
        params: Any,
        headers: Mapping[str, str] | None = None,
        *,
        tokens: int = 8,
    ) -> httpx.Response:
        """Send a prompt with params to the decoder."""
        return post(
            self.consumer.base_url,
            self._body(prompt, tokens) | {"kv_transfer_params": params},
            headers=headers,
        )

    def plain(self, engine: Server, prompt: str, tokens: int = 8) -> str:
        """A request without any params: what one engine answers by itself."""
        answer = post(engine.base_url, self._body(prompt, tokens))
        assert answer.status_code == 200, answer.text
        return text_of(answer)

    def hand_over(self, prompt: str, change: Change = copy.deepcopy) -> httpx.Response:
        """Prefill, change the params, decode."""
        return self.decode(prompt, change(self.prefill(prompt)))

    @staticmethod
    def _body(prompt: str, tokens: int) -> Params:
        return {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
        }


def text_of(answer: httpx.Response) -> str:
    """The first choice's text."""
    return str(answer.json()["choices"][0]["text"])
