"""Measurements of a running setup, in their order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import psutil

from bench.serve_figures import Batch, Cores, SetupFigures
from bench.serve_load import (
    NO_LOGPROBS,
    Ask,
    ask_again,
    hand_over,
    make_cases,
    run_all,
    spread,
    through,
)
from bench.serve_setups import Running
from scripts.accuracy.client import Client
from scripts.accuracy.engines import Engine

LENGTHS = (128, 256, 512, 1024, 1900)
WEIGHTS = (6, 5, 5, 3, 1)
"""Many short prompts, few long ones: a prompt of 1,900 tokens takes as long as seventeen of 128."""

CROWD = 8
BLOCK = 128
"""Tokens of a block of vLLM's CPU engine."""

# vLLM's processes poll their queues for about a second after the last message; that is not idle.
_SETTLE_S = 3.0


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


async def measure(running: Running, amounts: Amounts, figures: SetupFigures) -> None:
    """Fill in the figures of a setup, part by part, so that an error loses only what comes after it."""
    has_pair = running.producer is not running.consumer
    async with Client("model", amounts.timeout_s, always=NO_LOGPROBS) as client:
        route: Ask = partial(through, client, running.url, amounts.timeout_s)
        pair = (running.producer.base_url, running.consumer.base_url)
        deliver: Ask = partial(hand_over, client, *pair, amounts.timeout_s)
        _say(figures, "warm-up")
        for engine in running.engines:
            alone: Ask = partial(through, client, engine.base_url, amounts.timeout_s)
            await run_all(alone, make_cases(f"warm {engine.spec.name}", amounts.lengths), 1)
        _say(figures, "idle")
        time.sleep(_SETTLE_S)
        figures.idle = cores_used(running.engines, amounts.watch_s)
        if has_pair:
            await run_all(deliver, make_cases("warm pair", amounts.lengths), 1, amounts.budget_s)
            _say(figures, "handovers")
            await _fill(figures.direct, deliver, "direct", amounts.direct, 1, amounts)
        _say(figures, "first tokens")
        await _fill(figures.routed, route, "routed", amounts.routed, 1, amounts)
        if has_pair:
            _say(figures, f"handovers, {CROWD} at once")
            await _fill(figures.direct_crowd, deliver, "direct crowd", amounts.crowd, CROWD, amounts)
        _say(figures, f"first tokens, {CROWD} at once")
        await _fill(figures.routed_crowd, route, "routed crowd", amounts.crowd, CROWD, amounts)
        if not has_pair:
            _say(figures, "prompts in its own cache")
            repeat: Ask = partial(ask_again, client, running.url, amounts.timeout_s)
            again = replace(amounts, lengths=tuple(length - length % BLOCK + 1 for length in amounts.lengths))
            await _fill(figures.cached, repeat, "cached", amounts.routed // 4, 1, again)
            await _fill(figures.cached_crowd, repeat, "cached crowd", amounts.crowd, CROWD, again)
        if has_pair:
            _say(figures, "one lease held")
            await client.prefill(running.producer.base_url, make_cases("lease", (512,))[0])
            time.sleep(_SETTLE_S)
            figures.leased = cores_used([running.producer], amounts.watch_s)[running.producer.spec.name]


async def _fill(batch: Batch, ask: Ask, name: str, count: int, at_once: int, amounts: Amounts) -> None:
    cases = make_cases(name, spread(amounts.lengths, amounts.weights, count))
    batch.at_once, batch.asked = at_once, len(cases)
    started_s = time.monotonic()
    batch.timings += await run_all(ask, cases, at_once, amounts.budget_s)
    batch.seconds = time.monotonic() - started_s


def _say(figures: SetupFigures, part: str) -> None:
    print(f"{figures.setup.title}: {part}", flush=True)


def cores_used(engines: Iterable[Engine], seconds: float) -> dict[str, Cores]:
    """Watch the processes of some engines for a while; by the engines' names."""
    found = {engine.spec.name: _processes(engine) for engine in engines}
    before, began_s = _times(found), time.monotonic()
    time.sleep(seconds)
    after, took_s = _times(found), time.monotonic() - began_s
    used: dict[str, Cores] = {}
    for name, times in after.items():
        by_process = {each: (spent_s - before[name][each]) / took_s for each, spent_s in times.items()}
        used[name] = {**by_process, "all": sum(by_process.values())}
    return used


def _processes(engine: Engine) -> list[psutil.Process]:
    first = psutil.Process(engine.pid)
    return [first, *first.children(recursive=True)]


def _times(found: Mapping[str, list[psutil.Process]]) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, float]] = {}
    for name, processes in found.items():
        times[name] = {}
        for process in processes:
            spent = process.cpu_times()
            kind = _kind(process)
            times[name][kind] = times[name].get(kind, 0.0) + spent.user + spent.system
    return times


def _kind(process: psutil.Process) -> str:
    """Kind of a vLLM process: the server, the engine's core, a worker."""
    title = " ".join(process.cmdline())
    for word, kind in (("EngineCore", "engine core"), ("Worker", "worker"), ("api_server", "server")):
        if word in title:
            return kind
    return "other"
