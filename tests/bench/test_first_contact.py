"""The figures that `bench.first_contact` and `bench.scale` compute from their samples."""

from __future__ import annotations

import pytest
from bench.first_contact import Measured, in_turn, results_of
from bench.first_contact_consumer import PLAN_AGAIN, PROCESSOR
from bench.scale import Connected, slopes_of
from bench.scale_model import Share


def samples(**parts: float) -> dict[str, list[float]]:
    return {**{name: [ms] for name, ms in parts.items()}, "all": [sum(parts.values())]}


def test_parts_are_added_up_for_every_repetition_in_milliseconds_and_ways_take_turns() -> None:
    took = iter([{"hello": 0.001, "plan": 0.002}, {"hello": 0.5}, {"hello": 0.003, "plan": 0.004}, {"hello": 0.6}])
    ours, published = in_turn([lambda: next(took), lambda: next(took)], 2)
    assert ours == {"hello": [1.0, 3.0], "plan": [2.0, 4.0], "all": [pytest.approx(3.0), pytest.approx(7.0)]}
    assert published["all"] == [500.0, 600.0]


def test_what_stands_beside_the_parts_is_not_added() -> None:
    (ours,) = in_turn([lambda: {"hello": 0.001, PROCESSOR: 0.004, PLAN_AGAIN: 0.008}], 1)
    assert (ours["all"], ours[PROCESSOR], ours[PLAN_AGAIN]) == ([1.0], [4.0], [8.0])


def test_what_takes_very_long_is_not_repeated() -> None:
    slow, quick = in_turn([lambda: {"descriptors": 6.0}, lambda: {"descriptors": 0.006}], 3)
    assert slow["all"] == [6000.0]
    assert len(quick["all"]) == 3


def test_targets_are_of_large_caches_and_shares_of_the_published_way() -> None:
    found = [
        Measured(8, 4, blocks, samples(hello=ours, plan=1.0), samples(descriptors=100.0), samples(descriptors=50.0))
        for blocks, ours in ((100, 80.0), (5000, 19.0), (100_000, 29.0))
    ]
    targets = results_of(found, "python -m bench.first_contact", quick=False).targets
    assert [(target.measured, target.met) for target in targets] == [(0.2, True), (0.3, False)]
    assert [target.note[:30] for target in targets] == [
        "0.40 with UCX set up as kvferr",
        "0.60 with UCX set up as kvferr",
    ]


def test_the_owners_slope_is_of_the_largest_run_over_the_same_transports_and_the_readers_of_one_agent() -> None:
    none, owner = Share(0.0, 0.0, 0.0), Share(0.1, 2.0, 0.0)
    found = [
        Connected("TCP", "threads of one process", 8, [0.1], Share(9.0, 9.0, 9.0), none),
        Connected("TCP", "threads of one process", 64, [0.1], owner, none),
        Connected("one host", "threads of one process", 128, [0.1], none, none),
    ]
    reader, socket = Share(0.03, 2.0, 0.0), Share(0.06, 2.0, 0.0)
    slopes = slopes_of(found, {"TCP": reader}, (socket, none, 0.2), 0.001)
    assert (slopes["TCP"].owner, slopes["TCP"].reader, slopes["TCP"].socket) == (owner, reader, socket)
