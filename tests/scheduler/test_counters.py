"""Counters that several threads add to."""

from __future__ import annotations

import threading

from kvferry.scheduler.state import Counters


def test_take_returns_each_count_once_and_the_total_remains() -> None:
    counters = Counters()
    counters.add("loads")
    counters.add("leases_released", "done", amount=3)
    assert counters.take() == {("loads", ""): 1, ("leases_released", "done"): 3}
    assert counters.take() == {}
    counters.add("loads")
    assert counters.take() == {("loads", ""): 1}
    assert counters.total("loads") == 2
    assert counters.total("never") == 0
    assert counters.take() == {}, "asking for a total is counted as something"


def test_nothing_is_lost_between_threads() -> None:
    counters = Counters()
    taken = 0

    def count() -> None:
        for _ in range(5000):
            counters.add("x")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += sum(counters.take().values())
    taken += sum(counters.take().values())
    assert taken == counters.total("x") == 20_000
