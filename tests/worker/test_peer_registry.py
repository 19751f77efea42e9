"""The peer registry by itself: back-off, first reads, and the release of handles when a peer cannot be connected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import PlanRefused, Reason
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.geometry import Place
from kvferry.protocol.handshake import EngineDescription, LeaseTable, WorkerDescription
from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.port import MemoryKind, OpenHandles, Region
from kvferry.worker.fabric.reads import Reader
from kvferry.worker.memory.slot_reads import SlotReads
from kvferry.worker.peers.first_reads import FirstReads
from kvferry.worker.peers.handshakes import AHEAD, FOR_LOADS
from kvferry.worker.peers.peer import Peer, PeerKey
from kvferry.worker.peers.registry import PeerRegistry, Unavailable
from kvferry.worker.peers.retry import Backoff
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.caches import CacheShape, ToyCaches
from tests.harness.fault_fabric import FaultFabric
from tests.plan import samples
from tests.waiting import wait_until

KEY = PeerKey("10.0.0.1", 5600, "P", "0" * 32)
ENTRIES = 4
TTL_S = 3600.0
Answer = Callable[[PeerKey], "tuple[EngineDescription, TransferPlan]"]


class Scene:
    """A consumer's registry, a producer on the fake network, and a clock that the test moves."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        shape = CacheShape()
        self.caches, self.remote = ToyCaches(shape, 1), ToyCaches(shape, 2)
        self.fabric = FaultFabric(MemoryFabric("consumer", self.network))
        self.producer = MemoryFabric("producer", self.network)
        self.words = np.zeros(16, dtype=np.uint64)
        slots = Region(self.words.ctypes.data, self.words.nbytes, MemoryKind.DRAM)
        self.producer.register([*self.remote.kv.regions(), slots])
        self.slot_reads = SlotReads(ENTRIES)
        self.fabric.register([*self.caches.kv.regions(), self.slot_reads.region()])
        self.slot_reads.prepare(self.fabric)
        here, there = self._engine("C", self.caches, b"-"), self._engine("P", self.remote, self.producer.metadata())
        self.good = (there, plan_transfer(here, 0, there))
        self.asked: list[PeerKey] = []
        self.found: dict[PeerKey, tuple[EngineDescription, TransferPlan]] = {}
        self.metadata: dict[str, bytes] = {}
        self.answer: Answer = lambda _: self.good
        self.awake = threading.Event()
        self.reader = Reader(self.fabric)
        first_reads = FirstReads(self.reader, self.caches.kv, None, self.slot_reads, timeout_s=1.0)
        self.registry = PeerRegistry(first_reads, self._handshake, self.awake.set, ttl_s=TTL_S, most_peers=3)

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

    def _handshake(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        self.asked.append(key)
        return self.answer(key)

    def add(self, key: PeerKey, agent: str | None = None) -> None:
        """From now on only an engine with an agent of its own answers for the key."""
        name = agent or key.engine_id
        if name not in self.network._by_name:
            producer = MemoryFabric(name, self.network)
            slots = Region(self.words.ctypes.data, self.words.nbytes, MemoryKind.DRAM)
            producer.register([*self.remote.kv.regions(), slots])
            self.metadata[name] = producer.metadata()
        there = self._engine(key.engine_id, self.remote, self.metadata[name])
        self.found[key] = (there, self.good[1])
        self.answer = self.found.__getitem__

    def connect(self, now_s: float, key: PeerKey = KEY, in_use: Collection[PeerKey] = ()) -> Peer | Unavailable | None:
        """Ask for the peer, let its handshake end, and step the registry."""
        self.awake.clear()
        if self.registry.get(key, now_s) is None and key in self.registry._handshakes:
            assert self.awake.wait(60)
        self.registry.step(now_s, in_use)
        self.registry.step(now_s, in_use)
        return self.registry.get(key, now_s)

    def refuse(self, _: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        raise HandshakeFailed("no answer")

    def nothing_is_left(self) -> bool:
        return self.slot_reads.free() == ENTRIES and self.fabric.transfers() == 0 and not self.fabric.peers


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.registry.close()
    made.fabric.close()


@pytest.fixture(autouse=True)
def _no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.protocol.side_channel.connection.random.uniform", lambda *_: 1.0)


def test_a_peer_is_ready_after_a_real_read_and_gives_its_entries_back(scene: Scene) -> None:
    peer = scene.connect(0.0)
    assert isinstance(peer, Peer)
    assert scene.fabric.calls["post_read"] == len(peer.routes) == 1
    assert scene.slot_reads.free() == ENTRIES
    assert scene.fabric.transfers() == 0
    assert not scene.registry.busy()


def test_the_backoff_doubles_up_to_its_limit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.peers.retry.FIRST_S", 1.0)
    monkeypatch.setattr("kvferry.worker.peers.retry.LONGEST_S", 5.0)
    scene.answer = scene.refuse
    now_s = 100.0
    for failures, backoff_s in enumerate((1.0, 2.0, 4.0, 5.0, 5.0), 1):
        found = scene.connect(now_s)
        assert found == Unavailable(FailureReason.HANDSHAKE, "no answer")
        assert len(scene.asked) == failures
        assert scene.registry.get(KEY, now_s + backoff_s - 0.01) == found
        assert len(scene.asked) == failures, "it was asked again before the back-off was over"
        now_s += backoff_s
    scene.answer = lambda _: scene.good
    assert isinstance(scene.connect(now_s), Peer)
    peer = scene.registry.get(KEY, now_s)
    assert isinstance(peer, Peer)
    scene.registry.lost(peer, "the test wanted it", now_s)
    assert isinstance(scene.registry.get(KEY, now_s + 0.99), Unavailable)
    assert scene.registry.get(KEY, now_s + 1.0) is None, "after a success the back-off starts anew"


def test_a_lost_peer_that_was_reconnected_is_not_lost_again(scene: Scene) -> None:
    """Otherwise a load that notices the loss late would drop the new connection."""
    former = scene.connect(0.0)
    assert isinstance(former, Peer)
    scene.registry.lost(former, "the test wanted it", 0.0)
    assert scene.nothing_is_left()
    present = scene.connect(100.0)
    assert isinstance(present, Peer)
    scene.registry.lost(former, "said late", 100.0)
    assert scene.registry.get(KEY, 100.0) is present


def test_a_first_read_that_does_not_end_gives_nothing_back_before_it_has(scene: Scene) -> None:
    scene.network.freeze("producer")
    assert scene.connect(0.0) is None
    assert scene.registry.busy()
    scene.registry.step(1.1, ())
    found = scene.registry.get(KEY, 1.1)
    assert isinstance(found, Unavailable)
    assert found.reason is FailureReason.HANDSHAKE
    assert scene.registry.closing()
    assert not scene.registry.busy()
    assert scene.slot_reads.free() == ENTRIES - 1
    scene.network.thaw("producer")
    scene.registry.step(2.0, ())
    assert scene.nothing_is_left()
    assert not scene.registry.closing()
    assert isinstance(scene.connect(100.0), Peer)


def test_a_former_life_is_kept_while_reads_from_it_are_under_way(scene: Scene) -> None:
    former = scene.connect(0.0)
    assert isinstance(former, Peer)
    successor = MemoryFabric("successor", scene.network)
    slots = Region(scene.words.ctypes.data, scene.words.nbytes, MemoryKind.DRAM)
    successor.register([*scene.remote.kv.regions(), slots])
    there = scene._engine("P", scene.remote, successor.metadata())
    scene.answer = lambda _: (there, scene.good[1])
    key = KEY._replace(boot="1" * 32)
    scene.awake.clear()
    assert scene.registry.get(key, 0.0) is None
    assert scene.awake.wait(10)
    for _ in range(3):
        scene.registry.step(0.0, {KEY})
    assert isinstance(scene.registry.get(key, 0.0), Peer)
    assert scene.fabric.peers == {"producer", "successor"}
    scene.registry.step(0.0, {key})
    assert scene.fabric.peers == {"successor"}


def test_engines_that_do_not_answer_cannot_pile_up_without_bound(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    known = scene.connect(0.0)
    monkeypatch.setattr("kvferry.worker.peers.handshakes.FOR_LOADS", replace(FOR_LOADS, asked=20))
    answered = threading.Event()

    def later(key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        assert answered.wait(10)
        return scene.refuse(key)

    scene.answer = later
    answers = [scene.registry.get(KEY._replace(host=f"10.0.1.{n}"), 0.0) for n in range(25)]
    assert answers[:20] == [None] * 20
    assert all(isinstance(answer, Unavailable) for answer in answers[20:])
    assert scene.registry.get(KEY, 0.0) is known, "a peer that is known is none of those"
    answered.set()
    wait_until(lambda: len(scene.asked) == 21, "all have been asked")


def test_without_a_free_entry_a_peer_is_tried_again_later(scene: Scene) -> None:
    taken = scene.slot_reads.try_take(ENTRIES)
    assert taken is not None
    assert isinstance(scene.connect(0.0), Unavailable)
    assert not scene.fabric.peers
    scene.slot_reads.give_back(taken)
    assert isinstance(scene.connect(100.0), Peer)


def fleet(scene: Scene, count: int) -> list[PeerKey]:
    """Producers at addresses of their own, each with its own agent on the network."""
    keys = []
    for number in range(count):
        key = KEY._replace(host=f"10.0.1.{number}", engine_id=f"P{number}")
        scene.add(key)
        keys.append(key)
    return keys


def test_a_peer_that_is_not_read_from_for_its_time_is_forgotten_and_connected_again(scene: Scene) -> None:
    (key,) = fleet(scene, 1)
    assert isinstance(scene.connect(100.0, key), Peer)
    assert isinstance(scene.registry.get(key, 150.0), Peer)
    assert scene.registry.next_s() == 150.0 + TTL_S
    scene.registry.step(150.0 + TTL_S - 0.01, ())
    assert scene.fabric.peers == {key.engine_id}
    scene.registry.step(150.0 + TTL_S, ())
    assert scene.nothing_is_left()
    assert scene.fabric.prepared() == 1, "that of the slot reads"
    assert scene.registry.next_s() is None
    assert isinstance(scene.connect(150.0 + TTL_S, key), Peer), "it has no back-off"


def test_a_peer_that_is_read_from_for_longer_than_its_time_is_kept(scene: Scene) -> None:
    (key,) = fleet(scene, 1)
    scene.connect(0.0, key)
    scene.registry.step(10 * TTL_S, {key})
    assert scene.fabric.peers == {key.engine_id}
    scene.registry.step(11 * TTL_S - 1.0, ())
    assert scene.fabric.peers == {key.engine_id}, "its time begins when it is not read from any more"
    scene.registry.step(11 * TTL_S, ())
    assert scene.nothing_is_left()


def test_a_time_of_nothing_is_for_ever(scene: Scene) -> None:
    scene.registry._ttl_s = 0.0
    (key,) = fleet(scene, 1)
    scene.connect(0.0, key)
    assert scene.registry.next_s() is None
    scene.registry.step(1e9, ())
    assert scene.fabric.peers == {key.engine_id}


def test_of_too_many_peers_the_one_that_was_unused_longest_is_forgotten_and_none_in_use(scene: Scene) -> None:
    first, second, third, fourth, fifth = fleet(scene, 5)
    for now_s, key in enumerate((first, second, third)):
        assert isinstance(scene.connect(float(now_s), key), Peer)
    assert isinstance(scene.registry.get(first, 10.0), Peer)
    assert isinstance(scene.connect(11.0, fourth), Peer)
    assert scene.fabric.peers == {key.engine_id for key in (first, third, fourth)}
    scene.registry.step(12.0, {third, first, fourth})
    scene.connect(14.0, fifth, {third, first, fourth, fifth})
    assert scene.fabric.peers == {"P0", "P2", "P3", "P4"}
    for key in (first, third, fourth, fifth):
        assert isinstance(scene.registry.get(key, 14.0), Peer), "one that is read from is not connected anew"
    scene.registry.step(15.0, ())
    assert len(scene.fabric.peers) == 3


def test_what_comes_and_goes_by_the_thousand_leaves_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third is lost, the others are forgotten for those that come after them; some never answer."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: thread.run())
    now_s = 0.0
    for number in range(2000):
        now_s += 1.0
        key = KEY._replace(host=f"10.1.{number % 50}.1", engine_id=f"E{number}", boot=f"{number:032x}")
        if number % 7 == 3:
            scene.answer = scene.refuse
            assert isinstance(scene.connect(now_s, key), Unavailable)
            continue
        scene.add(key)
        peer = scene.connect(now_s, key)
        assert isinstance(peer, Peer)
        if number % 3 == 0:
            scene.registry.lost(peer, "the test wanted it", now_s)
        assert len(scene.fabric.peers) <= 3
        assert scene.slot_reads.free() == ENTRIES
    scene.registry.step(now_s + 2 * TTL_S, ())
    assert scene.nothing_is_left()
    assert scene.fabric.prepared() == 1, "that of the slot reads"
    assert scene.fabric.open_handles() == OpenHandles(prepared=1)
    assert scene.registry.describe().startswith("0 ready, 0 warming, 0 retiring, 0 retired, 0 asked")


def test_failures_are_remembered_of_a_bounded_number_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.peers.retry._MOST", 10)
    backoff, why = Backoff(), Unavailable(FailureReason.HANDSHAKE, "no answer")
    keys = [KEY._replace(port=number) for number in range(30)]
    for key in keys:
        backoff.failed(key, why, 100.0)
    assert len(backoff) == 10
    assert backoff.why_not(keys[-1], 100.0) == why
    assert backoff.why_not(keys[0], 100.0) is None


def test_a_restart_is_not_held_up_by_the_backoff_of_the_former_life(scene: Scene) -> None:
    scene.answer = scene.refuse
    for now_s in (0.0, 10.0, 20.0, 40.0):
        assert isinstance(scene.connect(now_s), Unavailable)
    assert isinstance(scene.registry.get(KEY, 41.0), Unavailable), "it is left alone"
    reborn = KEY._replace(boot="1" * 32)
    scene.add(reborn)
    assert isinstance(scene.connect(41.0, reborn), Peer)


@pytest.mark.parametrize(
    "other",
    [
        {"boot": "1" * 32},
        {"boot": "1" * 32, "host": "10.9.9.9"},
        {"boot": "1" * 32, "port": 7777},
        {"boot": "1" * 32, "engine_id": "another"},
    ],
    ids=["a new boot", "at another host", "at another port", "another engine at the address"],
)
def test_a_former_life_is_forgotten_at_once(scene: Scene, other: dict[str, Any]) -> None:
    scene.add(KEY, agent="former")
    assert isinstance(scene.connect(0.0), Peer)
    successor = KEY._replace(**other)
    scene.add(successor, agent="successor")
    assert isinstance(scene.connect(0.0, successor), Peer)
    assert scene.fabric.peers == {"successor"}
    assert scene.registry.get(KEY, 0.0) is None, "it would have to be connected anew"


def test_the_same_boot_under_another_address_is_connected_there_although_its_agents_have_the_same_names(
    scene: Scene,
) -> None:
    scene.add(KEY, agent="P")
    assert isinstance(scene.connect(0.0), Peer)
    moved = KEY._replace(host="10.9.9.9")
    scene.add(moved, agent="P")
    assert isinstance(scene.connect(0.0, moved), Peer)
    assert scene.fabric.peers == {"P"}


def test_other_engines_are_not_forgotten_with_it(scene: Scene) -> None:
    one, other = fleet(scene, 2)
    scene.connect(0.0, one)
    scene.connect(0.0, other)
    reborn = one._replace(boot="1" * 32)
    scene.add(reborn, agent="reborn")
    scene.connect(0.0, reborn)
    assert scene.fabric.peers == {"P1", "reborn"}
    assert isinstance(scene.registry.get(other, 0.0), Peer)


def ahead(scene: Scene, now_s: float, key: PeerKey = KEY) -> None:
    """Only waiting requests name the peer; let its handshake end, and step the registry."""
    scene.awake.clear()
    scene.registry.prewarm(key, now_s)
    if key in scene.registry._handshakes:
        assert scene.awake.wait(60)
    for _ in range(3):
        scene.registry.step(now_s, ())


def test_a_peer_that_waiting_requests_name_is_ready_when_the_first_load_comes(scene: Scene) -> None:
    ahead(scene, 0.0)
    assert scene.fabric.calls["post_read"] == 1
    assert isinstance(scene.registry.get(KEY, 0.0), Peer)
    assert len(scene.asked) == 1
    ahead(scene, 1.0)
    assert len(scene.asked) == 1, "one that is known is not asked again"


def test_a_peer_that_could_not_be_prewarmed_is_left_alone_for_the_usual_time(scene: Scene) -> None:
    scene.answer = scene.refuse
    ahead(scene, 0.0)
    ahead(scene, 0.1)
    assert len(scene.asked) == 1
    assert scene.registry.get(KEY, 0.1) == Unavailable(FailureReason.HANDSHAKE, "no answer")
    scene.answer = lambda _: scene.good
    ahead(scene, 100.0)
    assert isinstance(scene.registry.get(KEY, 100.0), Peer)


def test_no_peer_is_prewarmed_that_would_push_out_a_peer_or_take_the_entries_of_loads(scene: Scene) -> None:
    first, second, third, fourth = fleet(scene, 4)
    taken = scene.slot_reads.try_take(ENTRIES // 2 + 1)
    assert taken is not None
    ahead(scene, 0.0, first)
    assert scene.asked == []
    scene.slot_reads.give_back(taken)
    for key in (first, second, third, fourth):
        ahead(scene, 1.0, key)
    assert scene.asked == [first, second, third]
    assert scene.fabric.peers == {"P0", "P1", "P2"}
    assert isinstance(scene.connect(2.0, fourth), Peer), "a load that needs it connects all the same"


def test_peers_that_no_load_waits_for_are_connected_one_at_a_turn_behind_those_that_loads_wait_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting takes milliseconds of the thread that advances loads."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: thread.run())
    first, second, third = fleet(scene, 3)
    scene.registry._handshakes._answered.update(dict.fromkeys((first.host, second.host, third.host)))
    scene.registry.prewarm(first, 0.0)
    scene.registry.prewarm(second, 0.0)
    assert scene.registry.get(third, 0.0) is None
    turns: list[list[str]] = []
    while not turns or scene.registry.busy():
        before = set(scene.fabric.peers)
        scene.registry.step(0.0, ())
        turns.append(sorted(scene.fabric.peers - before))
    assert turns[:2] == [["P0", "P2"], ["P1"]]


def test_many_that_do_not_answer_take_no_place_from_the_peers_of_loads(scene: Scene) -> None:
    answered = threading.Event()

    def later(key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        if key != KEY:
            assert answered.wait(10)
            return scene.refuse(key)
        return scene.good

    scene.answer = later
    scene.registry._most_peers = 1024
    for number in range(200):
        scene.registry.prewarm(KEY._replace(host=f"10.0.1.{number}"), 0.0)
    wait_until(lambda: len(scene.asked) == AHEAD.unverified_at_once, "as many are asked as may be")
    assert len(scene.registry._handshakes) == AHEAD.asked
    scene.awake.clear()
    scene.registry.get(KEY, 0.0)
    assert scene.awake.wait(10)
    scene.registry.step(0.0, ())
    scene.registry.step(0.0, ())
    assert isinstance(scene.registry.get(KEY, 0.0), Peer)
    assert len(scene.asked) == AHEAD.unverified_at_once + 1
    answered.set()
    scene.registry.close()


def settle(scene: Scene, now_s: float) -> None:
    """Let handshakes under way end, then step the registry."""
    scene.registry.step(now_s, ())
    wait_until(lambda: not _asking(scene) or scene.awake.is_set(), "the handshake has ended")
    scene.awake.clear()
    for _ in range(3):
        scene.registry.step(now_s, ())


def _asking(scene: Scene) -> bool:
    return len(scene.registry._handshakes) > 0


def test_a_static_peer_is_connected_although_no_load_wants_it_and_never_becomes_too_old(scene: Scene) -> None:
    scene.registry.prewarm_static(KEY, 0.0)
    assert scene.registry.next_s() == 0.0
    settle(scene, 0.0)
    assert scene.registry.next_s() == TTL_S
    for hours in (1, 2, 3):
        settle(scene, hours * TTL_S)
    assert isinstance(scene.registry.get(KEY, 3 * TTL_S), Peer)
    assert scene.asked == [KEY]


def test_a_static_peer_that_could_not_be_connected_or_was_lost_is_connected_again_after_its_backoff(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.worker.peers.retry.FIRST_S", 10.0)
    scene.answer = scene.refuse
    scene.registry.prewarm_static(KEY, 0.0)
    settle(scene, 0.0)
    settle(scene, 9.0)
    assert len(scene.asked) == 1, "it was asked again before the back-off was over"
    assert scene.registry.next_s() is not None, "a check is due"
    scene.answer = lambda _: scene.good
    settle(scene, 11.0)
    assert scene.registry.next_s() == 11.0 + TTL_S
    peer = scene.registry.get(KEY, 11.0)
    assert isinstance(peer, Peer)
    scene.registry.lost(peer, "the test wanted it", 20.0)
    settle(scene, 31.0)
    assert isinstance(scene.registry.get(KEY, 31.0), Peer)
    assert len(scene.asked) == 3


def test_a_static_peer_that_answers_again_is_connected_at_once_however_often_it_did_not(scene: Scene) -> None:
    """This engine's scheduler got an answer from it; otherwise loads would be refused until the back-off has ended."""
    scene.answer = scene.refuse
    scene.registry.prewarm_static(KEY, 0.0)
    for now_s in range(0, 600, 60):
        settle(scene, float(now_s))
    assert isinstance(scene.registry.get(KEY, 540.1), Unavailable)
    scene.answer = lambda _: scene.good
    scene.registry.prewarm_static(KEY, 540.2)
    settle(scene, 540.2)
    assert isinstance(scene.registry.get(KEY, 540.2), Peer)


def test_a_static_peer_that_refused_is_left_alone_although_it_answers(scene: Scene) -> None:
    def refuse(_: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        raise PeerRefused("other weights")

    scene.answer = refuse
    for now_s in (0.0, 0.001):
        scene.registry.prewarm_static(KEY, now_s)
        settle(scene, now_s)
    assert len(scene.asked) == 1


@pytest.mark.parametrize("error", [PeerRefused("it has restarted"), PlanRefused([Reason("dtype", "a", "b", "c")])])
def test_a_static_peer_that_refuses_is_left_alone(scene: Scene, error: Exception) -> None:
    def refuse(_: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        raise error

    scene.answer = refuse
    scene.registry.prewarm_static(KEY, 0.0)
    settle(scene, 0.0)
    settle(scene, 1000.0)
    assert len(scene.asked) == 1
    assert scene.registry.next_s() is None


def test_a_restarted_engine_takes_the_place_of_its_static_peer(scene: Scene) -> None:
    scene.add(KEY)
    scene.registry.prewarm_static(KEY, 0.0)
    settle(scene, 0.0)
    later = KEY._replace(boot="1" * 32)
    scene.add(later, "P2")
    scene.registry.prewarm_static(later, 1.0)
    settle(scene, 1.0)
    settle(scene, 1000.0)
    assert isinstance(scene.registry.get(later, 1000.0), Peer)
    assert scene.asked == [KEY, later], "the former life is not connected again"
