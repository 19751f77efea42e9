"""A request is over when each worker has acknowledged it."""

from __future__ import annotations

from kvferry.scheduler.producer.lease import WorkerAcks


def test_a_request_is_over_when_the_last_worker_has_acknowledged_it() -> None:
    acks = WorkerAcks(3)
    assert acks.take(2, ["a", "b"]) == []
    assert acks.take(0, ["b"]) == []
    assert acks.take(1, ["b", "a"]) == ["b"]
    assert acks.requests() == {"a"}
    assert acks.take(0, ["a"]) == ["a"]
    assert len(acks) == 0


def test_a_repeated_acknowledgement_of_a_worker_counts_once() -> None:
    acks = WorkerAcks(2)
    assert [acks.take(1, ["a"]) for _ in range(3)] == [[], [], []]
    assert acks.take(0, ["a"]) == ["a"]


def test_unknown_worker_ids_are_ignored() -> None:
    acks = WorkerAcks(2)
    assert [acks.take(unknown, ["a"]) for unknown in (-1, 2, 7)] == [[], [], []]
    assert len(acks) == 0
