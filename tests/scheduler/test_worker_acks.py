"""A lease is over when each worker has acknowledged its end, and only then are its blocks free."""

from __future__ import annotations

import pytest

from kvferry.link.counters import Counters
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import LeaseState
from tests.harness.ledgers import check_leases


def held(workers: int, names: str = "a") -> ProducerLedger:
    ledger = ProducerLedger(4, 30.0, Counters(), workers=workers)
    for block, name in enumerate(names):
        assert ledger.open(name)
        assert ledger.finish(name, block_ids=(block + 1,))
    ledger.take_orders(0.0)
    return ledger


def test_a_lease_is_over_when_the_last_worker_has_acknowledged_it() -> None:
    ledger = held(3, "ab")
    assert ledger.acknowledge(2, ["a", "b"]) == []
    assert ledger.acknowledge(0, ["b"]) == []
    assert ledger.acknowledge(1, ["b", "a"]) == ["b"]
    assert (
        ledger.state("a"),
        ledger.state("b"),
        len(ledger.block_references.counts),
    ) == (
        LeaseState.HELD,
        None,
        1,
    )
    assert ledger.acknowledge(0, ["a"]) == ["a"]
    assert (len(ledger), len(ledger.block_references.counts)) == (0, 0)


def test_a_repeated_acknowledgement_of_a_worker_counts_once() -> None:
    ledger = held(2)
    assert [ledger.acknowledge(1, ["a"]) for _ in range(3)] == [[], [], []]
    assert ledger.acknowledge(0, ["a"]) == ["a"]


@pytest.mark.parametrize("unknown", [-1, 2, 7])
def test_unknown_worker_ids_are_ignored(unknown: int) -> None:
    ledger = held(2)
    assert ledger.acknowledge(0, ["a"]) == ledger.acknowledge(unknown, ["a"]) == []


def test_acknowledgements_of_leases_that_the_workers_do_not_hold_are_ignored() -> None:
    ledger = held(1)
    ledger.open("computing")
    assert ledger.acknowledge(0, ["other", "computing"]) == []
    assert len(ledger) == 2
    check_leases(ledger)
