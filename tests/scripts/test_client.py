"""Answers, whole and streamed, of completions and chats, as tokens and log-probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import httpx
import pytest

from scripts.accuracy.client import Answer, Client, NoAnswer
from scripts.accuracy.prompts import Case

T = TypeVar("T")
URL = "http://engine"
PLAIN = Case("plain", (1, 2, 3))
CHAT = Case("chat", messages=(("user", "hi"),))


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


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_at_each_place(stream: bool) -> None:
    likeliest = ({4: -0.5, 6: -1.0}, {5: -0.25, 4: -2.0})
    entries = [
        [{"token": f"token_id:{token}", "logprob": p} for token, p in place.items()]
        for place in likeliest
    ]
    content = [{**entry[0], "top_logprobs": entry} for entry in entries]
    chat = {"logprobs": {"content": content}}
    plain = {
        "logprobs": {
            "top_logprobs": [
                {f"token_id:{token}": p for token, p in place.items()} for place in likeliest
            ]
        }
    }
    for case, choice in ((CHAT, chat), (PLAIN, plain)):
        whole = {"choices": [choice], "usage": {"prompt_tokens": 1}}
        reply = streamed(whole) if stream else httpx.Response(200, json=whole)
        assert ask(replace(case, stream=stream), reply).likeliest == likeliest


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_not_asked_for_as_ids_are_no_likeliest_ones(stream: bool) -> None:
    whole = {
        "choices": [{"logprobs": {"top_logprobs": [{" -": -0.5}, {"7": -0.1}]}}],
        "usage": {"prompt_tokens": 1},
    }
    reply = streamed(whole) if stream else httpx.Response(200, json=whole)
    assert ask(replace(PLAIN, stream=stream), reply).likeliest == ()


def test_a_chat() -> None:
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
    choice = {"message": {"content": "a b"}, "token_ids": [4, 5], "logprobs": logprobs}
    answer = ask(
        CHAT, httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 9}})
    )
    assert (answer.tokens, answer.logprobs, answer.text, answer.prompt_tokens) == (
        (4, 5),
        (-0.5, -0.25),
        "a b",
        9,
    )


def test_a_streamed_completion_is_put_together_from_its_pieces() -> None:
    pieces: list[dict[str, Any]] = [
        {"choices": [{"text": " a", "token_ids": [4], "logprobs": {"token_logprobs": [-0.5]}}]},
        {
            "choices": [
                {"text": " b", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.25, -1.0]}}
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 3}},
    ]
    answer = ask(Case("s", (1, 2, 3), stream=True), streamed(*pieces))
    assert (answer.tokens, answer.logprobs, answer.text) == ((4, 5, 6), (-0.5, -0.25, -1.0), " a b")
    assert answer.prompt_tokens == 3
    assert answer.first_token_s is not None
    assert len(answer.gaps_s) == 1  # between the two pieces that have tokens


def test_a_streamed_chat_is_put_together_from_its_pieces() -> None:
    pieces: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {
            "choices": [
                {
                    "delta": {"content": "a"},
                    "token_ids": [4],
                    "logprobs": {"content": [{"logprob": -0.5}]},
                }
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 9}},
    ]
    answer = ask(Case("s", messages=CHAT.messages, stream=True), streamed(*pieces))
    assert (answer.tokens, answer.logprobs, answer.text, answer.prompt_tokens) == (
        (4,),
        (-0.5,),
        "a",
        9,
    )


@pytest.mark.parametrize("case", [PLAIN, Case("s", (1,), stream=True)], ids=["whole", "streamed"])
def test_an_error_is_an_answer_and_not_an_exception(case: Case) -> None:
    assert ask(case, httpx.Response(500, text="engine dead")).error == "HTTP 500: engine dead"


def test_an_error_within_a_stream_is_an_error() -> None:
    answer = ask(Case("s", (1,), stream=True), streamed({"error": {"message": "load failed"}}))
    assert "load failed" in answer.error


def test_a_broken_connection_is_no_answer() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("too slow")

    with pytest.raises(NoAnswer, match=r"plain: no answer from http://engine after .*too slow"):
        with_client(reply, lambda client: client.ask(URL, PLAIN))


def test_probabilities_that_are_no_numbers_are_missing() -> None:
    """NaN is null in JSON."""
    place = {"token_id:7": None, "token_id:8": -0.1}
    plain = {"token_ids": [7], "logprobs": {"token_logprobs": [None], "top_logprobs": [place]}}
    chat = {"token_ids": [7], "logprobs": {"content": [{"token": "token_id:7", "logprob": None}]}}
    for case, choice, likeliest in ((PLAIN, plain, ({8: -0.1},)), (CHAT, chat, ())):
        answer = ask(
            case, httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 1}})
        )
        assert (answer.tokens, answer.logprobs, answer.likeliest) == ((7,), (), likeliest)


@pytest.mark.parametrize(
    "reply",
    [httpx.Response(500, text="no"), streamed({"choices": []}, {"error": {"message": "no"}})],
    ids=["500", "error"],
)
def test_a_stream_that_is_left_early_must_have_begun(reply: httpx.Response) -> None:
    with pytest.raises(NoAnswer, match=PLAIN.name):
        with_client(lambda request: reply, lambda client: client.leave_early(URL, PLAIN, 3, 5.0))


def test_a_prompt_that_was_not_prefilled_is_not_decoded_but_an_error() -> None:
    unusable = httpx.Response(200, json={"choices": [{}], "usage": {"prompt_tokens": 1}})
    for reply, error in ((httpx.Response(500, text="no"), "HTTP 500"), (unusable, "no params")):
        (answer,) = with_client(
            partial(given, reply), lambda client: client.hand_over_all(URL, URL, [PLAIN])
        )
        assert error in answer.error
