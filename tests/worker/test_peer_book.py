"""The book of peers by itself: back-off, first reads, and what is given back when a peer cannot be met."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.plan.planner import plan_transfer
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed
from kvferry.protocol.geometry import Place
from kvferry.protocol.handshake import EngineDescription, LeaseTable, WorkerDescription
from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric import MemoryKind, Region
from kvferry.worker.landing import Landing
from kvferry.worker.peer import Peer, PeerKey
from kvferry.worker.peer_book import PeerBook, Unavailable
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.plan import samples
from tests.waiting import wait_until
from tests.worker.probe_fabric import ProbeFabric
from tests.worker.toy_caches import CacheShape, ToyCaches

KEY = PeerKey("10.0.0.1", 5600, "P", "0" * 32)
CELLS = 4
Answer = Callable[[PeerKey], "tuple[EngineDescription, TransferPlan]"]


class Scene:
    """A consumer's book, a producer on the fake network, and a clock that stands still."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        shape = CacheShape()
        self.caches, self.remote = ToyCaches(shape, 1), ToyCaches(shape, 2)
        self.fabric = ProbeFabric(MemoryFabric("consumer", self.network))
        self.producer = MemoryFabric("producer", self.network)
        self.words = np.zeros(16, dtype=np.uint64)
        slots = Region(self.words.ctypes.data, self.words.nbytes, MemoryKind.DRAM)
        self.producer.register([*self.remote.kv.regions(), slots])
        self.landing = Landing(CELLS)
        self.fabric.register([*self.caches.kv.regions(), self.landing.region()])
        self.landing.prepare(self.fabric)
        here, there = self._engine("C", self.caches, b"-"), self._engine("P", self.remote, self.producer.metadata())
        self.good = (there, plan_transfer(here, 0, there))
        self.asked: list[PeerKey] = []
        self.answer: Answer = lambda _: self.good
        self.awake = threading.Event()
        self.book = PeerBook(
            self.fabric, self.caches.kv, None, self.landing, self._introduce, self.awake.set, timeout_s=1.0
        )

    def _engine(self, name: str, caches: ToyCaches, metadata: bytes) -> EngineDescription:
        worker = WorkerDescription(
            place=Place(),
            agent=name,
            agent_metadata=metadata,
            memory="DRAM",
            device=0,
            lease_table=LeaseTable(address=self.words.ctypes.data, slots=len(self.words)),
            tensors=caches.kv.tensors,
        )
        return samples.engine(workers=[worker], engine_id=name, groups=(caches.shape.group,))

    def _introduce(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        self.asked.append(key)
        return self.answer(key)

    def meet(self, now_s: float, key: PeerKey = KEY) -> Peer | Unavailable | None:
        """Ask for the peer, let its introduction end, and bring the book forward."""
        self.awake.clear()
        if self.book.get(key, now_s) is None and key in self.book._asked:
            assert self.awake.wait(10)
        self.book.step(now_s, ())
        self.book.step(now_s, ())
        return self.book.get(key, now_s)

    def refuse(self, _: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        raise HandshakeFailed("nobody is there")

    def nothing_is_left(self) -> bool:
        return self.landing.free() == CELLS and self.fabric.transfers() == 0 and not self.fabric.peers


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.book.close()
    made.fabric.close()


@pytest.fixture(autouse=True)
def _no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.peer_book.random.uniform", lambda *_: 1.0)


def test_a_peer_is_ready_after_a_real_read_and_gives_its_cells_back(scene: Scene) -> None:
    peer = scene.meet(0.0)
    assert isinstance(peer, Peer)
    assert scene.fabric.calls["post_read"] == len(peer.routes) == 1
    assert scene.landing.free() == CELLS
    assert scene.fabric.transfers() == 0
    assert not scene.book.busy()


def test_the_back_off_doubles_up_to_its_limit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.peer_book._FIRST_BACK_OFF_S", 1.0)
    monkeypatch.setattr("kvferry.worker.peer_book._LONGEST_BACK_OFF_S", 5.0)
    scene.answer = scene.refuse
    now_s = 100.0
    for failures, pause_s in enumerate((1.0, 2.0, 4.0, 5.0, 5.0), 1):
        found = scene.meet(now_s)
        assert found == Unavailable(FailureReason.HANDSHAKE, "nobody is there")
        assert len(scene.asked) == failures
        assert scene.book.get(KEY, now_s + pause_s - 0.01) == found
        assert len(scene.asked) == failures, "it was asked again before the back-off was over"
        now_s += pause_s
    scene.answer = lambda _: scene.good
    assert isinstance(scene.meet(now_s), Peer)
    peer = scene.book.get(KEY, now_s)
    assert isinstance(peer, Peer)
    scene.book.lost(peer, "the test wanted it", now_s)
    assert isinstance(scene.book.get(KEY, now_s + 0.99), Unavailable)
    assert scene.book.get(KEY, now_s + 1.0) is None, "after a success the back-off starts anew"


def test_a_lost_peer_that_was_met_anew_is_not_lost_again(scene: Scene) -> None:
    """Otherwise whoever is slow to notice throws away the connection that others have made since."""
    former = scene.meet(0.0)
    assert isinstance(former, Peer)
    scene.book.lost(former, "the test wanted it", 0.0)
    assert scene.nothing_is_left()
    present = scene.meet(100.0)
    assert isinstance(present, Peer)
    scene.book.lost(former, "said late", 100.0)
    assert scene.book.get(KEY, 100.0) is present


def test_a_first_read_that_does_not_end_gives_nothing_back_before_it_has(scene: Scene) -> None:
    scene.network.freeze("producer")
    assert scene.meet(0.0) is None
    assert scene.book.busy()
    scene.book.step(1.1, ())
    found = scene.book.get(KEY, 1.1)
    assert isinstance(found, Unavailable)
    assert found.reason is FailureReason.HANDSHAKE
    assert scene.book.burying()
    assert not scene.book.busy()
    assert scene.landing.free() == CELLS - 1
    scene.network.thaw("producer")
    scene.book.step(2.0, ())
    assert scene.nothing_is_left()
    assert not scene.book.burying()
    assert isinstance(scene.meet(100.0), Peer)


def test_a_former_life_is_kept_while_reads_from_it_are_under_way(scene: Scene) -> None:
    former = scene.meet(0.0)
    assert isinstance(former, Peer)
    successor = MemoryFabric("successor", scene.network)
    slots = Region(scene.words.ctypes.data, scene.words.nbytes, MemoryKind.DRAM)
    successor.register([*scene.remote.kv.regions(), slots])
    there = scene._engine("P", scene.remote, successor.metadata())
    scene.answer = lambda _: (there, scene.good[1])
    key = KEY._replace(boot="1" * 32)
    scene.awake.clear()
    assert scene.book.get(key, 0.0) is None
    assert scene.awake.wait(10)
    for _ in range(3):
        scene.book.step(0.0, {KEY})
    assert isinstance(scene.book.get(key, 0.0), Peer)
    assert scene.fabric.peers == {"producer", "successor"}
    scene.book.step(0.0, {key})
    assert scene.fabric.peers == {"successor"}


def test_engines_that_do_not_answer_cannot_pile_up_without_bound(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.peer_book._MOST_ASKED", 20)
    known = scene.meet(0.0)
    answered = threading.Event()

    def later(key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        assert answered.wait(10)
        return scene.refuse(key)

    scene.answer = later
    answers = [scene.book.get(KEY._replace(host=f"10.0.1.{n}"), 0.0) for n in range(25)]
    assert answers[:20] == [None] * 20
    assert all(isinstance(answer, Unavailable) for answer in answers[20:])
    assert scene.book.get(KEY, 0.0) is known, "a peer that is known is none of those"
    answered.set()
    wait_until(lambda: len(scene.asked) == 21, "all have been asked")


def test_without_a_free_cell_a_peer_is_tried_again_later(scene: Scene) -> None:
    taken = scene.landing.try_take(CELLS)
    assert taken is not None
    assert isinstance(scene.meet(0.0), Unavailable)
    assert not scene.fabric.peers
    scene.landing.give_back(taken)
    assert isinstance(scene.meet(100.0), Peer)
