"""A client that asks all the time, whatever dies meanwhile, and what became of each of its requests."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

import httpx

from tests.vllm.small_models import FIRST_TOKEN, VOCABULARY

ANSWER_TOKENS = 8
TIMEOUT_S = 180.0
"""Of a client: a request without an answer for so long hangs."""

Tokens = tuple[int, ...]


class Kind(Enum):
    """The result of a request for a client."""

    ANSWERED = "answered"
    REFUSED = "HTTP 500"
    BROKEN = "broken stream"
    LEFT = "left by its client"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that is over. Times are of the monotonic clock.

    Attributes:
        tokens: all of the answer, or what had come of it.
        text: the error, if any.
    """

    prompt: Tokens
    kind: Kind
    tokens: Tokens = ()
    text: str = ""
    stream: bool = False
    started_s: float = 0.0
    ended_s: float = 0.0


def prompt_of(name: str, index: int) -> Tokens:
    """A prompt of its own, of one to four blocks of 128 tokens."""
    chooser = random.Random(f"{name} {index}")
    return tuple(
        chooser.randrange(FIRST_TOKEN, VOCABULARY)
        for _ in range(chooser.randrange(100, 450))
    )


def body_of(
    prompt: Sequence[int], tokens: int = ANSWER_TOKENS, **more: Any
) -> dict[str, Any]:
    """A greedy request that answers with token ids."""
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def ask(
    base_url: str,
    prompt: Tokens,
    *,
    stream: bool = False,
    tokens: int = ANSWER_TOKENS,
    began: threading.Event | None = None,
    leave: threading.Event | None = None,
    **more: Any,
) -> Outcome:
    """One request and what becomes of it; raises nothing.

    Args:
        began: set with the first token of a stream.
        leave: once it is set, the client leaves the stream with the next token.
    """
    started_s = time.monotonic()
    body = body_of(prompt, tokens, stream=stream, **more)
    came: list[int] = []
    try:
        with httpx.stream(
            "POST",
            base_url + "/v1/completions",
            json=body,
            timeout=TIMEOUT_S,
            trust_env=False,
        ) as reply:
            kind, text = (
                _read(reply, came, tokens, began, leave)
                if stream
                else _read_whole(reply, came, tokens)
            )
    except httpx.TimeoutException as error:
        kind, text = Kind.OTHER, f"hangs: {error!r}"
    except httpx.TransportError as error:
        kind, text = Kind.BROKEN if stream and came else Kind.OTHER, repr(error)
    return Outcome(prompt, kind, tuple(came), text, stream, started_s, time.monotonic())


def _read(
    reply: httpx.Response,
    came: list[int],
    tokens: int,
    began: threading.Event | None,
    leave: threading.Event | None,
) -> tuple[Kind, str]:
    if reply.status_code != 200:
        return _failure(reply)
    for event in _events(reply):
        if "error" in event:
            return Kind.BROKEN, json.dumps(event)[:300]
        came += [
            token for choice in event["choices"] for token in choice["token_ids"] or ()
        ]
        if began is not None and came:
            began.set()
        if leave is not None and leave.is_set() and len(came) < tokens:
            return Kind.LEFT, ""
    return _ended(came, tokens)


def _read_whole(
    reply: httpx.Response, came: list[int], tokens: int
) -> tuple[Kind, str]:
    reply.read()
    if reply.status_code != 200:
        return _failure(reply)
    came += reply.json()["choices"][0]["token_ids"]
    return _ended(came, tokens)


def _ended(came: Sequence[int], tokens: int) -> tuple[Kind, str]:
    return (
        (Kind.ANSWERED, "")
        if len(came) == tokens
        else (Kind.BROKEN, f"{len(came)} of {tokens} tokens")
    )


def _failure(reply: httpx.Response) -> tuple[Kind, str]:
    text = reply.read().decode(errors="replace")
    return (
        Kind.REFUSED if reply.status_code == 500 else Kind.OTHER
    ), f"HTTP {reply.status_code}: {text[:300]}"


def _events(reply: httpx.Response) -> Iterator[Mapping[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            yield json.loads(line[5:])


class Load:
    """Clients that each send one request after another, each with a new prompt; half of the answers
    are streamed. A context manager: leaving it waits for the last answers."""

    def __init__(
        self, name: str, base_url: str, clients: int = 3, interval_s: float = 0.7
    ) -> None:
        self._name = name
        self._base_url = base_url
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._outcomes: list[Outcome] = []
        self._asked = 0
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"load-{number}")
            for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def outcomes(self) -> list[Outcome]:
        """All of those that are over."""
        with self._changed:
            return list(self._outcomes)

    def wait_for(
        self, count: int, what: Kind, since_s: float = 0.0, timeout_s: float = TIMEOUT_S
    ) -> list[Outcome]:
        """Wait until so many requests that were sent since then have ended so; gives them.

        Raises:
            AssertionError: not in time.
        """

        def found() -> list[Outcome]:
            return [
                outcome
                for outcome in self._outcomes
                if outcome.kind is what and outcome.started_s >= since_s
            ]

        with self._changed:
            in_time = self._changed.wait_for(lambda: len(found()) >= count, timeout_s)
            last = Counter(
                outcome.kind.value
                for outcome in self._outcomes
                if outcome.started_s >= since_s
            )
            assert in_time, (
                f"not {count} times {what.value} within {timeout_s:g} s, but {dict(last)}"
            )
            return found()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._changed:
                index, self._asked = self._asked, self._asked + 1
            outcome = ask(
                self._base_url, prompt_of(self._name, index), stream=index % 2 == 1
            )
            with self._changed:
                self._outcomes.append(outcome)
                self._changed.notify_all()
            self._over.wait(self._interval_s)


@dataclass(frozen=True, slots=True)
class Outage:
    """From before an engine was killed until it was ready again."""

    began_s: float
    ended_s: float

    def touches(self, outcome: Outcome) -> bool:
        """Whether a request was under way during some of it."""
        return outcome.started_s <= self.ended_s and outcome.ended_s >= self.began_s


def judge(
    outcomes: Sequence[Outcome],
    outages: Sequence[Outage],
    right: Mapping[Tokens, Tokens],
) -> Counter[str]:
    """Count what became of requests, and let nothing pass that no outage explains.

    Args:
        right: the whole answers, by prompt.

    Raises:
        AssertionError: an answer is wrong, or began wrong before it broke off; or a request hung, or ended badly while
            all engines were there. Names all of them.
    """
    wrong = []
    for outcome in outcomes:
        explained = outcome.kind in (Kind.REFUSED, Kind.BROKEN) and any(
            each.touches(outcome) for each in outages
        )
        if outcome.kind not in (Kind.ANSWERED, Kind.LEFT) and not explained:
            wrong.append(
                f"{outcome.kind.value} at {outcome.started_s:.1f} to {outcome.ended_s:.1f}: {outcome.text}"
            )
        elif outcome.tokens != right[outcome.prompt][: len(outcome.tokens)]:
            wrong.append(
                f"{outcome.kind.value}, wrong tokens {outcome.tokens}, not {right[outcome.prompt]}"
            )
    assert not wrong, (
        f"{len(wrong)} of {len(outcomes)}; outages {outages}\n" + "\n".join(wrong)
    )
    return Counter(outcome.kind.value for outcome in outcomes)
