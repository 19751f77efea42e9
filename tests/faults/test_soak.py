"""The soak, for three minutes: six engines with shards of their own, half of the prompts read while they are computed,
5% of the requests with a fault. Every load is right byte for byte or reported failed, nothing is left, and what the
process takes does not grow, neither with the requests nor with the lives of engines.

`KVFERRY_FAULT_SOAK_MINUTES=30` makes it longer; a failure prints the seed that draws the same requests again.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.figures import print_results
from bench.soak import soak
from bench.soak_report import grown, results_of
from bench.soak_schedule import Fault

from tests.promises import promise

_MINUTES = float(os.environ.get("KVFERRY_FAULT_SOAK_MINUTES", "3"))
_NICE = 10
_FEWEST_REQUESTS = 300
"""Fewer would show little, however busy the machine is."""


@promise(1, 2, 3, 4)
def test_for_minutes_nothing_goes_wrong_nothing_is_left_and_nothing_grows(
    run_seed: int,
) -> None:
    # In a process of its own: what it measures is its own, and nothing of it outlives it. It asks as often as it can:
    # tests beside it come first.
    with ProcessPoolExecutor(1, get_context("spawn"), os.nice, (_NICE,)) as process:
        figures = process.submit(soak, None, 60 * _MINUTES, 0.05, run_seed).result()
    print_results(results_of(figures))
    assert not figures["violations"]
    assert figures["requests"] >= _FEWEST_REQUESTS
    assert figures["loads"]["loaded"] > 0.8 * figures["requests"]
    assert figures["streamed"] > 0.3 * figures["requests"]
    assert figures["moved"]["early"] > 0 < figures["moved"]["restarts"]
    assert figures["moved"]["mapped"] > 0 < figures["moved"]["moved"]
    assert (
        sum(
            figures["loads"][how]
            for how in figures["loads"]
            if how.startswith("failed")
        )
        > 0
    )
    assert sum(map(bool, figures["faults"].values())) >= len(Fault) // 2
    assert grown(figures) == [], figures["samples"]
