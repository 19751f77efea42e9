"""The watch reads the slots of all loads that wait for a peer together, more and more seldom while none changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from kvferry.protocol.ids import (
    Epoch,
)
from kvferry.protocol.slots import (
    SLOT_BYTES,
    SlotState,
    progress_of,
    progress_word,
    slot_word,
)
from kvferry.worker.fabric.errors import PeerLost, TransferFailed
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region
from kvferry.worker.fabric.reads import FabricReader, RemoteEntries, SlotReads
from kvferry.worker.loads.slot_watch import SlotWatch, Wait
from kvferry.worker.peers.peer import Peer, PeerKey, PeerRoute
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.fault_fabric import FaultFabric

SLOTS = 2000
ENTRIES = 4096
GRACE_S = 0.5
EPOCH = Epoch(77)


class WatchedPeer:
    """A watch, and one peer of two workers whose slots the test writes."""

    def __init__(self) -> None:
        self.network, self.now_s = MemoryNetwork(), 100.0
        self.fabric = FaultFabric(MemoryFabric("c", self.network))
        self.slot_reads = SlotReads(ENTRIES)
        self.fabric.register([self.slot_reads.region()])
        self.slot_reads.prepare(self.fabric)
        self.tables = [np.zeros((SLOTS, 2), dtype=np.uint64) for _ in range(2)]
        self.peer = self._peer()
        self.watch = SlotWatch(
            FabricReader(self.fabric, GRACE_S, lambda: self.now_s), self.slot_reads
        )

    def _peer(self) -> Peer:
        routes = []
        for index, table in enumerate(self.tables):
            producer = MemoryFabric(f"p{index}", self.network)
            producer.register(
                [Region(table.ctypes.data, table.nbytes, MemoryKind.DRAM)]
            )
            agent = self.fabric.add_peer(producer.metadata())
            row = (table.ctypes.data, SLOT_BYTES, 0, SLOT_BYTES, SLOTS)
            slots = self.fabric.prepare_remote(
                agent, DescriptorRows.from_tuples(MemoryKind.DRAM, [row])
            )
            entries = RemoteEntries(slots, None)
            routes.append(PeerRoute(cast("Any", None), agent, entries, None, ()))
        return Peer(
            PeerKey("host", 1, "engine", "0" * 32),
            cast("Any", None),
            cast("Any", None),
            tuple(routes),
            (),
        )

    def add(self, slot: int, num_tokens: int = 1, until_s: float = math.inf) -> Wait:
        words = tuple(
            (int(table[slot, 0]), int(table[slot, 1])) for table in self.tables
        )
        made = Wait(self.peer, slot, words, EPOCH, num_tokens, until_s)
        self.watch.add(made, self.now_s)
        return made

    def report(self, slot: int, tokens: int) -> None:
        """Both workers say that so many tokens of a prompt are complete."""
        for table in self.tables:
            table[slot] = (
                slot_word(EPOCH, SlotState.COMPUTING),
                progress_word(EPOCH, tokens),
            )

    def step(self, seconds: float = 0.0) -> list[Wait]:
        self.now_s += seconds
        return self.watch.step(self.now_s)[0]

    def posts(self) -> int:
        return self.fabric.calls["post_read"]

    def nothing_is_left(self) -> bool:
        transfers = self.fabric.open_handles().transfers
        return (
            self.slot_reads.free() == ENTRIES
            and not transfers
            and not list(self.watch.polls())
        )


@pytest.fixture
def scene() -> WatchedPeer:
    return WatchedPeer()


def test_one_read_of_each_worker_serves_all_waits_and_those_whose_slot_changed_are_over(
    scene: WatchedPeer,
) -> None:
    waits = [scene.add(slot) for slot in (7, 3, 500, 3, 1999)]
    assert scene.step() == []
    assert scene.posts() == 2
    scene.tables[1][3] = 5, 6
    scene.tables[0][1999, 1] = 8
    assert set(scene.step(0.001)) == {waits[1], waits[3], waits[4]}
    assert scene.posts() == 4
    assert waits[1].words == waits[3].words == ((0, 0), (5, 6))
    assert waits[4].words == ((0, 8), (0, 0))
    scene.tables[0][7, 0] = 1
    assert scene.step(0.001) == [waits[0]]
    assert scene.nothing_is_left()


@pytest.mark.parametrize("mapped", [0, 1])
def test_one_poll_has_the_words_of_workers_that_are_mapped_and_of_those_that_are_read(
    scene: WatchedPeer, mapped: int
) -> None:
    """In the order of the peer's workers, whichever is mapped."""
    routes = list(scene.peer.routes)
    slots = RemoteEntries(routes[mapped].slots.descriptors, scene.tables[mapped])
    routes[mapped] = replace(routes[mapped], slots=slots)
    scene.peer = replace(scene.peer, routes=tuple(routes))
    waits = [scene.add(slot) for slot in (9, 4)]
    assert scene.step() == []
    assert scene.posts() == 1, "the other worker alone is read"
    scene.tables[0][4] = 1, 2
    scene.tables[1][4] = 3, 4
    assert scene.step(0.001) == [waits[1]]
    assert waits[1].words == ((1, 2), (3, 4))
    scene.tables[mapped][9, 1] = 5
    assert scene.step(0.001) == [waits[0]]
    assert waits[0].words[mapped] == (0, 5)
    assert waits[0].words[1 - mapped] == (0, 0)
    assert scene.nothing_is_left()


def test_looks_begin_a_millisecond_apart_and_up_to_five_while_nothing_changes(
    scene: WatchedPeer,
) -> None:
    scene.add(1)
    begun_s: list[float] = []
    for _ in range(4000):
        before = scene.posts()
        scene.step(0.0001)
        if scene.posts() > before:
            begun_s.append(scene.now_s)
    intervals_ms = [round((after - one) * 1e3, 1) for one, after in pairwise(begun_s)]
    assert intervals_ms[:5] == [1.0] * 5
    assert intervals_ms == sorted(intervals_ms)
    assert intervals_ms[-1] == pytest.approx(5.0, abs=0.11)
    scene.add(2)
    before = scene.posts()
    scene.step(0.0011)
    assert scene.posts() == before + 2, "a new wait is served at once"


def looks_of_a_step(
    scene: WatchedPeer,
    seconds: float,
    tokens: int = 16,
    slot: int = 1,
    missing: int = 160,
) -> list[float]:
    """A step of a producer, which computes so many tokens of a prompt that lacks some more. Returns when looks for them
    begin, in seconds from its start."""
    begun_s: list[float] = []
    before = progress_of(int(scene.tables[0][slot, 1]), EPOCH)
    scene.report(slot, before)
    scene.add(slot, before + missing)
    first_s = scene.now_s
    for _ in range(round(seconds / 0.0005)):
        posts = scene.posts()
        scene.step(0.0005)
        begun_s += [scene.now_s - first_s] * (scene.posts() > posts)
    scene.report(slot, before + tokens)
    while not scene.step(0.0005):
        pass
    return begun_s


def test_no_look_begins_in_three_quarters_of_the_time_that_the_two_steps_before_took(
    scene: WatchedPeer,
) -> None:
    for _ in range(3):
        first = looks_of_a_step(scene, 0.06)
    assert first[0] < 0.002, "one step's time says little"
    steady = looks_of_a_step(scene, 0.06)
    assert steady[0] == pytest.approx(0.045, abs=0.004)
    assert len(steady) > 3
    scene.report(1000, 0)
    scene.add(1000, 900)
    assert looks_of_a_step(scene, 0.06)[0] > 0.04, "others that wait change nothing"


def test_steps_of_uneven_length_are_looked_at_as_early_as_the_short_ones_want(
    scene: WatchedPeer,
) -> None:
    for _ in range(4):
        looks_of_a_step(scene, 0.06)
        looks_of_a_step(scene, 0.004)
    assert looks_of_a_step(scene, 0.06)[0] < 0.01


def test_looks_begin_fifty_milliseconds_after_a_step_at_the_latest(
    scene: WatchedPeer,
) -> None:
    for _ in range(4):
        steady = looks_of_a_step(scene, 1.0)
    assert steady[0] == pytest.approx(0.05, abs=0.004)


def test_a_prompts_last_step_is_looked_at_earlier_by_as_much_as_it_is_smaller(
    scene: WatchedPeer,
) -> None:
    for _ in range(4):
        looks_of_a_step(scene, 0.06)
    assert looks_of_a_step(scene, 0.06, tokens=4, missing=4)[0] == pytest.approx(
        0.045 / 4, abs=0.004
    )


def test_a_prompt_that_begins_after_another_waits_for_the_same_steps(
    scene: WatchedPeer,
) -> None:
    for _ in range(4):
        looks_of_a_step(scene, 0.06)
    scene.step(0.005)
    assert looks_of_a_step(scene, 0.06, slot=2)[0] == pytest.approx(0.04, abs=0.004)
    scene.step(0.06)
    assert looks_of_a_step(scene, 0.06, slot=3)[0] < 0.002, "the producer has been idle"


def test_a_wait_ends_when_its_time_is_over_by_a_look_that_began_later(
    scene: WatchedPeer,
) -> None:
    scene.network.freeze("p1")
    wait = scene.add(1, until_s=scene.now_s + 0.01)
    assert scene.step() == []
    scene.network.thaw("p1")
    assert scene.step(0.02) == [], "this look began before"
    scene.tables[0][1, 1] = 9
    while not (over := scene.step(0.001)):
        pass
    assert over == [wait]
    assert wait.words == ((0, 9), (0, 0))


def test_more_waits_than_a_look_has_entries_for_are_served_in_turn(
    scene: WatchedPeer,
) -> None:
    waits = {scene.add(slot) for slot in range(1500)}
    assert scene.step() == []
    assert scene.posts() == 2
    assert scene.slot_reads.free() == ENTRIES
    for table in scene.tables:
        table[:1500, 0] = 1
    over = {wait for _ in range(3) for wait in scene.step(0.001)}
    assert over == waits


def failure() -> Exception:
    return TransferFailed("post", "the test")


FAILURES: dict[str, tuple[Callable[[WatchedPeer], None], type[Exception]]] = {
    "a post fails": (
        lambda scene: scene.fabric.fail("post_read", failure),
        TransferFailed,
    ),
    "the second post fails": (
        lambda scene: scene.fabric.fail("post_read", failure, first=1),
        TransferFailed,
    ),
    "a read fails": (lambda scene: scene.network.fail_reads("p1"), TransferFailed),
    "the peer dies": (lambda scene: scene.network.kill("p0"), PeerLost),
    "a bug": (
        lambda scene: scene.fabric.fail("post_read", lambda: ZeroDivisionError("bug")),
        ZeroDivisionError,
    ),
}


@pytest.mark.parametrize(("fault", "error"), FAILURES.values(), ids=FAILURES)
def test_a_failed_look_fails_all_waits_and_its_entries_come_back_when_they_are_safe(
    scene: WatchedPeer, fault: Callable[[WatchedPeer], None], error: type[Exception]
) -> None:
    waits = {scene.add(slot) for slot in range(20)}
    fault(scene)
    over: list[Wait] = []
    while not over:
        over = scene.step(0.001)
    assert set(over) == waits
    assert {type(wait.error) for wait in waits} == {error}
    assert scene.watch.next_s() is None
    scene.step(2 * GRACE_S)
    scene.step(2 * GRACE_S)
    assert scene.nothing_is_left()


def test_a_look_that_no_load_waits_for_any_more_is_kept_until_it_has_ended(
    scene: WatchedPeer,
) -> None:
    scene.network.freeze("p1")
    wait = scene.add(4)
    scene.step()
    scene.watch.remove(wait)
    assert scene.step(0.001) == []
    assert len(scene.watch.closing) == 1
    assert not scene.watch.busy()
    assert scene.slot_reads.free() == ENTRIES - 2
    scene.add(5)
    assert scene.step(0.001) == []
    assert len(list(scene.watch.polls())) == 2, "a new wait has its own look"
    scene.network.thaw("p1")
    scene.tables[0][5, 0] = 1
    scene.step(0.001)
    scene.step(0.001)
    assert scene.nothing_is_left()


def test_a_look_survives_the_next_wait_for_its_peer(scene: WatchedPeer) -> None:
    scene.network.freeze("p1")
    wait = scene.add(4)
    scene.step()
    scene.watch.remove(wait)
    scene.now_s += 5.0
    scene.add(5)
    assert len(scene.watch.closing) == 1
    assert scene.step(0.001) == []
    scene.network.thaw("p1")
    scene.tables[0][5, 0] = 1
    assert len([wait for _ in range(3) for wait in scene.step(0.002)]) == 1
    assert scene.nothing_is_left()


def test_without_free_entries_the_watch_waits_for_some(scene: WatchedPeer) -> None:
    taken = scene.slot_reads.try_take(ENTRIES)
    assert taken is not None
    scene.add(1)
    scene.tables[0][1, 0] = 1
    assert scene.step() == []
    next_s = scene.watch.next_s()
    assert next_s is not None
    assert next_s > scene.now_s
    scene.slot_reads.give_back(taken)
    assert len(scene.step(0.0011)) == 1
