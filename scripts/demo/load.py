"""Requests of the demonstration: prompts of all lengths, and one that a slow router hands over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from scripts.accuracy.client import Answer, Client
from scripts.accuracy.prompts import Case

SLOW = "demo-slow"
"""The id of the slow request, which both engines' ids contain."""
SLOW_S = 1.5
_LENGTHS = (48, 130, 300, 520, 760)
_TOKENS = range(100, 40_000)


def prompts(count: int, seed: str) -> list[Case]:
    """So many prompts of random tokens, the same for the same seed."""
    chooser = random.Random(seed)
    return [
        Case(f"{seed}-{number}", tuple(chooser.choices(_TOKENS, k=_LENGTHS[number % len(_LENGTHS)])), max_tokens=8)
        for number in range(count)
    ]


def named(case: Case) -> dict[str, object]:
    """The field of a request that engines put into its id, unless a router sends them another one."""
    return {"request_id": case.name}


async def drive(client: Client, router: str, cases: Sequence[Case], at_once: int) -> list[Answer]:
    """All of them through the router, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(case: Case) -> Answer:
        async with gate:
            return await client.ask(router, case, **named(case))

    return list(await asyncio.gather(*(one(case) for case in cases)))


async def hand_over_slowly(client: Client, prefill: str, decode: str) -> Answer:
    """One request as a router sends it that dozes between the two engines."""
    case = replace(prompts(1, SLOW)[0], name=SLOW)
    params = await client.prefill(prefill, case, **named(case))
    await asyncio.sleep(SLOW_S)
    return await client.ask(decode, case, kv_transfer_params=params, **named(case))
