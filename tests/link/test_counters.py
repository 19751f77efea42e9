"""Counters that several threads add to."""

from __future__ import annotations

import threading

from kvferry.link.counters import Counters


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
