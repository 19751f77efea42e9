"""The peer registry by itself: back-off, first reads, and which peers are kept."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Never

import pytest

from kvferry.link import limits
from kvferry.link.limits import FOR_LOADS, Backoff
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.errors import InternalErrors
from kvferry.worker.peers import registry
from kvferry.worker.peers.peer import Peer
from kvferry.worker.peers.registry import CHECK_S, FailedPeers, Unavailable
from tests.worker.peers.scene import ENTRIES, KEY, TTL_S, Scene


def test_the_backoff_doubles_up_to_its_limit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "AVOID", Backoff(1.0, 5.0))
    scene.answer = scene.refuse
    now_s = 100.0
    for failures, backoff_s in enumerate((1.0, 2.0, 4.0, 5.0, 5.0), 1):
        found = scene.connect(now_s)
        assert found == Unavailable(FailureReason.HANDSHAKE, "no answer")
        assert len(scene.asked) == failures
        assert scene.registry.get(KEY, now_s + backoff_s - 0.01) == found
        assert len(scene.asked) == failures, (
            "it was asked again before the back-off was over"
        )
        now_s += backoff_s
    scene.answer = scene.known
    peer = scene.connect(now_s)
    assert isinstance(peer, Peer)
    scene.registry.lost(peer, "the test wanted it", now_s)
    assert isinstance(scene.registry.get(KEY, now_s + 0.99), Unavailable)
    assert scene.registry.get(KEY, now_s + 1.0) is None, (
        "after a success the back-off starts anew"
    )


def test_a_plan_is_logged_whole_with_what_the_line_has_no_room_for_at_debug(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TransferPlan,
        "describe_all",
        lambda _: ("plan: 2 more lines at DEBUG", "one", "two"),
    )
    caplog.set_level(logging.DEBUG, "kvferry.worker.peers.registry")
    assert isinstance(scene.connect(0.0), Peer)
    first, *more = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert first[0] == logging.INFO
    assert ": plan: 2 more lines at DEBUG; over the fabric, not mapped: " in first[1]
    assert more == [(logging.DEBUG, f"peer={KEY} {line}") for line in ("one", "two")]


def test_producers_that_cause_an_internal_error_fill_the_log_with_no_tracebacks(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> Never:
        raise KeyError("a bug")

    monkeypatch.setattr(
        registry, "internal_errors", InternalErrors(registry.logger, 3600.0)
    )
    scene.answer = fail
    for number in range(3):
        key = KEY._replace(boot=f"{number:032x}")
        assert isinstance(scene.connect(0.0, key), Unavailable)
    assert caplog.text.count("cannot be read from (handshake)") == 3
    assert caplog.text.count("Traceback") == 1
    assert "the handshake failed with an internal error" in caplog.text


def test_a_restart_is_not_held_up_by_the_backoff_of_the_former_life(
    scene: Scene,
) -> None:
    scene.answer = scene.refuse
    for now_s in (0.0, 10.0, 20.0, 40.0):
        assert isinstance(scene.connect(now_s), Unavailable)
    scene.answer = scene.known
    assert isinstance(scene.registry.get(KEY, 41.0), Unavailable), "it is left alone"
    reborn = KEY._replace(boot="1" * 32)
    scene.add(reborn)
    assert isinstance(scene.connect(41.0, reborn), Peer)


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


def test_while_it_is_paused_nobody_is_connected(scene: Scene) -> None:
    assert scene.registry.get(KEY, 0.0) is None
    scene.registry.pause()
    scene.registry.step(0.0, ())
    assert not scene.fabric.peers, "though its description has come"
    scene.registry.resume()
    assert isinstance(scene.connect(0.0), Peer)


def test_a_first_read_that_is_given_up_may_end_while_it_is_paused(scene: Scene) -> None:
    scene.network.freeze("producer")
    assert scene.connect(0.0) is None
    scene.registry.pause()
    assert scene.registry.first_reads.all()
    scene.network.thaw("producer")
    scene.registry.step(1.0, ())
    assert not scene.registry.first_reads.all()
    assert scene.nothing_is_left()


def test_the_time_of_a_first_contact_that_a_refused_sleep_has_dropped_begins_anew(
    scene: Scene,
) -> None:
    scene.answer = scene.refuse
    for number in range(FOR_LOADS.per_unverified_host + 1):
        key = KEY._replace(port=KEY.port + number, engine_id=f"P{number}")
        assert scene.registry.get(key, 0.0) is None
    (waiting,) = scene.registry.snapshot().handshakes.waiting
    scene.registry.pause()
    scene.registry.resume()
    scene.answer = scene.known
    scene.add(waiting)
    assert isinstance(scene.connect(3600.0, waiting), Peer)
    (took_s,) = scene.registry.handshake_s
    assert took_s < 60.0


def test_a_first_read_that_does_not_end_gives_nothing_back_before_it_has(
    scene: Scene,
) -> None:
    scene.network.freeze("producer")
    assert scene.connect(0.0) is None
    assert scene.registry.busy()
    scene.registry.step(100.0, ())
    assert scene.registry.get(KEY, 100.0) is None, (
        "a pause of this process counts for little"
    )
    for tenth in range(1, 12):
        scene.registry.step(100.0 + tenth / 10, ())
    found = scene.registry.get(KEY, 101.1)
    assert isinstance(found, Unavailable)
    assert found.reason is FailureReason.HANDSHAKE
    assert scene.registry.first_reads.given_up
    assert not scene.registry.busy()
    assert scene.slot_reads.free() == ENTRIES - 1
    scene.network.thaw("producer")
    scene.registry.step(102.0, ())
    assert scene.nothing_is_left()
    assert not scene.registry.first_reads.given_up
    assert isinstance(scene.connect(200.0), Peer)


def test_without_a_free_entry_a_peer_is_tried_again_later(scene: Scene) -> None:
    taken = scene.slot_reads.try_take(ENTRIES)
    assert taken is not None
    assert isinstance(scene.connect(0.0), Unavailable)
    assert not scene.fabric.peers
    scene.slot_reads.give_back(taken)
    assert isinstance(scene.connect(100.0), Peer)


def test_a_peer_that_is_not_read_from_for_its_time_is_forgotten_and_connected_again(
    scene: Scene,
) -> None:
    assert isinstance(scene.connect(100.0), Peer)
    assert isinstance(scene.registry.get(KEY, 150.0), Peer)
    assert scene.registry.next_s() == 150.0 + TTL_S
    scene.registry.step(150.0 + TTL_S - 0.01, ())
    assert scene.fabric.peers == {"producer"}
    due_s = scene.registry.next_s()
    assert due_s is not None
    assert 0.0 < due_s - (150.0 + TTL_S) <= CHECK_S
    scene.registry.step(due_s, ())
    assert scene.nothing_is_left()
    assert scene.registry.next_s() is None
    assert isinstance(scene.connect(150.0 + TTL_S), Peer), "it has no back-off"


def test_a_peer_that_is_read_from_for_longer_than_its_time_is_kept(
    scene: Scene,
) -> None:
    scene.connect(0.0)
    scene.registry.step(10 * TTL_S, {KEY})
    assert scene.fabric.peers == {"producer"}
    scene.registry.step(11 * TTL_S - 1.0, ())
    assert scene.fabric.peers == {"producer"}, (
        "its time begins when it is not read from any more"
    )
    scene.registry.step(11 * TTL_S, ())
    assert scene.nothing_is_left()


def test_of_too_many_peers_the_one_that_was_unused_longest_is_forgotten_and_none_in_use(
    scene: Scene,
) -> None:
    first, second, third, fourth, fifth = scene.add_fleet(5)
    for now_s, key in enumerate((first, second, third)):
        assert isinstance(scene.connect(float(now_s), key), Peer)
    assert isinstance(scene.registry.get(first, 10.0), Peer)
    assert isinstance(scene.connect(11.0, fourth), Peer)
    assert scene.fabric.peers == {"P0", "P2", "P3"}
    scene.registry.step(12.0, {third, first, fourth})
    scene.connect(14.0, fifth, {third, first, fourth, fifth})
    assert scene.fabric.peers == {"P0", "P2", "P3", "P4"}
    for key in (first, third, fourth, fifth):
        assert isinstance(scene.registry.get(key, 14.0), Peer), (
            "one that is read from is not connected anew"
        )
    scene.registry.step(15.0, ())
    assert len(scene.fabric.peers) == 3


FORMER_LIVES: dict[str, tuple[dict[str, Any], str]] = {
    "a new boot": ({"boot": "1" * 32}, "successor"),
    "another engine at the address": (
        {"boot": "1" * 32, "engine_id": "another"},
        "successor",
    ),
    "the same boot and agent, at another host": ({"host": "10.9.9.9"}, "producer"),
}


@pytest.mark.parametrize(("changed", "agent"), FORMER_LIVES.values(), ids=FORMER_LIVES)
def test_a_former_life_is_forgotten_at_once_and_no_other_engine_with_it(
    scene: Scene, changed: dict[str, Any], agent: str
) -> None:
    (other,) = scene.add_fleet(1)
    scene.connect(0.0, other)
    assert isinstance(scene.connect(0.0), Peer)
    successor = KEY._replace(**changed)
    scene.add(successor, agent)
    assert isinstance(scene.connect(0.0, successor), Peer)
    assert scene.fabric.peers == {agent, "P0"}
    assert isinstance(scene.registry.get(other, 0.0), Peer)
    assert scene.registry.get(KEY, 0.0) is None, "it would have to be connected anew"


ELSEWHERE = pytest.mark.parametrize(
    "changed",
    [{"host": "10.9.9.9"}, {"port": 7777}],
    ids=["at another host", "at another port"],
)


@ELSEWHERE
def test_an_engine_of_the_same_id_elsewhere_is_forgotten_if_it_was_not_used_for_a_minute(
    scene: Scene, changed: dict[str, Any]
) -> None:
    """It has been restarted there."""
    assert isinstance(scene.connect(0.0), Peer)
    assert isinstance(scene.registry.get(KEY, 10.0), Peer)
    successor = KEY._replace(boot="1" * 32, **changed)
    scene.add(successor, "successor")
    assert isinstance(scene.connect(70.1, successor), Peer)
    assert scene.fabric.peers == {"successor"}


@ELSEWHERE
def test_two_engines_of_one_id_that_are_used_in_turn_are_both_kept(
    scene: Scene, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    namesake = KEY._replace(boot="1" * 32, **changed)
    scene.add(namesake, "namesake")
    assert isinstance(scene.connect(0.0), Peer)
    assert isinstance(scene.connect(50.0, namesake), Peer)
    for now_s in range(51, 60):
        scene.registry.step(now_s, {KEY, namesake})
        for key in (KEY, namesake):
            assert isinstance(scene.registry.get(key, now_s), Peer)
    assert scene.fabric.peers == {"producer", "namesake"}
    assert caplog.text.count("has the engine id of") == 1


def test_a_former_life_is_kept_while_reads_from_it_are_under_way(scene: Scene) -> None:
    assert isinstance(scene.connect(0.0), Peer)
    successor = KEY._replace(boot="1" * 32)
    scene.add(successor, "successor")
    assert isinstance(scene.connect(0.0, successor, in_use={KEY}), Peer)
    assert scene.fabric.peers == {"producer", "successor"}
    scene.registry.step(0.0, {successor})
    assert scene.fabric.peers == {"successor"}


def test_failures_are_remembered_of_a_bounded_number_of_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.link.limits.MAX_REMEMBERED", 10)
    failed_peers, why = FailedPeers(), Unavailable(FailureReason.HANDSHAKE, "no answer")
    keys = [KEY._replace(port=number) for number in range(30)]
    for key in keys:
        failed_peers.failed(key, why, 100.0)
    assert len(failed_peers) == 10
    assert failed_peers.why_not(keys[-1], 100.0) == why
    assert failed_peers.why_not(keys[0], 100.0) is None


def test_a_time_of_nothing_is_for_ever() -> None:
    with contextlib.closing(Scene(ttl_s=0.0)) as scene:
        scene.connect(0.0)
        assert scene.registry.next_s() is None
        scene.registry.step(1e9, ())
        assert scene.fabric.peers == {"producer"}
