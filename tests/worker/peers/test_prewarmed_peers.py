"""Peers that no load waits for yet: those that waiting requests name, and the static ones."""

from __future__ import annotations

import threading

import pytest

from kvferry.link import limits
from kvferry.link.limits import Backoff
from kvferry.plan.refusals import PlanRefused, Reason
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import PeerRefused
from kvferry.protocol.handshake import EngineDescription
from kvferry.worker.peers.peer import Peer, PeerKey
from kvferry.worker.peers.registry import Unavailable
from tests.worker.peers.scene import ENTRIES, KEY, TTL_S, Scene


def test_a_peer_that_waiting_requests_name_is_ready_when_the_first_load_comes(
    scene: Scene,
) -> None:
    scene.prewarm(0.0)
    assert scene.fabric.calls["post_read"] == 1
    assert isinstance(scene.registry.get(KEY, 0.0), Peer)
    assert len(scene.asked) == 1
    scene.prewarm(1.0)
    assert len(scene.asked) == 1, "one that is known is not asked again"


def test_no_peer_is_prewarmed_that_would_push_out_a_peer_or_take_the_entries_of_loads(
    scene: Scene,
) -> None:
    first, second, third, fourth = scene.add_fleet(4)
    taken = scene.slot_reads.try_take(ENTRIES // 2 + 1)
    assert taken is not None
    scene.prewarm(0.0, first)
    assert scene.asked == []
    scene.slot_reads.give_back(taken)
    for key in (first, second, third, fourth):
        scene.prewarm(1.0, key)
    assert scene.asked == [first, second, third]
    assert scene.fabric.peers == {"P0", "P1", "P2"}
    assert isinstance(scene.connect(2.0, fourth), Peer), (
        "a load that needs it connects all the same"
    )


def test_peers_that_no_load_waits_for_are_connected_one_at_a_turn_behind_those_that_loads_wait_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting takes milliseconds of the thread that advances loads."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: thread.run())
    first, second, third = scene.add_fleet(3)
    scene.registry._handshakes._answered.update(
        dict.fromkeys((first.host, second.host, third.host))
    )
    scene.registry.prewarm(first, 0.0)
    scene.registry.prewarm(second, 0.0)
    assert scene.registry.get(third, 0.0) is None
    turns: list[list[str]] = []
    while not turns or scene.registry.busy():
        before = set(scene.fabric.peers)
        scene.registry.step(0.0, ())
        turns.append(sorted(scene.fabric.peers - before))
    assert turns[:2] == [["P0", "P2"], ["P1"]]


def test_a_static_peer_is_connected_although_no_load_wants_it_and_never_becomes_too_old(
    scene: Scene,
) -> None:
    scene.registry.prewarm_static(KEY, 0.0)
    assert scene.registry.next_s() == 0.0
    scene.settle(0.0)
    assert scene.registry.next_s() == TTL_S
    for hours in (1, 2, 3):
        scene.settle(hours * TTL_S)
    assert isinstance(scene.registry.get(KEY, 3 * TTL_S), Peer)
    assert scene.asked == [KEY]


def test_a_static_peer_that_could_not_be_connected_or_was_lost_is_connected_again_after_its_backoff(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "AVOID", Backoff(10.0, 30.0))
    scene.answer = scene.refuse
    scene.prewarm_static(0.0)
    scene.settle(9.0)
    assert len(scene.asked) == 1, "it was asked again before the back-off was over"
    assert scene.registry.next_s() is not None, "a check is due"
    scene.answer = scene.known
    scene.settle(11.0)
    assert scene.registry.next_s() == 11.0 + TTL_S
    peer = scene.registry.get(KEY, 11.0)
    assert isinstance(peer, Peer)
    scene.registry.lost(peer, "the test wanted it", 20.0)
    scene.settle(31.0)
    assert isinstance(scene.registry.get(KEY, 31.0), Peer)
    assert len(scene.asked) == 3


def test_a_static_peer_that_answers_again_is_connected_at_once_however_often_it_did_not(
    scene: Scene,
) -> None:
    """This engine's scheduler got an answer from it; otherwise loads would be refused until the back-off has ended."""
    scene.answer = scene.refuse
    scene.prewarm_static(0.0)
    for now_s in range(60, 600, 60):
        scene.settle(float(now_s))
    assert isinstance(scene.registry.get(KEY, 540.1), Unavailable)
    scene.answer = scene.known
    scene.prewarm_static(540.2)
    assert isinstance(scene.registry.get(KEY, 540.2), Peer)


@pytest.mark.parametrize(
    "error",
    [PeerRefused("it has restarted"), PlanRefused([Reason("dtype", "a", "b", "c")])],
)
def test_a_static_peer_that_refuses_is_left_alone_although_it_answers(
    scene: Scene, error: Exception
) -> None:
    def refuse(_: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        raise error

    scene.answer = refuse
    scene.prewarm_static(0.0)
    scene.settle(1000.0)
    assert scene.registry.next_s() is None
    scene.prewarm_static(0.001)
    assert len(scene.asked) == 1


def test_a_restarted_engine_takes_the_place_of_its_static_peer(scene: Scene) -> None:
    scene.prewarm_static(0.0)
    later = KEY._replace(boot="1" * 32)
    scene.add(later, "P2")
    scene.prewarm_static(1.0, later)
    scene.settle(1000.0)
    assert isinstance(scene.registry.get(later, 1000.0), Peer)
    assert scene.asked == [KEY, later], "the former life is not connected again"
