"""Handshakes: hosts that never answer do not delay others, however many of them clients name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.link.limits import AHEAD, FOR_LOADS, MAX_LOOKUPS
from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.worker.peers.handshakes import Handshakes, OnHandshakeEnd
from kvferry.worker.peers.peer import PeerKey

AT_ONCE, UNVERIFIED_AT_ONCE = FOR_LOADS.at_once, FOR_LOADS.unverified_at_once
ANSWER = PeerRefused("it has restarted")
NO_ANSWER = HandshakeFailed("no answer")


class Scene:
    """Hosts `dark…` do not answer before they are let go, then not at all; all others answer at once.

    Attributes:
        under_way: those that have begun and not ended.
        most: of them at any time.
    """

    def __init__(self) -> None:
        self.asked: list[PeerKey] = []
        self.under_way: list[OnHandshakeEnd] = []
        self.most = 0
        self.ended: list[PeerKey] = []
        self.handshakes = Handshakes(self._begin, lambda: None)
        self._is_dark = True

    def _begin(self, key: PeerKey, on_end: OnHandshakeEnd) -> None:
        self.asked.append(key)
        if not key.host.lower().startswith("dark"):
            on_end(ANSWER)
        elif self._is_dark:
            self.under_way.append(on_end)
            self.most = max(self.most, len(self.under_way))
        else:
            on_end(NO_ANSWER)

    def let_go(self) -> None:
        self._is_dark = False
        while self.under_way:
            self.under_way.pop()(NO_ANSWER)

    def ask(self, host: str, number: int = 0) -> str | None:
        return self.handshakes.request(
            PeerKey(host, 5600 + number, f"E{number}", "0" * 32)
        )

    def take(self) -> None:
        self.ended += [key for key, _ in self.handshakes.arrivals()]

    def asked_of(self, prefix: str) -> int:
        return sum(key.host.startswith(prefix) for key in self.asked)

    def is_asked(self, host: str, count: int = 1) -> None:
        assert self.asked_of(host) >= count

    def has_ended_all(self, count: int) -> None:
        self._take_all()
        assert len(self.ended) == count

    def has_ended(self, host: str) -> None:
        self._take_all()
        assert any(key.host == host for key in self.ended)

    def _take_all(self) -> None:
        self.take()
        while self.handshakes.snapshot().arrived or self.handshakes.results:
            self.take()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.let_go()
    while made.handshakes.snapshot().arrived or made.handshakes.results:
        made.take()
    assert not made.handshakes.wanted


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


def test_one_unverified_host_gets_few_handshakes_and_few_places_in_the_queue(
    scene: Scene,
) -> None:
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


def test_waiting_peers_are_asked_in_turn_when_others_have_answered_or_failed(
    scene: Scene,
) -> None:
    for number in range(UNVERIFIED_AT_ONCE + 10):
        scene.ask(f"dark{number}")
    scene.is_asked("dark", UNVERIFIED_AT_ONCE)
    assert scene.ask("live") is None
    assert scene.asked_of("live") == 0, "it is one of too many unverified hosts"
    scene.let_go()
    scene.has_ended("live")
    assert scene.asked_of("dark") == UNVERIFIED_AT_ONCE + 10


def test_no_peer_is_asked_twice_at_a_time_and_the_queue_is_bounded(
    scene: Scene,
) -> None:
    for _ in range(3):
        assert scene.ask("dark0") is None
    assert len(scene.handshakes.wanted) == 1
    answers = [scene.ask(f"dark{number}") for number in range(1, 300)]
    assert answers.count(None) == 255
    assert answers[-1] == "256 other engines have not answered yet"


def _key(host: str, number: int = 0) -> PeerKey:
    return PeerKey(host, 5600 + number, f"E{number}", "0" * 32)


def test_handshakes_ahead_of_loads_take_no_place_from_those_that_loads_wait_for(
    scene: Scene,
) -> None:
    for number in range(100):
        scene.handshakes.request_ahead(_key(f"dark-ahead{number}"))
    assert len(scene.handshakes.wanted) == AHEAD.wanted
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
    assert len(scene.handshakes.wanted) == AHEAD.unverified_at_once + 1, (
        "the place of the one that was taken over is free"
    )


def test_a_host_that_answered_once_and_then_no_more_is_unverified_again(
    scene: Scene,
) -> None:
    scene.handshakes._answered["dark"] = None
    for number in range(2):
        scene.ask("dark", number)
    scene.is_asked("dark", 2)
    scene.let_go()
    scene.has_ended("dark")
    assert "dark" not in scene.handshakes.snapshot().answered


def test_after_the_end_no_other_host_is_asked(scene: Scene) -> None:
    for number in range(300):
        scene.ask(f"dark{number}")
    assert scene.most == UNVERIFIED_AT_ONCE <= AT_ONCE
    scene.handshakes.drop_waiting()
    scene.let_go()
    scene.take()
    assert scene.asked_of("dark") == UNVERIFIED_AT_ONCE


def test_as_many_unknown_names_are_looked_up_as_handshakes_with_unverified_hosts_are_under_way() -> (
    None
):
    """A look-up outlasts its handshake: resolvers give up after 10 s by default, handshakes after 5."""
    assert 2 * (FOR_LOADS.unverified_at_once + AHEAD.unverified_at_once) <= MAX_LOOKUPS


def test_prewarms_that_loads_take_over_are_no_more_handshakes_with_one_host_than_the_limits(
    scene: Scene,
) -> None:
    """Each takeover freed a place for the next prewarm: 240 handshakes with one host were under way at once."""
    for number in range(100):
        scene.handshakes.request_ahead(_key("dark", number))
        scene.ask("dark", number)
    most = FOR_LOADS.per_unverified_host + AHEAD.per_unverified_host
    scene.is_asked("dark", most)
    assert scene.most == scene.asked_of("dark") == most
    assert scene.ask("live") is None
    scene.has_ended("live")
    assert scene.most <= most


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
    scene.let_go()
    assert scene.handshakes.snapshot().arrived == FOR_LOADS.per_unverified_host + 2
    arrived = [key for key, _ in scene.handshakes.arrivals()]
    assert arrived[-1].host == "dark-ahead"
    assert _key("dark", 100) in arrived


def test_handshakes_that_no_load_waits_for_any_more_leave_their_places_unless_they_are_under_way(
    scene: Scene,
) -> None:
    for number in range(20):
        scene.ask("dark", number)
    scene.is_asked("dark", FOR_LOADS.per_unverified_host)
    withdrawn = [
        scene.handshakes.withdraw(_key("dark", number)) for number in range(20)
    ]
    assert withdrawn.count(True) == 20 - FOR_LOADS.per_unverified_host
    assert len(scene.handshakes.wanted) == FOR_LOADS.per_unverified_host
    assert not scene.handshakes.withdraw(_key("dark", 19)), "it is not known any more"
    scene.let_go()
    scene.has_ended_all(FOR_LOADS.per_unverified_host)
    assert scene.asked_of("dark") == FOR_LOADS.per_unverified_host


def test_a_host_that_has_answered_leaves_places_for_others_however_many_of_its_ports_are_named(
    scene: Scene,
) -> None:
    scene.handshakes._answered["dark"] = None
    refused = [
        why for number in range(300) if (why := scene.ask("dark", number)) is not None
    ]
    assert len(scene.handshakes.wanted) == FOR_LOADS.wanted // 2
    assert refused[0] == "128 engines of this host have not answered yet"
    assert scene.ask("live") is None
    scene.has_ended("live")
