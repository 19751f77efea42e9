"""Slots for connections: whatever addresses clients name, other hosts and known addresses do not wait for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine

import pytest

from kvferry.link import limits
from kvferry.link.connection_slots import (
    SLOTS_PER_TURN,
    ConnectionSlot,
    ConnectionSlots,
    TurnKind,
)
from kvferry.protocol.errors import HandshakeFailed
from kvferry.protocol.hosts import ChannelAddress

NEVER_S = 30.0
MOST = 64
AT_ONCE = {kind: MOST // slots for kind, slots in SLOTS_PER_TURN.items()}


class Connection:
    def close(self, linger_ms: int) -> None:
        assert linger_ms == 1


class Scene:
    """Hosts `silent…` do not answer, `closed…` fail at once, all others are connected at once."""

    def __init__(self, most: int = MOST) -> None:
        self.places = ConnectionSlots(most)
        self.begun: list[ChannelAddress] = []
        self.given_up: list[ChannelAddress] = []
        self.connected: dict[ChannelAddress, ConnectionSlot] = {}
        self.failed: dict[ChannelAddress, HandshakeFailed] = {}
        self.tasks: dict[ChannelAddress, asyncio.Task[None]] = {}

    async def connect(
        self, host: str, port: int = 1, kind: TurnKind = TurnKind.NAMED
    ) -> None:
        """Begin to connect, and let everything happen that can."""
        self.begin(host, port, kind)
        await settle()

    def begin(self, host: str, port: int = 1, kind: TurnKind = TurnKind.NAMED) -> None:
        self.tasks[host, port] = asyncio.ensure_future(
            self._connect((host, port), kind)
        )

    async def _connect(self, address: ChannelAddress, kind: TurnKind) -> None:
        async def open_connection() -> Connection:
            self.begun.append(address)
            if address[0].startswith("silent"):
                await asyncio.sleep(NEVER_S)
            if address[0].startswith("closed"):
                raise HandshakeFailed("nothing listens there")
            return Connection()

        def give_up() -> None:
            self.given_up.append(address)
            self.connected.pop(address).close(1)

        try:
            self.connected[address] = await self.places.connect(
                address,
                open_connection,  # type: ignore[arg-type]
                give_up,
                kind,
            )
        except HandshakeFailed as failed:
            self.failed[address] = failed

    async def cancel_all(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await settle()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def play(scene: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), NEVER_S))


def test_silent_addresses_of_one_host_delay_no_other_host_and_none_that_was_connected_before() -> (
    None
):
    async def run() -> None:
        scene = Scene()
        await scene.connect("silent-not", 5600)
        scene.places.prove(("silent", 5600))
        for port in range(300):
            scene.begin("silent", port)
        await settle()
        assert len(scene.begun) == 1 + AT_ONCE[TurnKind.NAMED] // 2
        await scene.connect("other")
        assert ("other", 1) in scene.connected
        await scene.connect("silent", 5600)
        assert scene.begun[-1] == ("silent", 5600)
        await scene.cancel_all()

    play(run)


def test_a_host_that_is_written_in_many_ways_is_one_host() -> None:
    """Clients choose how they write it: each way had a share of its own, and together they had all turns."""

    async def run() -> None:
        scene = Scene()
        for port in range(300):
            letters = zip("example", f"{port % 128:07b}", strict=True)
            scene.begin(
                "silent."
                + "".join(one.upper() if up == "1" else one for one, up in letters),
                port,
            )
        await settle()
        assert len(scene.begun) == AT_ONCE[TurnKind.NAMED] // 2
        await scene.connect("other")
        assert ("other", 1) in scene.connected
        await scene.cancel_all()

    play(run)


def test_hosts_take_turns_when_there_are_too_many() -> None:
    async def run() -> None:
        scene = Scene()
        for host in range(100):
            for port in range(3):
                scene.begin(f"silent{host}", port)
        await settle()
        assert len(scene.begun) == AT_ONCE[TurnKind.NAMED]
        assert len({host for host, _ in scene.begun}) == AT_ONCE[TurnKind.NAMED]
        scene.begin("live")
        while ("live", 1) not in scene.connected:
            assert len(scene.begun) <= 100 + AT_ONCE[TurnKind.NAMED], (
                "it waits for the third turn of another"
            )
            scene.tasks[scene.begun[-1]].cancel()
            await settle()
        await scene.cancel_all()

    play(run)


def test_what_an_engine_offers_has_few_turns_of_its_own() -> None:
    async def run() -> None:
        scene = Scene()
        for port in range(255):
            scene.begin("silent", port, TurnKind.SIBLING)
        await settle()
        assert len(scene.begun) == AT_ONCE[TurnKind.SIBLING] // 2
        await scene.connect("silent", 5600)
        assert scene.begun[-1] == ("silent", 5600)
        await scene.cancel_all()

    play(run)


def test_addresses_that_do_not_answer_close_no_idle_connection() -> None:
    async def run() -> None:
        scene = Scene(most=16)
        for number in range(16):
            await scene.connect(f"good{number}")
            scene.connected[f"good{number}", 1].idle()
        for port in range(300):
            scene.begin("closed", port)
        for port in range(100):
            scene.begin("silent", port)
        while len(scene.failed) < 300:
            await settle()
        assert not scene.given_up
        assert len(scene.connected) == 16
        await scene.cancel_all()

    play(run)


def test_one_in_use_is_never_given_up_and_of_idle_ones_first_that_of_the_same_host() -> (
    None
):
    async def run() -> None:
        scene = Scene(most=4)
        others = [(f"e{number}", 1) for number in range(4)]
        for host, port in (("a", 1), ("b", 1), ("b", 2), ("c", 1), *others):
            await scene.connect(host, port)
            scene.connected[host, port].idle()
        scene.connected["a", 1].use()
        await scene.connect("c", 2)
        assert scene.given_up == [("c", 1)]
        await scene.connect("d", 1)
        assert scene.given_up[1:] == [("b", 1)]
        await scene.connect("d", 2)
        assert scene.given_up[2:] == [("b", 2)] or not scene.given_up[2:]
        assert ("a", 1) in scene.connected
        assert len(scene.places) <= 2 * 4

    play(run)


def test_a_host_has_half_of_the_places_at_most_and_goes_on_when_one_is_idle() -> None:
    async def run() -> None:
        scene = Scene(most=8)
        for port in range(8):
            await scene.connect("a", port)
        assert len(scene.connected) == 4
        await scene.connect("b")
        assert len(scene.connected) == 5
        scene.connected["a", 0].idle()
        await settle()
        assert ("a", 4) in scene.connected
        assert len(scene.connected) == 6, "a has four in use, and three are free"
        await scene.cancel_all()

    play(run)


def test_waiting_addresses_are_bounded_and_one_host_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_WAITING", 64)

    async def run() -> None:
        scene = Scene()
        for port in range(200):
            await scene.connect("silent", port)
        assert len(scene.failed) == 200 - AT_ONCE[TurnKind.NAMED] // 2 - 32
        await scene.connect("other")
        assert ("other", 1) in scene.connected
        await scene.cancel_all()

    play(run)


def test_addresses_that_wait_for_queries_have_no_renewal_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients can name as many hosts as may wait, and one that was not connected yet could not be renewed."""
    monkeypatch.setattr(limits, "MAX_WAITING", 64)

    async def run() -> None:
        scene = Scene()
        for host in range(200):
            await scene.connect(f"silent{host}")
        await scene.connect("other")
        assert ("other", 1) in scene.failed
        await scene.connect("other", kind=TurnKind.MESSAGE)
        assert ("other", 1) in scene.connected
        await scene.cancel_all()

    play(run)


def test_with_few_files_there_are_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    assert ConnectionSlots(256).capacity == 64


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_cancelled_closed_or_given_up_no_place_and_no_turn_is_lost(
    seed: int,
) -> None:
    dice = random.Random(seed)

    async def run() -> None:
        scene = Scene(most=6)
        for number in range(400):
            host = dice.choice(["silent", "closed", "a", "b", "c"])
            scene.begin(host, number, dice.choice(list(TurnKind)))
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            for task in dice.sample(
                list(scene.tasks.values()), min(3, len(scene.tasks))
            ):
                if dice.random() < 0.3:
                    task.cancel()
            for place in dice.sample(
                list(scene.connected.values()), min(3, len(scene.connected))
            ):
                dice.choice([place.idle, place.use, place.idle])()
            if scene.connected and dice.random() < 0.1:
                scene.connected.pop(dice.choice(list(scene.connected))).close(1)
        await scene.cancel_all()
        for place in list(scene.connected.values()):
            place.idle()
        await settle()
        for place in scene.connected.values():
            place.close(1)
        await settle()
        places = scene.places
        assert len(places) == 0
        left = places.snapshot()
        assert (left.in_use, left.idle, left.connecting, left.waiting) == (
            {},
            {},
            {},
            {},
        )
        scene.connected.clear()
        await scene.connect("after")
        assert ("after", 1) in scene.connected

    play(run)


def test_an_address_that_was_connected_before_does_not_wait_for_new_ones() -> None:
    """A producer is asked for a prompt, or prewarmed, before its leases are renewed."""

    async def run() -> None:
        scene = Scene()
        await scene.connect("good", 5600)
        scene.connected.pop(("good", 5600)).close(1)
        for port in range(300):
            scene.begin("silent", port, TurnKind.MESSAGE)
            scene.begin(f"silent{port}", 1, TurnKind.MESSAGE)
        await scene.connect("good", 5600, TurnKind.MESSAGE)
        assert ("good", 5600) in scene.connected
        await scene.cancel_all()

    play(run)


def test_messages_have_connections_although_queries_need_all_slots() -> None:
    """Leases expire unless they are renewed, whatever clients let an engine query."""

    async def run() -> None:
        scene = Scene(most=8)
        for number in range(20):
            await scene.connect(f"queried{number}")
        num_queried = len(scene.connected)
        assert num_queried == 8
        for number in range(20):
            await scene.connect(f"renewed{number}", kind=TurnKind.MESSAGE)
            scene.connected[f"renewed{number}", 1].idle()
        assert len(scene.connected) == 2 * 8
        renewed = [host for host, _ in scene.given_up]
        assert renewed == [f"renewed{number}" for number in range(12)], (
            "the longest idle ones"
        )
        await scene.cancel_all()

    play(run)


def test_connections_made_for_messages_bring_a_host_no_more_slots_for_queries_than_its_share() -> (
    None
):
    async def run() -> None:
        scene = Scene(most=8)
        for port in range(12):
            await scene.connect("a", port, TurnKind.MESSAGE)
        for slot in list(scene.connected.values()):
            slot.use()
        assert scene.places.snapshot().in_use == {"a": 4}
        await scene.connect("b")
        assert scene.places.snapshot().in_use == {"a": 4, "b": 1}
        await scene.cancel_all()

    play(run)
