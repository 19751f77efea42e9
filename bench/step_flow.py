"""One handover a step, beside leases that are held and loads that are in flight: what each step costs its thread."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench.step_clock import Spread, StepClock
from bench.step_engines import Prompts, TimedNode, fly, hand_over, hold
from bench.step_scenes import Scene
from tests.fakes.memory_fabric import MemoryNetwork

_PAUSE_S = 1e-3
_MOST_AT_ONCE = 4
"""Loads under way, beside those that never end, when a step begins."""
_TIMEOUT_S = 60.0
_WARM_UP = 50
_SLACK_BLOCKS = 64
"""Of so many handovers, more than are under way at once."""


@dataclass(frozen=True)
class Half:
    """One of the four halves: of the producer or the consumer, in the scheduler's process or in a worker's."""

    cpu: Spread
    wall: Spread
    singly: Mapping[str, Spread]
    """Processor time of one call, by its name."""

    @classmethod
    def of(cls, clock: StepClock) -> Half:
        return cls(clock.cpu, clock.wall, clock.singly())


@dataclass(frozen=True)
class Seen:
    """Cost of one scene. `always_the_same`: processor time, once in every step, of work that never changes."""

    halves: Mapping[str, Half]
    always_the_same: Spread


def play(scene: Scene, steps: int) -> Seen:
    """Set the scene, and measure `steps` steps of both engines."""
    network, prompts = MemoryNetwork(), Prompts()
    flow_blocks = _SLACK_BLOCKS * max(scene.blocks, 32)
    producer = TimedNode(
        "kv_producer",
        scene.fabric,
        network,
        scene.leases * scene.lease_blocks + flow_blocks,
        scene.leases + 512,
    )
    consumer = TimedNode(
        "kv_consumer",
        scene.fabric,
        network,
        (scene.loads + 2) * scene.load_blocks + flow_blocks,
        1024,
    )
    hold(producer, prompts, scene.leases, scene.lease_blocks)
    hand_over(producer, consumer, prompts, 32)
    if scene.loads:
        stuck = TimedNode(
            "kv_producer", "memory", network, 8 * scene.load_blocks + flow_blocks, 2048
        )
        fly(consumer, stuck, prompts, scene.loads, scene.load_blocks)
    gc.collect()
    gc.freeze()  # as vLLM does when an engine has started
    offers: list[tuple[str, list[int]]] = []
    same = StepClock()
    work = same.timed("always the same", _always_the_same)
    for step in range(steps + _WARM_UP):
        if step == _WARM_UP:
            producer.forget()
            consumer.forget()
            same.forget()
        if scene.blocks:
            _hand_on(producer, consumer, prompts, offers, scene.blocks)
        producer.step()
        consumer.step()
        work()
        same.end_step()
        _let_loads_end(consumer, scene.loads)
    if consumer.loads_running() < scene.loads:
        raise RuntimeError(
            f"{consumer.loads_running()} loads are in flight, {scene.loads} were wanted"
        )
    halves = {
        "producer's scheduler": Half.of(producer.scheduler_clock),
        "producer's worker": Half.of(producer.worker_clock),
        "consumer's scheduler": Half.of(consumer.scheduler_clock),
        "consumer's worker": Half.of(consumer.worker_clock),
    }
    return Seen(halves, same.cpu)


def _let_loads_end(consumer: TimedNode, never_ending: int) -> None:
    """The transfer threads' turn. The step's one load may end later, but loads must not pile up."""
    end_s = time.monotonic() + _TIMEOUT_S
    time.sleep(_PAUSE_S)
    # All threads share an interpreter here, so on a slow machine loads would end less often than steps begin. In the
    # end the producer would have no free block, and the scene would be another one: that of a shortage.
    while consumer.loads_running() > never_ending + _MOST_AT_ONCE:
        time.sleep(_PAUSE_S)
        if time.monotonic() > end_s:
            raise TimeoutError(f"{consumer.loads_running()} loads do not end")


def _always_the_same() -> None:
    """As much as a hook does: a few hundred small objects, looked up, hashed and written down."""
    found = {f"request-{number}": (number, [number] * 4) for number in range(64)}
    ordered = sorted(found.items(), key=lambda item: item[1][0], reverse=True)
    pickle.loads(pickle.dumps(ordered))  # noqa: S301


def _hand_on(
    producer: TimedNode,
    consumer: TimedNode,
    prompts: Prompts,
    offers: list[tuple[str, list[int]]],
    blocks: int,
) -> None:
    """A prompt arrives at the producer; the one before it, which has been answered, at the consumer."""
    name, prompt = prompts.next(blocks)
    producer.engine.add(name, prompt, {"do_remote_decode": True}, max_tokens=1)
    offers.append((name, prompt))
    answered, tokens = offers[0]
    params = producer.engine.answers[answered].params
    if params is not None:
        del (
            offers[0],
            producer.engine.answers[answered],
        )  # or every collection would go through all that there were
        consumer.engine.add(answered, tokens, params, max_tokens=1)
