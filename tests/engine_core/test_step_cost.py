"""The cost of a step on the engine's thread does not grow with held leases or loads in flight. It is counted in
instructions; `python -m bench.step` measures times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bench.step_engines import (
    SCHEDULER_CALLS,
    WORKER_CALLS,
    Prompts,
    TimedNode,
    fly,
    hand_over,
    hold,
)

from kvferry.connector.scheduler_side.requests import MAX_LOOKED_AT
from kvferry.protocol.queries import Answer, PromptProgress
from kvferry.scheduler.consumer import pending_queries
from tests.engine_core.slow_router import REMOTE_DECODE
from tests.engine_core.step_count import StepCount
from tests.engine_core.test_both_legs import leg_params
from tests.fakes.memory_fabric import MemoryNetwork

pytestmark = pytest.mark.slow

STEPS = 15
LEASES, LOADS = 2000, 200
LOAD_BLOCKS = 100
QUESTIONS = 1000
MOST_GROWTH = 1.1
SLACK = 100
"""Instructions that a step may take more: a note in a table, a report that came a step later."""

_BLOCKS = 1 << 16

Counts = tuple[float, float]
"""Instructions of a step on the scheduler's thread and on the worker's."""


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def nodes(network: MemoryNetwork) -> Iterator[list[TimedNode]]:
    made: list[TimedNode] = []
    yield made
    network.thaw_all()
    for node in made:
        node.close()


class Counted:
    """One engine's two threads."""

    def __init__(self, node: TimedNode) -> None:
        self._node = node
        self._scheduler, self._worker = StepCount(), StepCount()
        self._scheduler.wrap(node.engine.connector, SCHEDULER_CALLS)
        self._worker.wrap(
            node.workers[0], set(WORKER_CALLS) - {"get_transfer_results"}
        )  # that one may wait

    def of(self, step: Callable[[], object]) -> Counts:
        """Medians over a few steps."""
        step()
        return self._scheduler.median(step, STEPS), self._worker.median(step, STEPS)

    def idle(self) -> Counts:
        """Of steps in which nothing happens."""
        return self.of(self._node.step)

    def prefills(self, prompts: Prompts) -> Counts:
        """Of steps in which a prompt arrives and is answered."""

        def step() -> None:
            name, prompt = prompts.next(4)
            self._node.engine.add(
                name, prompt, {"do_remote_decode": True}, max_tokens=1
            )
            self._node.step()

        return self.of(step)


def assert_flat(before: Counts, after: Counts) -> None:
    for half, small, large in zip(("scheduler", "worker"), before, after, strict=True):
        assert large <= MOST_GROWTH * small + SLACK, (
            f"{half}: {small:.0f} instructions have become {large:.0f}"
        )


def test_a_step_does_the_same_with_thousands_of_leases(
    nodes: list[TimedNode], network: MemoryNetwork
) -> None:
    producer = TimedNode("kv_producer", "memory", network, _BLOCKS, LEASES + 256)
    nodes.append(producer)
    prompts, counted = Prompts(), Counted(producer)
    hold(producer, prompts, 1, blocks=4)
    idle, busy = counted.idle(), counted.prefills(prompts)
    assert busy[0] > idle[0] > 0
    hold(producer, prompts, LEASES, blocks=4)
    assert_flat(idle, counted.idle())
    assert_flat(busy, counted.prefills(prompts))


def test_a_step_does_the_same_with_hundreds_of_loads_and_thousands_of_blocks_in_flight(
    nodes: list[TimedNode], network: MemoryNetwork
) -> None:
    producer = TimedNode("kv_producer", "memory", network, _BLOCKS, 1024)
    consumer = TimedNode("kv_consumer", "memory", network, _BLOCKS, 1024)
    nodes += [producer, consumer]
    prompts, counted = Prompts(), Counted(consumer)
    hand_over(producer, consumer, prompts, LOAD_BLOCKS)
    before = counted.idle()
    fly(consumer, producer, prompts, LOADS, LOAD_BLOCKS)
    assert_flat(before, counted.idle())


def test_a_step_does_the_same_with_thousands_of_open_questions_and_when_all_of_them_are_answered(
    nodes: list[TimedNode], network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,000 open ones took 18 ms of every step; one repetition of all answers as much again."""
    # Most of them have no answer. On a busy machine the test takes longer than one may be open without, and the
    # measured steps would give them up, and compute their prompts.
    monkeypatch.setattr(pending_queries, "UNKNOWN_S", 3600.0)
    producer = TimedNode("kv_producer", "memory", network, _BLOCKS, 256)
    consumer = TimedNode("kv_consumer", "memory", network, _BLOCKS, 256)
    nodes += [producer, consumer]
    side = consumer.engine.connector.scheduler_side
    side.steps.may_wait = False
    asking = side.queries
    queries = asking.queries

    def open_more(count: int) -> None:
        while len(queries) < count:
            name = f"asks-{len(queries)}"
            consumer.engine.add(
                name, [5] * 20, leg_params(producer, name), max_tokens=1
            )

    def answer_and_step() -> None:
        for number in queries.snapshot().open:
            asking.on_answer(
                ("127.0.0.1", producer.port),
                Answer(number=number, progress=PromptProgress.QUEUED),
            )
        consumer.step()

    counted = Counted(consumer)
    open_more(2 * MAX_LOOKED_AT)
    idle = counted.idle()
    open_more(QUESTIONS)
    assert_flat(idle, counted.idle())
    busy = counted.of(answer_and_step)
    open_more(4 * QUESTIONS)
    assert_flat(busy, counted.of(answer_and_step))


@pytest.mark.parametrize("states", [0, 2], ids=["attention", "with recurrent groups"])
def test_a_step_does_the_same_with_thousands_of_requests_that_wait_for_a_pool_full_of_leases(
    make_slow: Any, states: int
) -> None:
    engine = {
        "num_blocks": 641,
        "max_num_seqs": 64,
        "max_step_tokens": 4096,
        "lookahead": 4,
        "states": states,
        "checks_steps": False,
    }
    slow = make_slow(
        engine=engine,
        kv_lease_duration=3600.0,
        lease_slots=256,
        max_leased_fraction=1.0,
    )
    while slow.engine.free_blocks > 16:
        slow.prefill(f"held{len(slow.engine.answers)}")
        slow.step(2)
    scheduler = StepCount()
    scheduler.wrap(slow.engine.connector, SCHEDULER_CALLS)

    def with_waiting(count: int) -> float:
        while slow.engine.scheduler.get_num_unfinished_requests() < count:
            slow.engine.add(
                f"waits{len(slow.engine.answers)}",
                [5] * 400,
                REMOTE_DECODE,
                max_tokens=1,
            )
        return scheduler.median(
            slow.step, STEPS + 1
        )  # an even number: leases are ranked in every second step

    few = with_waiting(16)
    for count in (1000, 4000):
        many = with_waiting(count)
        assert many <= MOST_GROWTH * few + SLACK, (
            f"{count} wait: {few:.0f} instructions have become {many:.0f}"
        )
    assert slow.engine.counted("leases_released") == 0, (
        "the pool is full of leases that must not end yet"
    )
