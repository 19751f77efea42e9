"""Requests to engines, and their outcomes.

Every prompt is of its own random tokens, so that none finds its beginning in a cache.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from bench.serve_clock import Answers
from scripts.accuracy.client import Answer, Client, NoAnswer
from scripts.accuracy.prompts import Case

VOCABULARY = range(100, 49_000)
"""Token ids of SmolLM2 that are words."""

ANSWER_TOKENS = 8
NO_LOGPROBS = {"logprobs": None}
"""They cost time, and need a tokenizer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in seconds.

    Attributes:
        prefill_s: until the producer answered; None where there is no producer.
        first_s: from the request to the first token.
        gaps_s: from one token to the next.
        error: empty, or why it is not to be counted.
    """

    prompt_tokens: int
    prefill_s: float | None = None
    first_s: float = float("nan")
    gaps_s: tuple[float, ...] = ()
    total_s: float = 0.0
    error: str = ""

    @property
    def handover_s(self) -> float:
        """From the producer's answer to the first token out of the decoder."""
        return (
            self.first_s - self.prefill_s
            if self.prefill_s is not None
            else float("nan")
        )


Ask = Callable[[Case], Awaitable[Timing]]


def make_cases(
    name: str, lengths: Sequence[int], vocabulary: range = VOCABULARY
) -> list[Case]:
    """One streamed request per length; the same for the same name."""
    chooser = random.Random(name)
    return [
        Case(
            f"{name} {index}",
            tuple(chooser.choice(vocabulary) for _ in range(length)),
            max_tokens=ANSWER_TOKENS,
            stream=True,
        )
        for index, length in enumerate(lengths)
    ]


def spread(lengths: Sequence[int], weights: Sequence[int], count: int) -> list[int]:
    """`count` lengths in these proportions, mixed so that every part of the list has some of each.

    Example: `spread((1, 2), (3, 1), 8)` has six ones and two twos.
    """
    some = [
        length
        for length, weight in zip(lengths, weights, strict=True)
        for _ in range(weight)
    ]
    random.Random(1).shuffle(some)
    return list(itertools.islice(itertools.cycle(some), count))


async def through(
    client: Client,
    url: str,
    timeout_s: float,
    case: Case,
    answers: Answers | None = None,
) -> Timing:
    """One request to a router or a single engine.

    Args:
        answers: knows when the producer behind the router has answered.
    """

    async def ask() -> Timing:
        started_s = time.monotonic()
        answer = await client.ask(url, case)
        ready_s = answers.ready_s(answer.answer_id) if answers is not None else None
        return replace(
            _timing(case, answer),
            prefill_s=ready_s - started_s if ready_s is not None else None,
        )

    return await _bounded(ask(), case, timeout_s)


async def hand_over(
    client: Client, prefill_url: str, decode_url: str, timeout_s: float, case: Case
) -> Timing:
    """One request as the router sends it, but with the moment of the producer's answer."""

    async def ask() -> Timing:
        started_s = time.monotonic()
        params = await client.prefill(prefill_url, case)
        prefill_s = time.monotonic() - started_s
        if not params:
            return Timing(len(case.prompt), error="the producer gave no params")
        timing = _timing(
            case, await client.ask(decode_url, case, kv_transfer_params=params)
        )
        return replace(timing, prefill_s=prefill_s, first_s=prefill_s + timing.first_s)

    return await _bounded(ask(), case, timeout_s)


async def _bounded(asking: Awaitable[Timing], case: Case, timeout_s: float) -> Timing:
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            timing = await asking
    except TimeoutError:
        timing = Timing(len(case.prompt), error=f"no answer within {timeout_s:g} s")
    except NoAnswer as failed:
        timing = Timing(len(case.prompt), error=str(failed)[:300])
    return replace(timing, total_s=time.monotonic() - started_s)


def _timing(case: Case, answer: Answer) -> Timing:
    asked = len(case.prompt)
    if answer.error or answer.first_token_s is None:
        return Timing(asked, error=(answer.error or "no token")[:300])
    if len(answer.tokens) != case.max_tokens:
        return Timing(asked, error=f"{len(answer.tokens)} of {case.max_tokens} tokens")
    return Timing(asked, first_s=answer.first_token_s, gaps_s=answer.gaps_s)


async def run_all(ask: Ask, cases: Sequence[Case], at_once: int) -> list[Timing]:
    """All of them, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(case: Case) -> Timing:
        async with gate:
            return await ask(case)

    return list(await asyncio.gather(*(one(case) for case in cases)))
