"""What a step costs the engine's thread does not grow with what is held or in flight. Instructions are counted here;
`python -m bench.step` measures times."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from bench.step_engines import SCHEDULER_CALLS, WORKER_CALLS, Prompts, TimedNode, fly, hand_over, hold

from tests.engine_core.step_count import StepCount
from tests.fakes.memory_fabric import MemoryNetwork

STEPS = 15
LEASES, LOADS = 2000, 200
LOAD_BLOCKS = 100
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
        self._worker.wrap(node.workers[0], set(WORKER_CALLS) - {"get_transfer_results"})  # that one may wait

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
            self._node.engine.add(name, prompt, {"do_remote_decode": True}, max_tokens=1)
            self._node.step()

        return self.of(step)


def assert_flat(before: Counts, after: Counts) -> None:
    for half, small, large in zip(("scheduler", "worker"), before, after, strict=True):
        assert large <= MOST_GROWTH * small + SLACK, f"{half}: {small:.0f} instructions have become {large:.0f}"


def test_a_step_does_the_same_with_thousands_of_leases(nodes: list[TimedNode], network: MemoryNetwork) -> None:
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
