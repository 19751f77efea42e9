"""The faults that `MemoryNetwork` injects, by their docstrings; the conformance suite tests everything else."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.worker.fabric.errors import PeerLost, TransferFailed
from kvferry.worker.fabric.port import Transfer, TransferState
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.worker.fabric_harness import Memory, random_bytes, region, row, rows

CELLS, CELL = 10, 64
GUARD = 0xA5


class Scene:
    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.source: Memory = random_bytes(1, CELLS * CELL)
        self.target: Memory = np.full(CELLS * CELL, GUARD, dtype=np.uint8)
        self.producer, self.consumer = MemoryFabric("p", self.network), MemoryFabric("c", self.network)
        self.producer.register([region(self.source)])
        self.consumer.register([region(self.target)])
        self.peer = self.consumer.add_peer(self.producer.metadata())
        self.local = self.consumer.prepare_local(rows(row(self.target, 0, CELL, CELL, CELLS)))
        self.remote = self.consumer.prepare_remote(self.peer, rows(row(self.source, 0, CELL, CELL, CELLS)))

    def post(self) -> Transfer:
        everything = np.arange(CELLS, dtype=np.int32)
        return self.consumer.post_read(self.local, everything, self.remote, everything)

    def landed(self) -> int:
        """Number of cells that have been written; fails unless they are the first ones and the others are unchanged."""
        whole = (self.target.reshape(CELLS, CELL) == self.source.reshape(CELLS, CELL)).all(axis=1)
        count = int(whole.sum())
        assert whole[:count].all()
        assert (self.target[count * CELL :] == GUARD).all()
        return count


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_by_default_a_read_completes_when_it_is_posted(scene: Scene) -> None:
    transfer = scene.post()
    assert scene.landed() == CELLS
    assert scene.consumer.poll(transfer) is TransferState.DONE


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


def test_a_frozen_peers_read_moves_nothing_until_it_is_thawed(scene: Scene) -> None:
    scene.network.freeze("p")
    transfer = scene.post()
    for _ in range(5):
        assert scene.consumer.poll(transfer) is TransferState.IN_FLIGHT
    assert scene.landed() == 0
    scene.network.thaw("p")
    assert scene.consumer.poll(transfer) is TransferState.DONE
    assert scene.landed() == CELLS


def test_a_read_delivers_what_the_memory_holds_when_it_lands(scene: Scene) -> None:
    scene.network.freeze("p")
    transfer = scene.post()
    scene.source[:] = 77
    scene.network.thaw("p")
    scene.consumer.poll(transfer)
    assert (scene.target == 77).all()


def test_a_peer_that_dies_halfway_leaves_half_the_bytes_and_peer_lost(scene: Scene) -> None:
    scene.network.polls_to_complete = 2
    transfer = scene.post()
    scene.consumer.poll(transfer)
    scene.network.kill("p")
    with pytest.raises(PeerLost):
        scene.consumer.poll(transfer)
    assert scene.landed() == 5


def test_a_read_that_was_done_before_the_peer_died_stays_done(scene: Scene) -> None:
    transfer = scene.post()
    scene.network.kill("p")
    assert scene.consumer.poll(transfer) is TransferState.DONE


def test_an_unnoticed_death_swallows_messages_and_a_noticed_one_raises(scene: Scene) -> None:
    scene.network.kill("p")
    scene.consumer.notify(scene.peer, b"into the void")
    with pytest.raises(PeerLost):
        scene.post()
    with pytest.raises(PeerLost):
        scene.consumer.notify(scene.peer, b"refused")


def test_a_failing_read_raises_transfer_failed_again_and_again_and_the_next_succeeds(scene: Scene) -> None:
    scene.network.fail_reads("p")
    transfer = scene.post()
    for _ in range(2):
        with pytest.raises(TransferFailed):
            scene.consumer.poll(transfer)
    assert scene.landed() == 5
    assert scene.consumer.poll(scene.post()) is TransferState.DONE
    assert scene.landed() == CELLS


def test_a_read_released_in_flight_lands_when_the_test_says_so(scene: Scene) -> None:
    scene.network.freeze("p")
    scene.consumer.release(scene.post())
    assert scene.network.land_released() == 0
    scene.network.thaw("p")
    assert scene.landed() == 0
    scene.consumer.remove_peer(scene.peer)
    assert scene.network.land_released() == 1
    assert scene.landed() == CELLS
    assert scene.network.land_released() == 0


def test_a_released_read_of_a_dead_peer_never_lands(scene: Scene) -> None:
    scene.network.polls_to_complete = 3
    scene.consumer.release(scene.post())
    scene.network.kill("p")
    assert scene.network.land_released() == 0
    assert scene.landed() == 0


def test_lost_and_doubled_notifications_are_counted_down(scene: Scene) -> None:
    scene.network.deaf["p"] = 1
    scene.network.stutter["p"] = 1
    for message in (b"lost", b"doubled", b"plain"):
        scene.consumer.notify(scene.peer, message)
    assert scene.producer.take_notifications() == [("c", b"doubled"), ("c", b"doubled"), ("c", b"plain")]


def test_a_successor_under_the_same_name_is_another_agent(scene: Scene) -> None:
    scene.network.kill("p")
    successor = MemoryFabric("p", scene.network)
    successor.register([region(scene.source)])
    with pytest.raises(PeerLost):
        scene.post()
    scene.consumer.remove_peer(scene.peer)
    assert scene.consumer.add_peer(successor.metadata()) == scene.peer
