"""Both ledgers and the lease table together, over a network that loses, repeats and reorders messages."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.ids import EMPTY
from kvferry.scheduler.producer.lease import LeaseUse
from kvferry.scheduler.state import Counters
from tests.scheduler.fleet import Fleet
from tests.scheduler.producer_end import FREE

WORKERS = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
SEEDS = st.integers(0, 2**32)
QUIET_TICKS = 400


def run_dry(fleet: Fleet) -> None:
    """Run without new requests until everything that was begun has ended."""
    for _ in range(QUIET_TICKS):
        fleet.tick(busy=False)
        if fleet.is_quiet():
            break


def ended(counters: Counters, how: str) -> int:
    """Leases of prompts and of turns that ended in one way."""
    return sum(counters.total(f"{use.value}_released", how) for use in LeaseUse)


def nothing_is_left(fleet: Fleet) -> None:
    """Every slot, block and claim is free, and every request was reported exactly once."""
    producer, consumer = fleet.producer, fleet.consumer
    assert len(producer.ledger) == 0
    assert set(producer.blocks) == {FREE}
    for worker in producer.workers:
        assert set(worker.table.words.tolist()) == {EMPTY}
        assert worker.table.held() == 0
    assert set(producer.sent.values()) <= {1}
    released = Counter({how: ended(producer.counters, how) for how in ("done", "release", "expired")})
    assert released.total() == producer.sent.total()
    opened = producer.counters.total("leases_opened") + producer.counters.total("turns_opened")
    assert opened == released.total() + ended(producer.counters, "abandoned")
    if fleet.consumer_lives:
        assert len(consumer.ledger) == 0
        assert not consumer.kept
        assert not any(worker.loads for worker in consumer.workers)


@given(seed=SEEDS, workers=WORKERS, loss=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=200)
def test_nothing_leaks_and_no_reused_block_is_accepted_whatever_the_network_does(
    seed: int, workers: tuple[int, int], loss: float
) -> None:
    fleet = Fleet(seed, workers=workers, loss=loss)
    for _ in range(250):
        fleet.tick()
    run_dry(fleet)
    nothing_is_left(fleet)


@given(seed=SEEDS, workers=WORKERS, ticks=st.integers(1, 150))
@settings(max_examples=100)
def test_everything_is_freed_within_a_lease_after_the_consumer_died(
    seed: int, workers: tuple[int, int], ticks: int
) -> None:
    """The bound itself, lease and one step, is checked by the fleet at every step."""
    fleet = Fleet(seed, workers=workers)
    for _ in range(ticks):
        fleet.tick()
    fleet.kill_consumer()
    run_dry(fleet)
    nothing_is_left(fleet)


def test_the_random_histories_contain_every_end_of_a_lease_and_a_load() -> None:
    """Otherwise the tests above would prove little."""
    ends: Counter[str] = Counter()
    for seed in range(12):
        fleet = Fleet(seed, workers=(2, 2), loss=0.3)
        for _ in range(300):
            fleet.tick()
        run_dry(fleet)
        nothing_is_left(fleet)
        for how in ("done", "release", "expired", "abandoned"):
            for use in LeaseUse:
                ends[f"{use.value} {how}"] += fleet.producer.counters.total(f"{use.value}_released", how)
        ends["refused for want of a slot"] += fleet.producer.counters.total("leases_refused")
        ends["loaded"] += len(fleet.consumer.good)
        ends["failed"] += fleet.consumer.counters.total("loads") - len(fleet.consumer.good)
    assert min(ends.values()) >= 5, ends
    assert len(ends) == 11, ends


@given(seed=SEEDS, workers=WORKERS)
@settings(max_examples=20)
def test_on_a_good_network_every_load_is_good_and_no_lease_expires(seed: int, workers: tuple[int, int]) -> None:
    fleet = Fleet(seed, workers=workers, perfect=True)
    for _ in range(150):
        fleet.tick()
    run_dry(fleet)
    nothing_is_left(fleet)
    assert ended(fleet.producer.counters, "expired") == 0
    assert fleet.consumer.counters.total("loads") == len(fleet.consumer.good) > 0


@pytest.mark.parametrize("taken_away", ["fenced_before", "fenced_after"])
def test_without_either_read_of_the_slot_a_wrong_block_is_accepted(taken_away: str) -> None:
    """The promise rests on the fence: without this test, the tests above could pass without it."""
    accepted = 0
    for seed in range(30):
        fleet = Fleet(seed, loss=0.3, **{taken_away: False})  # type: ignore[arg-type]
        try:
            for _ in range(300):
                fleet.tick()
        except AssertionError as error:
            accepted += "accepted" in str(error)
    assert accepted, "no history of thirty missed it"
