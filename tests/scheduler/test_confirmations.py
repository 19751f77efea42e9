"""When a request is over: all workers have said so, each for itself."""

from __future__ import annotations

from kvferry.scheduler.producer.lease import Confirmations


def test_a_request_is_over_when_the_last_worker_has_said_so() -> None:
    confirmations = Confirmations(3)
    assert confirmations.take(2, ["a", "b"]) == []
    assert confirmations.take(0, ["b"]) == []
    assert confirmations.take(1, ["b", "a"]) == ["b"]
    assert confirmations.requests() == {"a"}
    assert confirmations.take(0, ["a"]) == ["a"]
    assert len(confirmations) == 0


def test_what_one_worker_says_twice_counts_once() -> None:
    confirmations = Confirmations(2)
    assert [confirmations.take(1, ["a"]) for _ in range(3)] == [[], [], []]
    assert confirmations.take(0, ["a"]) == ["a"]


def test_a_worker_that_the_engine_does_not_have_is_nobody() -> None:
    confirmations = Confirmations(2)
    assert [confirmations.take(unknown, ["a"]) for unknown in (-1, 2, 7)] == [[], [], []]
    assert len(confirmations) == 0
