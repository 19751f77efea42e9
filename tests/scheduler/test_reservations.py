"""Blocks of leases, taken and given back in parts, against a pool that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.scheduler.producer import block_references
from kvferry.scheduler.producer.block_references import BlockReferences, Reservation
from kvferry.scheduler.requests import LeaseUse, ProducerLease
from tests.harness.ledgers import check_references

BLOCKS = st.lists(st.integers(0, 9), unique=True, max_size=6)


class Pool:
    """Counts references, and never below none."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()
        self.given_back: list[int] = []

    def keep(self, blocks: Sequence[int]) -> None:
        self.references.update(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.references[block] > 0
            self.references[block] -= 1
        self.given_back.extend(blocks)

    def reference_count(self, block: int) -> int:
        return self.references[block]

    def loaded_into(self, request_id: str) -> tuple[int, ...]:
        return ()


def reserve(
    references: BlockReferences, pool: Pool, reservation: Reservation, blocks: list[int]
) -> None:
    pool.keep(blocks)
    references.reserve(reservation, blocks)


@given(
    st.lists(
        st.tuples(BLOCKS, BLOCKS, st.sampled_from(["cancel", "end", "done", "keep"])),
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_all_that_is_taken_for_prefixes_is_given_back_in_parts(
    prefixes: list[tuple[list[int], list[int], str]], at_once: int
) -> None:
    pool = Pool()
    references = BlockReferences(pool)
    kept: list[ProducerLease] = []
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(block_references, "RETURNED_AT_ONCE", at_once)
        for index, (first, more, how) in enumerate(prefixes):
            reservation = Reservation()
            reserve(references, pool, reservation, first)
            rest = [block for block in more if block not in first]
            reserve(references, pool, reservation, rest)
            check_references(references)
            if how == "cancel":
                references.cancel(reservation)
                check_references(references)
                continue
            lease = ProducerLease(f"p{index}", LeaseUse.PREFIX)
            references.take_over(lease, reservation)
            assert lease.block_ids == (*first, *rest)
            check_references(references)
            if how == "keep":
                kept.append(lease)
                continue
            if how == "end":
                references.end(lease)
            references.free(lease)
            check_references(references)
        while references.returning:
            before = len(pool.given_back)
            references.begin_step()
            assert len(pool.given_back) - before <= at_once
            check_references(references)
    expected = Counter(block for lease in kept for block in lease.block_ids)
    assert +pool.references == expected
    assert references.num_requests == len(kept)
    assert not references.num_coming()


def test_the_end_of_a_prefix_is_given_back_first() -> None:
    """vLLM then reuses it first, and keeps what more prompts share."""
    pool = Pool()
    references = BlockReferences(pool)
    reservation = Reservation()
    reserve(references, pool, reservation, [1, 2, 3, 4])
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(block_references, "RETURNED_AT_ONCE", 2)
        references.cancel(reservation)
    assert pool.given_back == [3, 4], "of a part the pool itself reverses the order"
    assert references.num_coming() == 2


def test_a_reservation_without_blocks_leaves_nothing_to_do() -> None:
    references = BlockReferences(Pool())
    references.cancel(Reservation())
    assert not references.returning


@pytest.mark.parametrize("use", LeaseUse)
def test_a_step_gives_back_a_part_of_the_blocks_of_leases_that_are_over(
    use: LeaseUse,
) -> None:
    """As many in all as one step may, whatever is over."""
    pool = Pool()
    references = BlockReferences(pool)
    leases = [
        ProducerLease(f"{first}", use, block_ids=tuple(range(first, first + 3)))
        for first in (0, 3)
    ]
    for lease in leases:
        references.keep(lease)
        references.end(lease)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(block_references, "RETURNED_AT_ONCE", 4)
        references.begin_step()
        for lease in leases:
            references.free(lease)
        assert pool.given_back == [0, 1, 2, 5], "in the step in which they are over"
        assert references.num_coming() == 2
        references.begin_step()
    assert pool.given_back == [0, 1, 2, 5, 3, 4]
    assert not references.returning
    check_references(references)


def test_all_blocks_are_given_back_at_once_while_a_request_waits_for_blocks() -> None:
    pool = Pool()
    references = BlockReferences(pool)
    references.are_blocks_short = True
    lease = ProducerLease("a", block_ids=tuple(range(1000)))
    references.keep(lease)
    references.free(lease)
    assert len(pool.given_back) == 1000
    assert not references.returning
