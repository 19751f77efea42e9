"""Measurements of a running setup, in their order."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from bench.serve_cpu import cores_used
from bench.serve_figures import Batch, Contact, SetupFigures
from bench.serve_load import (
    NO_LOGPROBS,
    VOCABULARY,
    Tick,
    Timing,
    ask_again,
    hand_over,
    make_cases,
    run_all,
    spread,
    through,
)
from bench.serve_setups import Running
from scripts.accuracy.client import Client
from scripts.accuracy.prompts import Case

LENGTHS = (128, 256, 512, 1024, 1900)
WEIGHTS = (6, 5, 5, 3, 1)
"""Many short prompts, few long ones: a prompt of 1,900 tokens takes as long as seventeen of 128."""

CROWD = 8
BLOCK = 128
"""Tokens of a block of vLLM's CPU engine."""
_WARM_CONTACTS = 5
_CONTACT_TOKENS = 256

# vLLM's processes poll their queues for about a second after the last message; that is not idle.
_SETTLE_S = 3.0

Ask = Callable[[Case], Awaitable[Timing]]


class ContactFailed(RuntimeError):
    """Two engines could not connect."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each.

    Attributes:
        routed, direct: requests one at a time, through the router, and driven as the router does.
        crowd: requests of each kind, eight at once.
        watch_s: how long processors are watched.
        timeout_s: of a request.
        budget_s: after which a part begins no other request.
    """

    routed: int
    direct: int
    crowd: int
    watch_s: float = 10.0
    lengths: tuple[int, ...] = LENGTHS
    weights: tuple[int, ...] = WEIGHTS
    timeout_s: float = 60.0
    budget_s: float = float("inf")

    @property
    def total(self) -> int:
        """Requests of a setup, roughly: for the progress shown."""
        return self.routed + self.routed // 4 + self.direct + 3 * self.crowd + 4 * len(self.lengths)


async def measure(
    running: Running, amounts: Amounts, figures: SetupFigures, tell: Callable[[str], None], tick: Tick
) -> None:
    """Fill in the figures of a setup, part by part, so that an error loses only what comes after it."""
    has_pair = running.producer is not running.consumer
    async with Client("model", amounts.timeout_s, always=NO_LOGPROBS) as client:
        route: Ask = partial(through, client, running.url, amounts.timeout_s)
        pair = (running.producer.base_url, running.consumer.base_url)
        deliver: Ask = partial(hand_over, client, *pair, amounts.timeout_s)
        tell("warm-up")
        for engine in running.engines:
            alone: Ask = partial(through, client, engine.base_url, amounts.timeout_s)
            await run_all(alone, make_cases(f"warm {engine.spec.name}", amounts.lengths), 1, tick)
        tell("idle")
        time.sleep(_SETTLE_S)
        figures.idle = cores_used(running.engines, amounts.watch_s)
        if has_pair:
            tell("first contact")
            try:
                figures.contact = await make_contact(deliver)
            except ContactFailed as failed:
                figures.notes.append(str(failed))
            await run_all(deliver, make_cases("warm pair", amounts.lengths), 1, tick, amounts.budget_s)
            tell("handovers")
            await _fill(figures.direct, deliver, "direct", amounts.direct, 1, amounts, tick)
        tell("first tokens")
        await _fill(figures.routed, route, "routed", amounts.routed, 1, amounts, tick)
        if has_pair:
            tell(f"handovers, {CROWD} at once")
            await _fill(figures.direct_crowd, deliver, "direct crowd", amounts.crowd, CROWD, amounts, tick)
        tell(f"first tokens, {CROWD} at once")
        await _fill(figures.routed_crowd, route, "routed crowd", amounts.crowd, CROWD, amounts, tick)
        if not has_pair:
            tell("prompts in its own cache")
            repeat: Ask = partial(ask_again, client, running.url, amounts.timeout_s)
            again = replace(amounts, lengths=tuple(length - length % BLOCK + 1 for length in amounts.lengths))
            await _fill(figures.cached, repeat, "cached", amounts.routed // 4, 1, again, tick)
            await _fill(figures.cached_crowd, repeat, "cached crowd", amounts.crowd, CROWD, again, tick)
        if has_pair:
            tell("one lease held")
            await client.prefill(running.producer.base_url, make_cases("lease", (512,))[0])
            time.sleep(_SETTLE_S)
            figures.leased = cores_used([running.producer], amounts.watch_s)[running.producer.spec.name]


async def make_contact(deliver: Ask, vocabulary: range = VOCABULARY, name: str = "contact") -> Contact:
    """The first handover between two engines, and some more.

    Args:
        name: of the prompts; another for every consumer of one producer, which would have them in its cache.

    Raises:
        ContactFailed: the first one failed.
    """
    cases = make_cases(name, [_CONTACT_TOKENS] * (1 + _WARM_CONTACTS), vocabulary)
    first, *others = [await deliver(case) for case in cases]
    if first.error:
        raise ContactFailed(f"the first handover failed: {first.error}")
    return Contact(first.handover_s, tuple(one.handover_s for one in others if not one.error))


async def _fill(batch: Batch, ask: Ask, name: str, count: int, at_once: int, amounts: Amounts, tick: Tick) -> None:
    cases = make_cases(name, spread(amounts.lengths, amounts.weights, count))
    batch.at_once, batch.asked = at_once, len(cases)
    started_s = time.monotonic()
    batch.timings += await run_all(ask, cases, at_once, tick, amounts.budget_s)
    batch.seconds = time.monotonic() - started_s
