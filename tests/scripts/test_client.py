"""Answers, whole and streamed, of completions and chats, as tokens and log-probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import httpx
import pytest

from scripts.accuracy.client import Answer, Client, NoAnswer
from scripts.accuracy.prompts import Case

T = TypeVar("T")
URL = "http://engine"
PLAIN = Case("plain", (1, 2, 3))


def streamed(*events: dict[str, Any]) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


def with_client(
    reply: Callable[[httpx.Request], httpx.Response],
    use: Callable[[Client], Coroutine[Any, Any, T]],
) -> T:
    async def run() -> T:
        async with Client("m", 5.0, httpx.MockTransport(reply)) as client:
            return await use(client)

    return asyncio.run(run())


def given(reply: httpx.Response, _: httpx.Request) -> httpx.Response:
    return reply


def ask(case: Case, reply: httpx.Response) -> Answer:
    return with_client(lambda request: reply, lambda client: client.ask(URL, case))


def test_a_streamed_completion_is_put_together_from_its_pieces() -> None:
    pieces: list[dict[str, Any]] = [
        {
            "choices": [
                {"text": " a", "token_ids": [4], "logprobs": {"token_logprobs": [-0.5]}}
            ]
        },
        {
            "choices": [
                {
                    "text": " b",
                    "token_ids": [5, 6],
                    "logprobs": {"token_logprobs": [-0.25, -1.0]},
                }
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 3}},
    ]
    answer = ask(Case("s", (1, 2, 3), stream=True), streamed(*pieces))
    assert (answer.tokens, answer.logprobs, answer.text) == (
        (4, 5, 6),
        (-0.5, -0.25, -1.0),
        " a b",
    )
    assert answer.prompt_tokens == 3
    assert answer.first_token_s is not None
    assert len(answer.gaps_s) == 1  # between the two pieces that have tokens


@pytest.mark.parametrize(
    "case", [PLAIN, Case("s", (1,), stream=True)], ids=["whole", "streamed"]
)
def test_an_error_is_an_answer_and_not_an_exception(case: Case) -> None:
    assert (
        ask(case, httpx.Response(500, text="engine dead")).error
        == "HTTP 500: engine dead"
    )


def test_a_broken_connection_is_no_answer() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("too slow")

    with pytest.raises(
        NoAnswer, match=r"plain: no answer from http://engine after .*too slow"
    ):
        with_client(reply, lambda client: client.ask(URL, PLAIN))


def test_a_prompt_that_was_not_prefilled_is_not_decoded_but_an_error() -> None:
    unusable = httpx.Response(
        200, json={"choices": [{}], "usage": {"prompt_tokens": 1}}
    )
    for reply, error in (
        (httpx.Response(500, text="no"), "HTTP 500"),
        (unusable, "no params"),
    ):
        (answer,) = with_client(
            partial(given, reply),
            lambda client: client.hand_over_all(URL, URL, [PLAIN]),
        )
        assert error in answer.error
