"""Handshakes: hosts that never answer do not delay others, however many of them clients name."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvferry.link.host_names import MAX_LOOKUPS
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import EngineDescription
from kvferry.worker.peers.handshakes import AHEAD, FOR_LOADS, Handshakes
from kvferry.worker.peers.peer import PeerKey
from tests.waiting import wait_until

AT_ONCE, UNVERIFIED_AT_ONCE = FOR_LOADS.at_once, FOR_LOADS.unverified_at_once
ANSWER = PeerRefused("it has restarted")


class Scene:
    """Hosts `dark…` do not answer before they are let go, then not at all; all others answer at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked: list[PeerKey] = []
        self.let_go = threading.Event()
        self.ended: list[PeerKey] = []
        self.handshakes = Handshakes(self._handshake, lambda: None)

    def _handshake(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        with self.lock:
            self.asked.append(key)
        if not key.host.lower().startswith("dark"):
            raise ANSWER
        assert self.let_go.wait(60)
        raise HandshakeFailed("no answer")

    def ask(self, host: str, number: int = 0) -> str | None:
        return self.handshakes.request(PeerKey(host, 5600 + number, f"E{number}", "0" * 32))

    def take(self) -> None:
        self.ended += [key for key, _ in self.handshakes.arrivals()]

    def asked_of(self, prefix: str) -> int:
        with self.lock:
            return sum(key.host.startswith(prefix) for key in self.asked)

    def is_asked(self, host: str, count: int = 1) -> None:
        wait_until(lambda: self.asked_of(host) >= count, f"{host} is asked", 60.0)

    def has_ended_all(self, count: int) -> None:
        def ended() -> bool:
            self.take()
            return len(self.ended) == count

        wait_until(ended, f"all {count} have ended", 60.0)

    def has_ended(self, host: str) -> None:
        def ended() -> bool:
            self.take()
            return any(key.host == host for key in self.ended)

        wait_until(ended, f"{host} has ended", 60.0)


def _threads() -> int:
    return sum(thread.name == "kvferry-handshake" for thread in threading.enumerate())


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.let_go.set()

    def over() -> bool:
        made.take()
        return not len(made.handshakes) and not _threads()

    wait_until(over, "no handshake is under way, and no thread is left", 60.0)


def test_black_holes_named_in_a_row_do_not_delay_the_first_contact_with_a_live_host(
    scene: Scene,
) -> None:
    for number in range(UNVERIFIED_AT_ONCE - 1):
        assert scene.ask(f"dark{number}") is None
    scene.is_asked("dark", UNVERIFIED_AT_ONCE - 1)
    assert scene.ask("live") is None
    scene.has_ended("live")
    assert not any(key.host.startswith("dark") for key in scene.ended), (
        "they are all still waited for"
    )


def test_a_host_that_has_answered_before_does_not_wait_for_any_number_of_unverified_hosts(
    scene: Scene,
) -> None:
    scene.ask("live")
    scene.has_ended("live")
    for number in range(200):
        assert scene.ask(f"dark{number}") is None
    scene.is_asked("dark", UNVERIFIED_AT_ONCE)
    scene.ended.clear()
    for number in range(1, 9):
        assert scene.ask("live", number) is None
    scene.has_ended_all(8)
    assert scene.asked_of("dark") == UNVERIFIED_AT_ONCE


def test_one_unverified_host_gets_few_threads_and_few_places_in_the_queue(scene: Scene) -> None:
    answers = [scene.ask("dark", number) for number in range(40)]
    assert answers[:32] == [None] * 32
    assert all(answer is not None for answer in answers[32:])
    scene.is_asked("dark", 4)
    assert scene.ask("live") is None
    scene.has_ended("live")
    assert scene.asked_of("dark") == 4


def test_a_host_that_is_written_in_many_ways_is_one_host(scene: Scene) -> None:
    """Clients choose how they write it."""
    ways = ["dark", "darK", "daRk", "daRK", "dArk", "dArK", "dARk", "dARK"]
    answers = [scene.ask(way, number) for number, way in enumerate(ways * 5)]
    assert answers[:32] == [None] * 32
    assert all(answer is not None for answer in answers[32:])
    scene.is_asked("d", 4)
    assert scene.ask("live") is None
    scene.has_ended("live")
    assert scene.asked_of("d") == 4


def test_waiting_peers_are_asked_in_turn_when_others_have_answered_or_failed(scene: Scene) -> None:
    for number in range(UNVERIFIED_AT_ONCE + 10):
        scene.ask(f"dark{number}")
    scene.is_asked("dark", UNVERIFIED_AT_ONCE)
    assert scene.ask("live") is None
    assert scene.asked_of("live") == 0, "it is one of too many unverified hosts"
    scene.let_go.set()
    scene.has_ended("live")
    assert scene.asked_of("dark") == UNVERIFIED_AT_ONCE + 10


def test_no_peer_is_asked_twice_at_a_time_and_the_queue_is_bounded(scene: Scene) -> None:
    for _ in range(3):
        assert scene.ask("dark0") is None
    assert len(scene.handshakes) == 1
    answers = [scene.ask(f"dark{number}") for number in range(1, 300)]
    assert answers.count(None) == 255
    assert answers[-1] == "256 other engines have not answered yet"


def test_a_system_that_gives_no_more_threads_fails_the_contact_and_nothing_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert scene.ask("live") is None
    ((key, found),) = scene.handshakes.arrivals()
    assert isinstance(found, HandshakeFailed)
    assert key not in scene.handshakes
    assert scene.ask("live") is None
    scene.has_ended("live")


def _key(host: str, number: int = 0) -> PeerKey:
    return PeerKey(host, 5600 + number, f"E{number}", "0" * 32)


def test_handshakes_ahead_of_loads_take_no_place_from_those_that_loads_wait_for(
    scene: Scene,
) -> None:
    for number in range(100):
        scene.handshakes.request_ahead(_key(f"dark-ahead{number}"))
    assert len(scene.handshakes) == AHEAD.wanted
    for number in range(UNVERIFIED_AT_ONCE):
        assert scene.ask(f"dark{number}") is None
    scene.is_asked("dark", UNVERIFIED_AT_ONCE + AHEAD.unverified_at_once)
    assert scene.asked_of("dark-ahead") == AHEAD.unverified_at_once


def test_a_load_takes_over_a_contact_that_waits_or_is_under_way(scene: Scene) -> None:
    """It is not asked twice, and does not wait behind those that no load waits for."""
    for number in range(AHEAD.unverified_at_once):
        scene.handshakes.request_ahead(_key(f"dark{number}"))
    scene.is_asked("dark", AHEAD.unverified_at_once)
    scene.handshakes.request_ahead(_key("live"))
    assert scene.asked_of("live") == 0
    assert scene.ask("live") is None
    scene.has_ended("live")
    assert scene.ask("dark0") is None
    assert scene.asked_of("dark") == AHEAD.unverified_at_once
    scene.handshakes.request_ahead(_key("dark-more"))
    scene.is_asked("dark-more")
    assert len(scene.handshakes) == AHEAD.unverified_at_once + 1, (
        "the place of the one that was taken over is free"
    )


def test_a_host_that_answered_once_and_then_no_more_is_unverified_again(scene: Scene) -> None:
    scene.handshakes._answered["dark"] = None
    for number in range(2):
        scene.ask("dark", number)
    scene.is_asked("dark", 2)
    scene.let_go.set()
    scene.has_ended("dark")
    assert "dark" not in scene.handshakes.snapshot().answered


def test_threads_exist_only_while_handshakes_are_under_way(scene: Scene) -> None:
    assert _threads() == 0
    for number in range(300):
        scene.ask(f"dark{number}")
    scene.is_asked("dark", UNVERIFIED_AT_ONCE)
    assert _threads() == UNVERIFIED_AT_ONCE <= AT_ONCE
    scene.handshakes.close()
    scene.let_go.set()
    wait_until(lambda: not _threads(), "they end", 60.0)
    scene.take()
    assert scene.asked_of("dark") == UNVERIFIED_AT_ONCE, "after the end no other host is asked"


def test_as_many_unknown_names_are_looked_up_as_handshakes_with_unverified_hosts_are_under_way() -> (
    None
):
    """A look-up outlasts its handshake: resolvers give up after 10 s by default, handshakes after 5."""
    assert 2 * (FOR_LOADS.unverified_at_once + AHEAD.unverified_at_once) <= MAX_LOOKUPS


def test_prewarms_that_loads_take_over_are_no_more_threads_for_one_host_than_the_limits(
    scene: Scene,
) -> None:
    """Each takeover freed a place for the next prewarm: 240 handshakes with one host were under way at once."""
    for number in range(100):
        scene.handshakes.request_ahead(_key("dark", number))
        scene.ask("dark", number)
    most = FOR_LOADS.per_unverified_host + AHEAD.per_unverified_host
    scene.is_asked("dark", most)
    assert _threads() == scene.asked_of("dark") == most
    assert scene.ask("live") is None
    scene.has_ended("live")
    assert _threads() <= most


def test_a_prewarm_that_a_load_waits_for_arrives_before_the_others_although_it_has_no_place_of_a_load(
    scene: Scene,
) -> None:
    for number in range(FOR_LOADS.per_unverified_host):
        scene.ask("dark", number)
    scene.is_asked("dark", FOR_LOADS.per_unverified_host)
    scene.handshakes.request_ahead(_key("dark", 100))
    scene.is_asked("dark", FOR_LOADS.per_unverified_host + 1)
    assert scene.ask("dark", 100) is None
    for _ in range(2):
        scene.handshakes.request_ahead(_key("dark-ahead"))
    scene.let_go.set()
    wait_until(
        lambda: scene.handshakes.snapshot().arrived == FOR_LOADS.per_unverified_host + 2,
        "all have ended",
        60.0,
    )
    arrived = [key for key, _ in scene.handshakes.arrivals()]
    assert arrived[-1].host == "dark-ahead"
    assert _key("dark", 100) in arrived


def test_handshakes_that_no_load_waits_for_any_more_leave_their_places_unless_they_are_under_way(
    scene: Scene,
) -> None:
    for number in range(20):
        scene.ask("dark", number)
    scene.is_asked("dark", FOR_LOADS.per_unverified_host)
    withdrawn = [scene.handshakes.withdraw(_key("dark", number)) for number in range(20)]
    assert withdrawn.count(True) == 20 - FOR_LOADS.per_unverified_host
    assert len(scene.handshakes) == FOR_LOADS.per_unverified_host
    assert not scene.handshakes.withdraw(_key("dark", 19)), "it is not known any more"
    scene.let_go.set()
    scene.has_ended_all(FOR_LOADS.per_unverified_host)
    assert scene.asked_of("dark") == FOR_LOADS.per_unverified_host


def test_a_host_that_has_answered_leaves_places_for_others_however_many_of_its_ports_are_named(
    scene: Scene,
) -> None:
    scene.handshakes._answered["dark"] = None
    refused = [why for number in range(300) if (why := scene.ask("dark", number)) is not None]
    assert len(scene.handshakes) == FOR_LOADS.wanted // 2
    assert refused[0] == "128 engines of this host have not answered yet"
    assert scene.ask("live") is None
    scene.has_ended("live")
