"""The measurements: setups take turns, and only the one whose turn it is runs.

vLLM's processes poll their queues for about a second after the last message, and so would take the processors from the
next setup. So the servers of all others are stopped (SIGSTOP). An uncounted prompt begins each turn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import psutil

from bench.serve_figures import SATURATING, Batch, SetupFigures
from bench.serve_load import Ask, make_cases, run_all, spread, through
from bench.serve_setups import KVFERRY, OFF, Running
from scripts.accuracy.client import Client
from scripts.accuracy.engines import Engine

LENGTHS = (128, 256, 512, 1024)
WEIGHTS = (5, 3, 3, 2)
"""Many short prompts, few long ones: a prompt of 1,024 tokens takes as long as eight of 128."""

_SETTLE_S = 3.0
_WAKE = (128,)
_MOST_FAILED = 3


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each, for every setup.

    Attributes:
        turns: of each part, by how many prompts are under way at once.
        prompts: of each turn, in the same way.
        watch_s: how long processors are watched.
        timeout_s: of a request.
    """

    turns: Mapping[int, int]
    prompts: Mapping[int, int]
    watch_s: float
    timeout_s: float


@dataclass(slots=True)
class Lane:
    """A setup that takes turns with the others. It is left out from its third turn on in which nothing was answered."""

    figures: SetupFigures
    running: Running
    client: Client
    timeout_s: float
    turns: int = 0
    failed: int = 0

    async def turn(
        self, name: str, lengths: Sequence[int], at_once: int, batch: Batch
    ) -> None:
        """Ask for prompts of these lengths while no other setup runs."""
        running, self.turns = self.running, self.turns + 1
        ask: Ask = partial(
            through, self.client, running.url, self.timeout_s, answers=running.answers
        )
        with running.awake():
            await run_all(ask, make_cases(f"wake {self.turns}", _WAKE), 1)
            started_s = time.monotonic()
            timings = await run_all(ask, make_cases(name, lengths), at_once)
        batch.add(timings, time.monotonic() - started_s)
        self.failed = self.failed + 1 if all(one.error for one in timings) else 0
        if self.failed == _MOST_FAILED:
            self.figures.error = f"{name}: {timings[0].error}"


async def measure(lanes: Sequence[Lane], amounts: Amounts) -> None:
    """Fill in the figures of all setups, part by part."""
    for lane in lanes:
        await lane.turn("warm", LENGTHS, 1, Batch())
    for at_once, turns in amounts.turns.items():
        print(f"{at_once} at once", flush=True)
        prompts = amounts.prompts[at_once]
        lengths = spread(LENGTHS, WEIGHTS, turns * prompts)
        taking = [
            lane
            for lane in lanes
            if at_once < SATURATING or lane.figures.setup in (KVFERRY, OFF)
        ]
        for number in range(turns):
            first = number % max(1, len(taking))  # another one each time
            for lane in (*taking[first:], *taking[:first]):
                if not lane.figures.error:
                    name, own = (
                        f"{at_once} at once {number}",
                        lengths[number * prompts :][:prompts],
                    )
                    await lane.turn(name, own, at_once, lane.figures.batches[at_once])
    print("idle", flush=True)
    for lane in lanes:
        if not lane.figures.error:
            await _watch(lane, amounts.watch_s)


async def _watch(lane: Lane, seconds: float) -> None:
    """The processors that idle engines take, and a producer with a lease that no consumer reads."""
    running, figures = lane.running, lane.figures
    with running.awake():
        time.sleep(_SETTLE_S)
        figures.idle = cores_used(running.engines, seconds)
        if running.producer is not running.consumer:
            await lane.client.prefill(
                running.producer.base_url, make_cases("lease", (512,))[0]
            )
            time.sleep(_SETTLE_S)
            (figures.leased,) = cores_used([running.producer], seconds)


def cores_used(engines: Sequence[Engine], seconds: float) -> list[float]:
    """Watch engines for a while: processor seconds per second of all processes of each."""
    before = [_processor_s(engine) for engine in engines]
    time.sleep(seconds)
    return [
        (_processor_s(engine) - spent_s) / seconds
        for engine, spent_s in zip(engines, before, strict=True)
    ]


def _processor_s(engine: Engine) -> float:
    first = psutil.Process(engine.pid)
    return float(
        sum(
            sum(one.cpu_times()[:2]) for one in (first, *first.children(recursive=True))
        )
    )
