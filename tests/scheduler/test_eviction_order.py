"""Lease eviction: the counts of blocks against sets of owners, by definition; and the order, by examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvferry.link.counters import Counters
from kvferry.link.limits import HEARTBEATS_PER_LEASE
from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.producer.block_references import BlockReferences
from kvferry.scheduler.producer.eviction_order import (
    Demand,
    Rank,
    candidates,
    evict,
    rank_of,
)
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import LeaseUse, ProducerLease
from tests.harness.ledgers import check_leases, check_references

BLOCKS = 12


@dataclass
class Pool:
    """Who owns which blocks: leases by name, running requests, and leases that have ended."""

    leases: dict[str, frozenset[int]]
    running: list[frozenset[int]]
    ended: list[str] = field(default_factory=list)

    def owners(self, block: int) -> int:
        return sum(block in blocks for blocks in [*self.leases.values(), *self.running])

    def live(self) -> set[int]:
        return set().union(
            *(blocks for name, blocks in self.leases.items() if name not in self.ended)
        )

    def used(self) -> set[int]:
        return set().union(*self.running)

    def leased(self) -> int:
        return len(self.live() - self.used())

    def free(self) -> int:
        """In the pool, or as soon as the workers have reported."""
        return BLOCKS - len(self.live() | self.used())


class CountingPool:
    """A block pool that only counts references, which the test decides."""

    def __init__(self, references: Callable[[int], int]) -> None:
        self.reference_count = references

    def keep(self, blocks: Sequence[int]) -> None: ...

    def give_back(self, blocks: Sequence[int]) -> None: ...

    def loaded_into(self, request_id: str) -> tuple[int, ...]:
        return ()


def counting(count: Callable[[int], int]) -> BlockReferences:
    return BlockReferences(CountingPool(count))


def order_by_definition(pool: Pool, ranks: dict[str, Rank], demand: Demand) -> bool:
    """End leases one by one, with all counts computed again each time."""
    slots_short = demand.are_slots_short
    for name in sorted(ranks, key=lambda name: (ranks[name], name)):
        is_over, lacks = pool.leased() > demand.cap, pool.free() < demand.need
        no_reserve = pool.free() < demand.need + demand.reserve
        why = {
            Rank.PREFIX: is_over or lacks or no_reserve or slots_short,
            Rank.IDLE_TURN: is_over or lacks or no_reserve or slots_short,
            Rank.DESERTED_PROMPT: is_over or lacks,
            Rank.FRESH_PROMPT: (is_over or lacks) and demand.lasts,
            Rank.CLAIMED_TURN: lacks or (is_over and demand.lasts),
            Rank.CLAIMED_PROMPT: (is_over or lacks) and demand.lasts,
        }
        if why[ranks[name]] and (slots_short or pool.leases[name] - pool.used()):
            pool.ended.append(name)
            slots_short = False
    return pool.leased() <= demand.cap and pool.free() >= demand.need


some_blocks = st.frozensets(st.integers(0, BLOCKS - 1), max_size=5)


@given(
    leases=st.lists(st.tuples(some_blocks, st.sampled_from(Rank)), max_size=6),
    running=st.lists(some_blocks, max_size=2),
    need=st.integers(0, BLOCKS),
    reserve=st.integers(0, 3),
    cap=st.integers(0, BLOCKS),
    slots_short=st.booleans(),
    lasts=st.booleans(),
)
def test_eviction_ends_as_many_leases_as_needed_and_none_that_frees_nothing(
    leases: list[tuple[frozenset[int], Rank]],
    running: list[frozenset[int]],
    need: int,
    reserve: int,
    cap: int,
    slots_short: bool,
    lasts: bool,
) -> None:
    names = [f"{index}" for index in range(len(leases))]
    ranks = {name: rank for name, (_, rank) in zip(names, leases, strict=True)}
    pool = Pool(
        {name: blocks for name, (blocks, _) in zip(names, leases, strict=True)}, running
    )
    references = counting(pool.owners)
    turns = (Rank.IDLE_TURN, Rank.CLAIMED_TURN)
    made = {
        name: ProducerLease(
            name,
            LeaseUse.TURN if ranks[name] in turns else LeaseUse.PROMPT,
            block_ids=tuple(blocks),
        )
        for name, blocks in pool.leases.items()
    }
    for lease in made.values():
        references.keep(lease)
    demand = Demand(pool.free(), need, reserve, cap, slots_short, lasts)
    ended: list[str] = []

    def end(lease: ProducerLease, how: str) -> None:
        assert how == "evicted"
        ended.append(lease.request_id)
        references.end(lease)

    in_order = [
        (ranks[name], made[name])
        for name in sorted(names, key=lambda name: (ranks[name], name))
    ]
    assert references.num_leased() == pool.leased()
    is_met = evict(in_order, references, references.num_leased(), demand, end)
    assert (is_met, ended) == (order_by_definition(pool, ranks, demand), pool.ended)
    assert references.num_leased() == pool.leased()
    assert references.num_coming() == pool.free() - demand.free
    assert len(references.held) == len(names) - len(ended)
    check_references(references)
    for lease in made.values():
        references.free(lease)
    assert (
        len(references.counts),
        references.num_coming(),
        references.num_requests,
    ) == (
        0,
        0,
        0,
    )


def test_a_kept_block_without_references_in_the_pool_is_reported_with_both_counts() -> (
    None
):
    references = counting({1: 2, 2: 1, 3: 0}.__getitem__)
    leases = [
        ProducerLease("a", block_ids=(1, 2)),
        ProducerLease("b", block_ids=(1,)),
        ProducerLease("c", block_ids=(3,)),
    ]
    for lease in leases[:2]:
        references.keep(lease)
    check_references(references)
    references.keep(leases[2])
    with pytest.raises(
        LocalProtocolError, match="block 3: 1 leases keep it, the pool counts 0"
    ):
        check_references(references)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("changed", [(1,), (1, 2, 2), (1, 2, 3)])
def test_counts_that_differ_from_the_blocks_of_the_leases_are_reported(
    ends: bool, changed: tuple[int, ...]
) -> None:
    references, lease = BlockReferences(), ProducerLease("a", block_ids=(1, 2))
    references.keep(lease)
    if ends:
        references.end(lease)
    check_references(references)
    lease.block_ids = changed
    with pytest.raises(
        LocalProtocolError,
        match=r"block references: -?\d held \+ \d ending, \d \+ \d by lease",
    ):
        check_references(references)


LEASE_S = 60.0
HEARTBEAT_S = LEASE_S / HEARTBEATS_PER_LEASE


@pytest.mark.parametrize(
    ("use", "age_heartbeats", "renewed", "rank"),
    [
        (LeaseUse.PROMPT, 0.9, False, None),
        (LeaseUse.PROMPT, 0.9, True, None),
        (LeaseUse.PROMPT, 1.0, False, Rank.FRESH_PROMPT),
        (LeaseUse.PROMPT, 2.0, False, Rank.DESERTED_PROMPT),
        (LeaseUse.PROMPT, 2.0, True, Rank.CLAIMED_PROMPT),
        (LeaseUse.PREFIX, 0.0, False, Rank.PREFIX),
        (LeaseUse.PREFIX, 2.0, True, Rank.PREFIX),
        (LeaseUse.TURN, 0.0, False, Rank.IDLE_TURN),
        (LeaseUse.TURN, 0.0, True, Rank.CLAIMED_TURN),
    ],
)
def test_a_lease_is_ranked_by_its_use_its_age_and_whether_a_consumer_has_renewed_it(
    use: LeaseUse, age_heartbeats: float, renewed: bool, rank: Rank | None
) -> None:
    lease = ProducerLease("r", use, held_s=100.0)
    now_s = 100.0 + age_heartbeats * HEARTBEAT_S
    lease.claimed_until_s = now_s + 1.0 if renewed else now_s
    assert rank_of(lease, now_s, HEARTBEAT_S) is rank


def test_the_longest_held_goes_first_and_one_that_is_read_goes_last() -> None:
    ledger = ProducerLedger(8, LEASE_S, Counters(), turn_s=480.0)
    leases = {}
    for now_s, (name, use) in enumerate(
        {
            "p1": LeaseUse.PROMPT,
            "p2": LeaseUse.PROMPT,
            "t1": LeaseUse.TURN,
            "p3": LeaseUse.PROMPT,
        }.items()
    ):
        ledger.open(name, use)
        leases[name] = ledger.finish(name, block_ids=(now_s,))
        ledger.take_orders(float(now_s))
    for beat in range(1, 4):
        ledger.take_orders(3.0 + beat * HEARTBEAT_S)
    first = leases["p1"]
    assert first is not None
    assert ledger.renew(first.name)
    assert [lease.request_id for _, lease in candidates(ledger)] == [
        "t1",
        "p2",
        "p3",
        "p1",
    ]
    for _, lease in candidates(ledger)[:2]:
        ledger.end(lease, "evicted")
    check_leases(ledger)
    assert [lease.request_id for _, lease in candidates(ledger)] == ["p3", "p1"]
    assert {end.request_id for end in ledger.take_orders(40.0).ends} == {"t1", "p2"}
