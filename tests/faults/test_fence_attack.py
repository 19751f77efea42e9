"""The fence, attacked: leases of 50 ms, 24 blocks, and a consumer that is held up for as long as it takes until the
leases have run out and other prompts have its blocks. NIXL is the real one. Changed bytes are found by a checksum
of the blocks; every load in which they did must be reported failed, and no other may be reported good.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kvferry.protocol.params import RemotePrefill, read_params
from kvferry.worker.loads.load import Load
from kvferry.worker.peers.peer import Peer
from tests.faults.fence_attack import (
    LEASE_S,
    PLACINGS,
    PROMPTS,
    Attack,
    Counts,
    Prefiller,
    consumer_of,
    gate_of,
    prefill_for_ever,
    producer_of,
)
from tests.harness.children import Child
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.gates import Hold

CHANGED_LOADS = 200
RACED_LOADS = 40
LONGEST_RACE_S = 240.0
HOLDS = {
    "direct": {"before the data": (0.0, False), "in the middle of it": (0.5, False), "after it": (1.0, False)},
    "staged": {
        "before the data": (0.0, False),
        "in the middle of a wave": (0.5, False),
        "between waves": (0.0, True),
        "after a wave": (1.0, True),
    },
}


def attack(placing: str, changed_loads: int) -> Counts:
    """Hold loads up in all ways in turn until so many have got other bytes than they were promised."""
    with contextlib.closing(producer_of()) as producer, consumer_of(placing) as consumer:
        attacked = Attack(producer, consumer)
        for at_once, waves_first in itertools.cycle(HOLDS[placing].values()):
            attacked.round(at_once, waves_first)
            if attacked.counts.changed >= changed_loads:
                return attacked.counts
        raise AssertionError("unreachable")


@pytest.mark.parametrize("placing", PLACINGS)
def test_no_load_whose_bytes_changed_is_ever_reported_good(placing: str) -> None:
    counts = attack(placing, CHANGED_LOADS)
    print(f"{placing}: {counts}")
    assert counts.changed >= CHANGED_LOADS
    assert counts.detected == counts.changed
    assert counts.believed == counts.good == 0, "every lease had ended before its load went on"
    assert counts.detected + counts.cautious == counts.loads


@pytest.mark.parametrize("placing", PLACINGS)
def test_with_half_a_fence_the_same_attack_shows_wrong_bytes(placing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above is able to fail."""
    check = Load._check_fence

    def only_before(self: Load, peer: Peer, *, wait_until_ready: bool):  # type: ignore[no-untyped-def]
        return check(self, peer, wait_until_ready=True) if wait_until_ready else iter(())

    monkeypatch.setattr(Load, "_check_fence", only_before)
    counts = attack(placing, 2 * PROMPTS)
    print(f"{placing}, with half a fence: {counts}")
    assert counts.believed == counts.changed >= 2 * PROMPTS


Offered = tuple[RemotePrefill, int]
"""Params, and the seed of what they promise."""


@dataclass(frozen=True)
class Source:
    """A producer that never stops.

    Attributes:
        offers: those that are new.
        clock_s: by which its leases run out.
    """

    offers: Callable[[], list[Offered]]
    clock_s: Callable[[], float]


@contextlib.contextmanager
def here() -> Iterator[Source]:
    """In this process; every call is a step of it, and its clock goes on with its steps."""
    with contextlib.closing(producer_of()) as engine:
        prefiller = Prefiller(engine)
        yield Source(lambda: [(offer.params, offer.seed) for offer in prefiller.turn()], lambda: engine.leases.clock_s)


@contextlib.contextmanager
def elsewhere() -> Iterator[Source]:
    """In a process of its own."""
    process = Child(prefill_for_ever)

    def offers() -> list[Offered]:
        arrived = process.drain()[-2 * PROMPTS :]  # older ones have ended long ago
        read = [(read_params(params), seed) for params, seed in arrived]
        return [(params, seed) for params, seed in read if isinstance(params, RemotePrefill)]

    try:
        yield Source(offers, time.monotonic)
    finally:
        code = process.end()
    assert code == 0


def race(source: Source, consumer: Engine, draw: random.Random) -> Counts:
    """Load what is offered, every read delayed by up to three leases, until enough got other bytes than promised."""

    def any_delay() -> Hold:
        over_s, at_once = source.clock_s() + draw.uniform(0.0, 3 * LEASE_S), draw.choice((0.0, 0.5, 1.0))
        return Hold(lambda: source.clock_s() >= over_s, at_once)

    often = 0.1 if consumer.worker._memory.staging is not None else 0.8  # staged loads have many reads
    gate_of(consumer).hold = lambda: any_delay() if draw.random() < often else None
    counts, seen, loads = Counts(), consumer.seen, dict[str, tuple[OrderedLoad, int]]()
    end_s = time.monotonic() + LONGEST_RACE_S
    while counts.changed < RACED_LOADS or not counts.good:
        assert time.monotonic() < end_s, f"not within {LONGEST_RACE_S:g} s: {counts}"
        for params, seed in reversed(source.offers()):  # the latest first: it has most of its time left
            if len(loads) < PROMPTS:
                load = consumer.load(params)
                loads[load.request_id] = load, seed
        consumer.collect()
        for name in [x for x in loads if seen.is_over(x) and x not in seen.alive]:
            load, seed = loads.pop(name)
            counts.add(consumer, load, seed)
            consumer.free(load)
        time.sleep(0.001)
    return counts


@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize("where", [here, elsewhere])
def test_reads_that_race_the_next_owners_of_their_blocks_are_right_or_reported_failed(
    where: Callable[[], contextlib.AbstractContextManager[Source]], placing: str
) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    with where() as source, consumer_of(placing) as consumer:
        counts = race(source, consumer, random.Random(seed))
    print(f"{placing}, producer {where.__name__}: {counts}")
    assert not counts.believed
    assert counts.detected == counts.changed
    assert not counts.others
