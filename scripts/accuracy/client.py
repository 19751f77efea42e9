"""Asking: one request and its answer as tokens and log-probabilities; many at once; half a request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import httpx

from scripts.accuracy.prompts import Case

ASK_FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_ID_PREFIX = "token_id:"
"""Of a token that is asked for as an id."""


class NoAnswer(Exception):
    """A request was not answered in time, or its connection broke: a server hangs or has died."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Attributes:
        tokens: ids of the generated tokens; logprobs: theirs.
        likeliest: at each place the likeliest tokens' log-probabilities, by id; empty where none were asked for.
        prompt_tokens: as the server counted them.
        first_token_s: from the request to the first token; only for streams.
        gaps_s: between one piece of a stream and the next, without the first piece's wait.
        error: empty, or the server's error.
        params: `kv_transfer_params` of the answer.
        answer_id: the server's id of a streamed answer.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[Mapping[int, float], ...] = ()
    text: str = ""
    prompt_tokens: int = 0
    first_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    error: str = ""
    params: Mapping[str, Any] | None = None
    answer_id: str = ""


def body_of(case: Case, model: str, likeliest: int = 0, **more: Any) -> dict[str, Any]:
    """The request's JSON: greedy, whole length, with token ids and log-probabilities.

    Args:
        likeliest: how many tokens' log-probabilities are asked for at each place, beside the generated one's.
        more: further fields.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": case.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": case.stream,
        "return_token_ids": True,
    }
    if likeliest:
        body["return_tokens_as_token_ids"] = True
    if case.stream:
        body["stream_options"] = {"include_usage": True}
    if case.chat:
        body["messages"] = [
            {"role": role, "content": content} for role, content in case.messages
        ]
        body |= {"logprobs": True, "top_logprobs": likeliest}
    else:
        body["prompt"] = (
            list(case.prompt) if isinstance(case.prompt, tuple) else case.prompt
        )
        body["logprobs"] = likeliest
    return body | more


def path_of(case: Case) -> str:
    """The endpoint."""
    return "/v1/chat/completions" if case.chat else "/v1/completions"


class Client:
    """Asks servers that serve `model`. Use as an asynchronous context manager.

    Args:
        transport: tests give one.
        always: arguments of `body_of` for all requests, before those of their own.
    """

    def __init__(
        self,
        model: str,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        always: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._always = dict(always or {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            timeout=timeout_s, trust_env=False, limits=limits, transport=transport
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, base_url: str, case: Case, **more: Any) -> Answer:
        """One request.

        Raises:
            NoAnswer: it timed out, or the connection broke. An error answer is returned, not raised.
        """
        body = body_of(case, self._model, **{**self._always, **more})
        started_s = time.monotonic()
        try:
            url = base_url + path_of(case)
            return (
                await self._stream(url, body)
                if case.stream
                else _whole(await self._http.post(url, json=body))
            )
        except httpx.TransportError as error:
            waited_s = time.monotonic() - started_s
            raise NoAnswer(
                f"{case.name}: no answer from {base_url} after {waited_s:.1f} s ({error!r})"
            ) from error

    async def ask_all(
        self, base_url: str, cases: Sequence[Case], at_once: int
    ) -> list[Answer]:
        """All of them, so many at a time; answers in the cases' order. Raises like `ask`."""
        gate = asyncio.Semaphore(at_once)

        async def one(case: Case) -> Answer:
            async with gate:
                return await self.ask(base_url, case)

        return list(await asyncio.gather(*(one(case) for case in cases)))

    async def hand_over_all(
        self, prefill_url: str, decode_url: str, cases: Sequence[Case], **more: Any
    ) -> list[Answer]:
        """The decoder's answers to prompts that another engine has prefilled, one leg after the other."""
        answers = []
        for case in cases:
            first = await self._prefill(prefill_url, case, **more)
            if first.error or not first.params:
                answers.append(
                    Answer(error=first.error or "the prefill's answer has no params")
                )
            else:
                answers.append(
                    await self.ask(
                        decode_url, case, kv_transfer_params=first.params, **more
                    )
                )
        return answers

    async def prefill(
        self, prefill_url: str, case: Case, **more: Any
    ) -> Mapping[str, Any] | None:
        """Have a prompt prefilled; the params that name its cache."""
        return (await self._prefill(prefill_url, case, **more)).params

    async def _prefill(self, prefill_url: str, case: Case, **more: Any) -> Answer:
        first = replace(case, stream=False, max_tokens=1)
        return await self.ask(
            prefill_url, first, kv_transfer_params=ASK_FOR_PREFILL, **more
        )

    async def leave_early(
        self, base_url: str, case: Case, tokens: int | None, within_s: float
    ) -> int:
        """Begin a stream and close the connection after so many tokens, or after a while.

        Returns:
            How many tokens had come.

        Raises:
            NoAnswer: the server answered with an error, or closed the connection.
        """
        body = body_of(replace(case, stream=True, max_tokens=400), self._model)
        stream = self._http.stream("POST", base_url + path_of(case), json=body)
        came = 0
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s), stream as reply:
                    if reply.status_code != 200:
                        raise NoAnswer(
                            f"{case.name}: HTTP {reply.status_code} of {base_url}"
                        )
                    async for event in _events(reply):
                        if "error" in event:
                            raise NoAnswer(
                                f"{case.name}: {base_url} sent {json.dumps(event['error'])[:500]}"
                            )
                        came += sum(
                            len(choice.get("token_ids") or ())
                            for choice in event.get("choices", ())
                        )
                        if tokens is not None and came >= tokens:
                            break
        except httpx.TransportError as error:
            raise NoAnswer(
                f"{case.name}: {base_url} closed the connection ({error!r})"
            ) from error
        return came

    async def _stream(self, url: str, body: Mapping[str, Any]) -> Answer:
        pieces: list[Answer] = []
        came_s: list[float] = []
        prompt_tokens, answer_id = 0, ""
        started_s = time.monotonic()
        async with self._http.stream("POST", url, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return _whole(reply)
            async for event in _events(reply):
                if "error" in event:
                    return Answer(error=json.dumps(event["error"])[:500])
                answer_id = event.get("id", answer_id)
                for choice in event.get("choices", ()):
                    pieces.append(_choice(choice))
                    if pieces[-1].tokens:
                        came_s.append(time.monotonic())
                prompt_tokens = (event.get("usage") or {}).get(
                    "prompt_tokens", prompt_tokens
                )
        return Answer(
            tokens=tuple(token for piece in pieces for token in piece.tokens),
            logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
            likeliest=tuple(place for piece in pieces for place in piece.likeliest),
            text="".join(piece.text for piece in pieces),
            prompt_tokens=prompt_tokens,
            first_token_s=came_s[0] - started_s if came_s else None,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(came_s)),
            answer_id=answer_id,
        )


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to `[DONE]`."""
    async for line in reply.aiter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _whole(reply: httpx.Response) -> Answer:
    if reply.status_code != 200:
        return Answer(error=f"HTTP {reply.status_code}: {reply.text[:500]}")
    answer = reply.json()
    params = answer.get("kv_transfer_params")
    return replace(
        _choice(answer["choices"][0]),
        prompt_tokens=answer["usage"]["prompt_tokens"],
        params=params,
    )


def _choice(choice: Mapping[str, Any]) -> Answer:
    """A choice, whole or a piece, of a completion or a chat."""
    found = choice.get("logprobs") or {}
    if "content" in found:
        entries = found["content"] or ()
        probs = [entry["logprob"] for entry in entries if entry["logprob"] is not None]
        places = [
            {
                other["token"]: other["logprob"]
                for other in (entry, *entry["top_logprobs"])
            }
            for entry in entries
            if entry.get("top_logprobs")
        ]
    else:
        probs = [
            value for value in found.get("token_logprobs") or () if value is not None
        ]
        places = [place for place in found.get("top_logprobs") or () if place]
    message = choice.get("message") or choice.get("delta") or {}
    by_id = (
        {
            int(name.removeprefix(_ID_PREFIX)): logprob
            for name, logprob in place.items()
            if name.startswith(_ID_PREFIX)
            and logprob is not None  # NaN is null in JSON
        }
        for place in places
    )
    return Answer(
        tokens=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(probs),
        likeliest=tuple(place for place in by_id if place),
        text=choice.get("text") or message.get("content") or "",
    )
