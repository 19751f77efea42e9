"""Counters that several threads add to."""

from __future__ import annotations

import threading

from kvferry.scheduler.state.counters import Tally


def test_what_is_taken_was_counted_once_and_the_total_remains() -> None:
    tally = Tally()
    tally.add("loads")
    tally.add("leases_released", "done", amount=3)
    assert tally.take() == {("loads", ""): 1, ("leases_released", "done"): 3}
    assert tally.take() == {}
    tally.add("loads")
    assert tally.take() == {("loads", ""): 1}
    assert tally.total("loads") == 2
    assert tally.total("never") == 0
    assert tally.take() == {}, "asking for a total is counted as something"


def test_nothing_is_lost_between_threads() -> None:
    tally = Tally()
    taken = 0

    def count() -> None:
        for _ in range(5000):
            tally.add("x")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += sum(tally.take().values())
    taken += sum(tally.take().values())
    assert taken == tally.total("x") == 20_000
