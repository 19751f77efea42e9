"""The course of reads that `MemoryNetwork` delays or fails; its other faults are what tests of engines see of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.worker.fabric.errors import PeerLost, TransferFailed
from kvferry.worker.fabric.port import Transfer, TransferState
from tests.worker.fabric.harness import MemoryHarness
from tests.worker.fabric.scenes import GUARD, Pair

CELLS, CELL = 10, 64


class Scene(Pair):
    def __init__(self) -> None:
        harness = MemoryHarness()
        super().__init__(harness, size=CELLS * CELL)
        self.network = harness.network

    def post(self) -> Transfer:
        everything = np.arange(CELLS, dtype=np.int32)
        return self.consumer.post_read(self.local(count=CELLS), everything, self.remote(count=CELLS), everything)

    def landed(self) -> int:
        """Number of cells that have been written; fails unless they are the first ones and the others are unchanged."""
        whole = (self.target.reshape(CELLS, CELL) == self.source.reshape(CELLS, CELL)).all(axis=1)
        count = int(whole.sum())
        assert whole[:count].all()
        assert (self.target[count * CELL :] == GUARD).all()
        return count


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.consumer.close()
    made.producer.close()


@pytest.mark.parametrize(("polls", "steps"), [(1, [10]), (2, [5, 10]), (3, [4, 7, 10]), (10, list(range(1, 11)))])
def test_a_delayed_read_lands_in_equal_steps_and_is_done_at_the_last(
    scene: Scene, polls: int, steps: list[int]
) -> None:
    scene.network.polls_to_complete = polls
    transfer = scene.post()
    assert scene.landed() == 0
    for step in steps:
        state = scene.consumer.poll(transfer)
        assert scene.landed() == step
        assert (state is TransferState.DONE) == (step == CELLS)


def test_a_peer_that_dies_halfway_leaves_half_the_bytes_and_peer_lost(scene: Scene) -> None:
    scene.network.polls_to_complete = 2
    transfer = scene.post()
    scene.consumer.poll(transfer)
    scene.network.kill("producer")
    with pytest.raises(PeerLost):
        scene.consumer.poll(transfer)
    assert scene.landed() == 5


def test_a_failing_read_leaves_half_the_bytes_and_raises_again_and_again(scene: Scene) -> None:
    scene.network.fail_reads("producer")
    transfer = scene.post()
    for _ in range(2):
        with pytest.raises(TransferFailed):
            scene.consumer.poll(transfer)
    assert scene.landed() == 5
