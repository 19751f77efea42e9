"""The parts of a run that ask: each takes running servers and returns what was seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import httpx

from scripts.accuracy.checks import Seen
from scripts.accuracy.client import Answer, Client
from scripts.accuracy.engines import Engine
from scripts.accuracy.metrics import IterationLog, Scrape, together
from scripts.accuracy.prompts import Case, CaseSet, running_text

_SETTLE_S = 10.0
_UNFINISHED = ("vllm:num_requests_running", "vllm:num_requests_waiting")
T = TypeVar("T")


async def _until(
    look: Callable[[], Awaitable[T]],
    enough: Callable[[T], bool],
    timeout_s: float = _SETTLE_S,
) -> T:
    """Look until it is enough, or the time is up; gives what was seen last."""
    deadline_s = time.monotonic() + timeout_s
    while not enough(found := await look()) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    return found


class Decoders:
    """The decode engines' counters, all together.

    `seen`: by the name under which `counted` was asked.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._logs = [IterationLog(engine.log_path) for engine in engines]
        self.seen: dict[str, Seen] = {}

    async def scrape(self) -> Scrape:
        """Counters now."""
        return together(
            await asyncio.gather(
                *(asyncio.to_thread(engine.metrics) for engine in self._engines)
            )
        )

    async def idle(self) -> Scrape:
        """Counters once no request runs or waits."""
        return await _until(
            self.scrape, lambda now: not sum(map(now.total, _UNFINISHED))
        )

    async def counted(self, name: str, asking: Awaitable[list[Answer]]) -> list[Answer]:
        """Ask, and note what the counters say of it. They know of an answer a moment after it has come."""
        before = await self.scrape()
        answers = await asking
        good = sum(not answer.error for answer in answers)
        after = await _until(
            self.scrape,
            lambda now: (now - before).total("vllm:request_success_total") >= good,
        )
        difference = after - before
        self.seen[name] = Seen(
            prompts=tuple(answer.prompt_tokens for answer in answers),
            local_tokens=round(
                difference.total(
                    "vllm:prompt_tokens_by_source_total", source="local_cache_hit"
                )
            ),
            nixl_bytes=round(difference.total("vllm:nixl_bytes_transferred_sum")),
            planned_bytes=round(difference.total("vllm:kvferry_planned_bytes_total")),
        )
        return answers

    async def computed(self, at_least: int) -> tuple[int, int]:
        """Requests and prompt tokens computed so far by the logs, once they have so many requests."""

        async def so_far() -> tuple[int, int]:
            found = [log.computed() for log in self._logs]
            return sum(requests for requests, _ in found), sum(
                tokens for _, tokens in found
            )

        return await _until(so_far, lambda now: now[0] >= at_least)


def anything_staged(decoders: Sequence[Engine]) -> bool:
    """Whether any decoder's plan, as it is logged, has reads that go through the staging pool."""
    lines = (
        line
        for engine in decoders
        for line in engine.log_path.read_text(errors="replace").splitlines()
    )
    return any(" plan producer=" in line and "staged" in line for line in lines)


def tokenize(engine: Engine, sentences: int) -> list[int]:
    """The running text as the engine's own token ids."""
    tokens: list[int] = []
    pieces = running_text(sentences).split(". ")
    with httpx.Client(timeout=60, trust_env=False) as client:
        for start in range(0, len(pieces), 100):
            text = ". ".join(pieces[start : start + 100]) + ". "
            body = {
                "model": engine.spec.served_name,
                "prompt": text,
                "add_special_tokens": False,
            }
            answer = client.post(engine.base_url + "/tokenize", json=body)
            answer.raise_for_status()
            tokens += answer.json()["tokens"]
    return tokens


async def warm_up(client: Client, urls: Sequence[str], cases: CaseSet) -> None:
    """The first request of an engine is slow, and the first between two engines shakes hands."""
    await asyncio.gather(
        *(client.ask(url, cases.warm[index % 2]) for index, url in enumerate(urls))
    )


async def leave_early(client: Client, url: str, cases: Sequence[Case]) -> list[int]:
    """Break off every stream at another point, all at once. Returns how many tokens each had brought."""
    points = [(3, 60.0), (None, 0.05), (1, 60.0), (None, 0.6)]
    chosen = [points[index % len(points)] for index in range(len(cases))]
    leaving = (
        client.leave_early(url, case, tokens, within_s)
        for case, (tokens, within_s) in zip(cases, chosen, strict=True)
    )
    return list(await asyncio.gather(*leaving))


async def leases_over(
    engines: Sequence[Engine], timeout_s: float
) -> tuple[int, Mapping[str, float]]:
    """Wait until the producers' leases are all over.

    Returns:
        Leases still open when the time is up, and how those that are over ended.
    """

    async def now() -> tuple[int, Mapping[str, float]]:
        found = together(
            await asyncio.gather(
                *(asyncio.to_thread(engine.metrics) for engine in engines)
            )
        )
        ways = found.by_label("vllm:kvferry_leases_released_total", "how")
        return round(
            found.total("vllm:kvferry_leases_opened_total") - sum(ways.values())
        ), ways

    return await _until(now, lambda seen: seen[0] <= 0, timeout_s)
