"""The end of reads: which of the fabric's answers are final, and how long the others keep memory out of use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.worker.fabric.errors import (
    FabricClosed,
    InvalidFabricRequest,
    PeerLost,
    TransferFailed,
)
from kvferry.worker.fabric.port import Transfer, TransferState
from kvferry.worker.fabric.reads import GIL_RELEASED_FROM_S, FabricReader, Reads
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.fault_fabric import FaultFabric
from tests.worker.fabric.harness import indices, random_bytes, region, row, rows

GRACE_S = 30.0
SIZE = 256


class TimedReads:
    """A consumer that reads 64 bytes from a producer, and a clock that the test moves."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.source, self.target = random_bytes(1, SIZE), np.zeros(SIZE, np.uint8)
        producer = MemoryFabric("producer", self.network)
        producer.register([region(self.source)])
        self.fabric = FaultFabric(MemoryFabric("consumer", self.network))
        self.fabric.register([region(self.target)])
        self.peer = self.fabric.add_peer(producer.metadata())
        self.local = self.fabric.prepare_local(rows(row(self.target, 0, 64, 64, 4)))
        self.remote = self.fabric.prepare_remote(
            self.peer, rows(row(self.source, 0, 64, 64, 4))
        )
        self.now_s = 1000.0
        self.reader = FabricReader(self.fabric, GRACE_S, lambda: self.now_s)
        self.reads = Reads(self.reader)

    def post(self, reads: Reads | None = None) -> None:
        (reads or self.reads).post(
            self.local, indices(0, 1, 2, 3), self.remote, indices(0, 1, 2, 3)
        )

    def is_safe_after(self, wait_s: float) -> bool:
        self.now_s += wait_s
        return self.reads.settle()


@pytest.fixture
def scene() -> TimedReads:
    return TimedReads()


def test_a_read_that_is_done_is_over_and_one_that_is_in_flight_is_not_however_long_it_takes(
    scene: TimedReads,
) -> None:
    scene.network.freeze("producer")
    scene.post()
    assert not scene.reads.settle()
    assert not scene.is_safe_after(100 * GRACE_S)
    scene.network.thaw("producer")
    assert scene.reads.settle()
    assert scene.fabric.transfers() == 0
    assert scene.reader.graces_over == 0


def test_a_failed_read_keeps_its_memory_for_the_grace_and_is_not_released_before(
    scene: TimedReads,
) -> None:
    scene.network.fail_reads("producer")
    scene.post()
    (transfer,) = scene.reads
    with pytest.raises(TransferFailed):
        scene.fabric.poll(transfer)
    assert not scene.reads.settle()
    assert not scene.is_safe_after(GRACE_S - 0.01)
    assert scene.fabric.transfers() == 1
    assert scene.is_safe_after(0.01)
    assert scene.fabric.transfers() == 0
    assert scene.reader.graces_over == 1


def test_the_grace_of_a_failed_read_ends_with_its_peer(scene: TimedReads) -> None:
    scene.network.fail_reads("producer")
    scene.post()
    while scene.fabric.calls["poll"] < 3:
        assert not scene.reads.settle()
    scene.network.kill("producer")
    assert not scene.reads.settle(), "the death is not noticed yet"
    with pytest.raises(PeerLost):
        scene.post()
    assert scene.reads.settle()
    assert scene.reader.graces_over == 0


@pytest.mark.parametrize(
    ("error", "grace_s"),
    [
        (lambda: InvalidFabricRequest("test", "nothing was posted"), 0.0),
        (lambda: PeerLost("test", "nothing is left to write"), 0.0),
        (lambda: FabricClosed("test", "nothing was posted"), 0.0),
        (lambda: TransferFailed("test", "some of it was posted"), GRACE_S),
        (lambda: RuntimeError("it is unknown what was posted"), GRACE_S),
    ],
    ids=["invalid", "lost", "closed", "failed", "a bug"],
)
def test_a_post_that_raises_keeps_its_memory_unless_nothing_was_posted(
    scene: TimedReads, error: Callable[[], Exception], grace_s: float
) -> None:
    scene.fabric.fail("post_read", error)
    with pytest.raises(type(error())):
        scene.post()
    assert len(scene.reads) == 0
    if grace_s:
        assert not scene.is_safe_after(grace_s - 0.01)
    assert scene.is_safe_after(0.01)
    assert scene.reader.graces_over == (grace_s > 0)


def test_a_read_whose_state_is_unknown_is_never_over(scene: TimedReads) -> None:
    scene.post()
    scene.fabric.fail("poll", lambda: RuntimeError("a bug"), 10)
    for _ in range(10):
        assert not scene.is_safe_after(GRACE_S)
    assert scene.reads.settle()


def test_what_the_fabric_does_not_take_back_is_offered_again(scene: TimedReads) -> None:
    scene.post()
    (transfer,) = scene.reads
    assert scene.fabric.poll(transfer) is TransferState.DONE
    scene.fabric.fail("release", lambda: RuntimeError("a bug"), 2)
    scene.fabric.fail("remove_peer", lambda: RuntimeError("a bug"), 1)
    scene.reads.finished(transfer)
    scene.reader.give_back(scene.peer)
    assert len(scene.reader.refused) == 2
    scene.reader.retry_refused()
    assert scene.reader.refused == [transfer]
    scene.reader.retry_refused()
    assert not scene.reader.refused
    assert scene.fabric.transfers() == 0
    assert not scene.fabric.peers


@pytest.mark.parametrize(
    ("took_s", "let_go"),
    [(GIL_RELEASED_FROM_S, True), (GIL_RELEASED_FROM_S / 2, False)],
)
def test_a_post_that_takes_long_has_let_go_of_the_interpreters_lock(
    scene: TimedReads, monkeypatch: pytest.MonkeyPatch, took_s: float, let_go: bool
) -> None:
    post_read = scene.fabric.post_read

    def slow(*arguments: Any) -> Transfer:
        scene.now_s += took_s
        return post_read(*arguments)

    scene.now_s = 0.0
    monkeypatch.setattr(scene.fabric, "post_read", slow)
    scene.post()
    assert scene.reader.gil_released_at_s == (took_s if let_go else -math.inf)
    assert scene.reads.settle()


def test_every_doubtful_post_has_a_grace_of_its_own(scene: TimedReads) -> None:
    for _ in range(2):
        scene.fabric.fail(
            "post_read", lambda: TransferFailed("test", "some of it was posted")
        )
        with pytest.raises(TransferFailed):
            scene.post()
        scene.now_s += 10.0
    assert not scene.is_safe_after(GRACE_S - 15.0)
    assert scene.is_safe_after(5.0)
    assert scene.reader.graces_over == 2
