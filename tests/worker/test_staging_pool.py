"""The staging pool against a model that keeps an owner per cell, and what follows for large and small loads."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import note, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.staging.pool import PoolTooSmall, StagingPool, Wave
from tests.draws import draws
from tests.harness.integrity import pool_errors

CELL = 256
LOADS = tuple("abcdef")
PEERS = {"a": "one", "b": "one", "c": "one", "d": "two", "e": "two", "f": "three"}


def pool_of(cells: int) -> StagingPool:
    return StagingPool(cells * CELL, alignment=CELL)


def take(
    pool: StagingPool,
    load: str,
    cells: int,
    peer: str | None = None,
    at_least: int | None = None,
) -> Wave | None:
    least = None if at_least is None else at_least * CELL
    return pool.try_take(load, peer or load, cells * CELL, at_least=least)


def taken(pool: StagingPool, load: str, cells: int, peer: str | None = None) -> Wave:
    wave = take(pool, load, cells, peer)
    assert wave is not None
    assert wave.num_bytes == cells * CELL
    return wave


class CellModel:
    """The rules of the pool, cell by cell: its owner (None: free), and whether it is quarantined."""

    def __init__(self, cells: int) -> None:
        self.owner: list[tuple[str, int] | None] = [None] * cells
        self.quarantined: set[tuple[str, int]] = set()
        self.queue: list[tuple[str, int, int]] = []
        self.taken = 0

    def cells_of_peer(self, peer: str, quarantined_only: bool = False) -> int:
        return sum(
            PEERS[owner[0]] == peer
            and (not quarantined_only or owner in self.quarantined)
            for owner in self.owner
            if owner
        )

    def live_waves(self, load: str) -> int:
        return len(
            {
                owner
                for owner in self.owner
                if owner and owner[0] == load and owner not in self.quarantined
            }
        )

    def fits_at(self, size: int, free: list[bool]) -> int | None:
        return next(
            (at for at in range(len(free) - size + 1) if all(free[at : at + size])),
            None,
        )

    def possible(self, peer: str, wanted: int, least: int) -> int:
        """The largest size in `[least, wanted]` that fits once only quarantined cells are taken; 0: there is none."""
        free = [owner is None or owner not in self.quarantined for owner in self.owner]
        for size in range(wanted, least - 1, -1):
            within = (
                free.count(True) - size
                >= self.cells_of_peer(peer, quarantined_only=True) + size
            )
            if within and self.fits_at(size, free) is not None:
                return size
        return 0

    def over_share(self, peer: str, size: int) -> bool:
        """It would leave less free than its peer then has."""
        return self.owner.count(None) - size < self.cells_of_peer(peer) + size

    def waits_for_its_own(self, peer: str, size: int) -> bool:
        return self.over_share(peer, size) and any(
            PEERS[owner[0]] == peer and owner not in self.quarantined
            for owner in self.owner
            if owner
        )

    def ask(self, load: str, wanted: int, least: int) -> tuple[int, int] | None:
        """Start and size of what must be granted."""
        granted = self._granted(load, wanted, least)
        if granted is not None:
            self.queue = [entry for entry in self.queue if entry[0] != load]
            self.taken += 1
            for cell in range(granted[0], sum(granted)):
                self.owner[cell] = (load, self.taken)
        elif self.live_waves(load) == 0:
            if load not in [entry[0] for entry in self.queue]:
                self.queue.append((load, wanted, least))
            self.queue = [
                (load, wanted, least) if entry[0] == load else entry
                for entry in self.queue
            ]
        return granted

    def _granted(self, load: str, wanted: int, least: int) -> tuple[int, int] | None:
        peer, size = PEERS[load], self.possible(PEERS[load], wanted, least)
        if self.live_waves(load) == 2 or size == 0 or self.over_share(peer, size):
            return None
        names = [entry[0] for entry in self.queue]
        for other, other_wanted, other_least in self.queue[
            : names.index(load) if load in names else None
        ]:
            other_size = self.possible(PEERS[other], other_wanted, other_least)
            if other_size and (
                PEERS[other] == peer
                or not self.waits_for_its_own(PEERS[other], other_size)
            ):
                return None
        at = self.fits_at(size, [owner is None for owner in self.owner])
        return None if at is None else (at, size)


class PoolHistories(RuleBasedStateMachine):
    """Loads ask, give back, quarantine and withdraw, in any order."""

    @initialize(cells=st.integers(8, 40))
    def start(self, cells: int) -> None:
        self.cells = cells
        self.pool = pool_of(cells)
        self.model = CellModel(cells)
        self.waves: list[tuple[Wave, tuple[str, int]]] = []

    @rule(load=st.sampled_from(LOADS), wanted=st.integers(1, 7), data=st.data())
    def ask(self, load: str, wanted: int, data: st.DataObject) -> None:
        largest = self.cells // 8
        least = data.draw(
            st.none() | st.integers(1, min(wanted, largest)), label="at least"
        )
        wave = take(self.pool, load, wanted, PEERS[load], least)
        cut = min(wanted, largest)
        expected = self.model.ask(load, cut, cut if least is None else least)
        note(f"{load} asked for {wanted} (at least {least}): {wave}, {expected}")
        if expected is None:
            assert wave is None
        else:
            assert wave is not None
            assert (wave.start // CELL, wave.num_bytes // CELL) == expected
            assert (wave.load, wave.peer) == (load, PEERS[load])
            self.waves.append((wave, (load, self.model.taken)))

    @precondition(lambda self: self.waves)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        wave, owner = self.waves.pop(data.draw(st.integers(0, len(self.waves) - 1)))
        self.pool.give_back(wave)
        self.model.owner = [
            None if cell == owner else cell for cell in self.model.owner
        ]
        self.model.quarantined.discard(owner)

    @precondition(
        lambda self: any(owner not in self.model.quarantined for _, owner in self.waves)
    )
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        live = [entry for entry in self.waves if entry[1] not in self.model.quarantined]
        wave, owner = data.draw(st.sampled_from(live))
        self.pool.quarantine(wave)
        self.model.quarantined.add(owner)

    @rule(load=st.sampled_from(LOADS))
    def withdraw(self, load: str) -> None:
        self.pool.withdraw(load)
        self.model.queue = [entry for entry in self.model.queue if entry[0] != load]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert pool_errors(self.pool.snapshot()) == []
        assert (
            self.pool.free_bytes
            == CELL * self.model.owner.count(None)
            + self.pool.capacity
            - self.cells * CELL
        )
        held = [owner for owner in self.model.owner if owner]
        assert self.pool.snapshot().quarantined_bytes == CELL * sum(
            owner in self.model.quarantined for owner in held
        )
        assert self.pool.waiting == tuple(entry[0] for entry in self.model.queue)
        for peer in set(PEERS.values()):
            assert self.pool.held_by(peer) == CELL * self.model.cells_of_peer(peer)
        for load, wanted, least in self.model.queue:
            assert self.pool.lacks_room(load) == (
                not self.model.possible(PEERS[load], wanted, least)
            )

    def teardown(self) -> None:
        """No load waits for ever: with everything given back, each in the queue is served in turn."""
        if not hasattr(self, "pool"):
            return
        for wave, _ in self.waves:
            self.pool.give_back(wave)
        for load, wanted, least in self.model.queue:
            granted = take(self.pool, load, wanted, PEERS[load], least)
            assert granted is not None, f"{load} is starved"
            self.pool.give_back(granted)
        assert self.pool.free_bytes == self.pool.capacity
        assert pool_errors(self.pool.snapshot()) == []


TestPoolHistories = PoolHistories.TestCase
TestPoolHistories.settings = settings(max_examples=draws(120), stateful_step_count=40)


def test_sizes_are_rounded_up_to_the_alignment_and_cut_at_an_eighth() -> None:
    pool = StagingPool(64 * 256 + 100, alignment=256)
    wave = pool.try_take("load", "peer", 257)
    assert wave is not None
    assert wave.num_bytes == 512
    second = pool.try_take("load", "peer", 1 << 40)
    assert second is not None
    assert (second.start, second.num_bytes) == (512, 8 * 256)


def test_a_pool_without_eight_waves_is_refused_by_name() -> None:
    with pytest.raises(
        PoolTooSmall, match=r"staging_pool_bytes is 2047; expected at least 2048"
    ):
        StagingPool(2047, alignment=256)
    assert StagingPool(2048, alignment=256).largest_wave == 256


def test_what_no_wave_can_hold_is_refused_with_the_size_that_would_do() -> None:
    pool = pool_of(64)
    assert pool.try_take("load", "peer", 99 * CELL, at_least=8 * CELL) is not None
    with pytest.raises(
        PoolTooSmall,
        match=rf"staging_pool_bytes is {64 * CELL}; expected at least {72 * CELL}",
    ):
        pool.try_take("other", "peer", 99 * CELL, at_least=8 * CELL + 1)
    assert pool.waiting == ()


def test_what_is_not_out_cannot_come_back() -> None:
    pool = pool_of(8)
    wave = taken(pool, "load", 1)
    pool.quarantine(wave)
    with pytest.raises(LocalProtocolError, match="twice"):
        pool.quarantine(wave)
    pool.give_back(wave)
    for misuse in (pool.give_back, pool.quarantine):
        with pytest.raises(LocalProtocolError, match="load=load peer=load"):
            misuse(wave)
    with pytest.raises(LocalProtocolError, match="asks for 0 bytes"):
        pool.try_take("load", "peer", 0)
    assert pool.free_bytes == pool.capacity


def fill(pool: StagingPool, peer: str, cells: int) -> list[Wave]:
    """All that loads of one peer can have at once."""
    waves: list[Wave] = []
    while (wave := take(pool, f"{peer}-{len(waves)}", cells, peer)) is not None:
        waves.append(wave)
    pool.withdraw(f"{peer}-{len(waves)}")
    return waves


def test_peers_that_stand_still_leave_room_for_the_next_however_many_they_are() -> None:
    """All of their waves go into quarantine at once, as when a switch fails."""
    pool = pool_of(64)
    held = {peer: fill(pool, peer, 8) for peer in ("one", "two", "three")}
    assert [
        sum(wave.num_bytes for wave in waves) // CELL for waves in held.values()
    ] == [32, 16, 8]
    for waves in held.values():
        for one in waves:
            pool.quarantine(one)
    for peer, cells in (("four", 4), ("five", 2), ("six", 1)):
        wave = take(pool, peer, 8, peer, at_least=1)
        assert wave is not None
        assert wave.num_bytes == cells * CELL
        pool.quarantine(wave)
    assert pool.free_bytes == CELL
    assert take(pool, "seven", 8, "seven", at_least=1) is None
    assert pool.lacks_room("seven")
    pool.give_back(held["three"][0])
    assert not pool.lacks_room("seven")
    assert take(pool, "seven", 8, "seven", at_least=1) is not None


def test_a_peer_that_has_its_share_keeps_no_other_waiting_and_is_served_when_it_gives_some_back() -> (
    None
):
    pool = pool_of(64)
    held = fill(pool, "one", 8)
    assert take(pool, "more", 8, "one") is None
    assert not pool.lacks_room("more"), "its own waves come back"
    taken(pool, "other", 8, "two")
    pool.give_back(held[0])
    assert take(pool, "more", 8, "one") is None, (
        "beside another peer the share is smaller"
    )
    pool.give_back(held[1])
    taken(pool, "more", 8, "one")


def test_a_load_that_waits_for_other_peers_waves_is_not_overtaken_for_ever() -> None:
    pool = pool_of(64)
    waves = [wave for peer in ("one", "two", "three") for wave in fill(pool, peer, 8)]
    assert take(pool, "late", 8, "four") is None
    pool.give_back(waves.pop())
    assert take(pool, "again", 8, "three") is None, "it is not its turn"
    pool.give_back(waves.pop())
    taken(pool, "late", 8, "four")
