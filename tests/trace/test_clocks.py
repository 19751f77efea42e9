"""Clocks of simulated engines, whose true differences are known."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.clocks import Clock, Clocks, causes, clock_of, compare, shifts
from kvferry.trace.handover import Handover, match
from kvferry.trace.reading import read_recording
from kvferry.trace.timeline import make_timeline
from tests.trace.simulated import MS, Simulation, Times
from tests.trace.test_matching import matched, processes

SKEW = st.integers(-500 * MS, 500 * MS)


def simulated(skews: list[int], draw: random.Random, requests: int = 12) -> Simulation:
    """Two producers, and the rest consumers of two workers."""
    simulation = Simulation()
    engines = [
        simulation.engine(f"e{number}", workers=2, ahead_ns=ahead_ns)
        for number, ahead_ns in enumerate(skews)
    ]
    for number in range(requests):
        times = Times(
            router=draw.randint(0, 9) * MS,
            report=draw.randint(0, 5) * MS,
            kept=draw.randint(0, 9) * MS,
        )
        consumer = engines[2 + number % (len(engines) - 2)]
        simulation.handover(engines[number % 2], consumer, number * MS, times, request=f"r{number}")
    return simulation


def in_order(handovers: list[Handover], clocks: Clocks) -> bool:
    return all(
        before.at_ns + clocks.shift_ns.get(before.clock, 0)
        <= after.at_ns + clocks.shift_ns.get(after.clock, 0)
        for one in handovers
        for before, after in causes(one)
    )


@given(st.lists(SKEW, min_size=3, max_size=6), st.randoms(use_true_random=False))
def test_after_the_shifts_nothing_happens_before_its_cause(
    skews: list[int], draw: random.Random
) -> None:
    found = matched(simulated(skews, draw))
    clocks = compare(found)
    assert in_order(found, clocks)
    assert bool(clocks.differences) == (not in_order(found, Clocks()))
    assert all(one.is_shifted for one in clocks.differences)


@given(st.lists(SKEW, min_size=3, max_size=6), st.randoms(use_true_random=False))
def test_the_true_difference_is_within_what_is_reported(
    skews: list[int], draw: random.Random
) -> None:
    simulation = simulated(skews, draw)
    ahead = {clock_of(one.started): one.ahead_ns for one in simulation.processes()}
    clocks = compare(matched(simulation))
    for one in clocks.differences:
        truth = ahead[one.ahead] - ahead[one.behind]
        assert one.at_least_ns <= truth
        assert one.at_most_ns is None or truth <= one.at_most_ns
        reported = clocks.shift_ns.get(one.behind, 0) - clocks.shift_ns.get(one.ahead, 0)
        assert reported >= one.at_least_ns


@given(st.lists(SKEW, min_size=3, max_size=6), st.randoms(use_true_random=False))
def test_durations_within_one_process_do_not_depend_on_clocks(
    skews: list[int], draw: random.Random
) -> None:
    state = draw.getstate()
    skewed = matched(simulated(skews, draw))
    draw.setstate(state)
    straight = matched(simulated([0] * len(skews), draw))
    for one, other in zip(skewed, straight, strict=True):
        mine, theirs = (
            make_timeline(each, compare(all_)) for each, all_ in ((one, skewed), (other, straight))
        )
        for span, same in zip(
            (*mine.before, *(s for w in mine.workers for s in w.spans)),
            (*theirs.before, *(s for w in theirs.workers for s in w.spans)),
            strict=True,
        ):
            assert (span.phase, span.lasted_ns) == (same.phase, same.lasted_ns)


def test_the_text_about_a_producer_that_is_ahead() -> None:
    simulation = Simulation()
    producer, consumer = simulation.engine("p", ahead_ns=20 * MS), simulation.engine("d")
    simulation.handover(producer, consumer, times=Times(router=3 * MS, kept=MS))
    clocks = compare(matched(simulation))
    (reported,) = clocks.differences
    assert str(reported) == (
        "clocks of p on host-of-p and d on host-of-d differ by at least 17.000 ms and at most 21.000 ms: shifted"
    )
    (one,) = (make_timeline(one, clocks) for one in matched(simulation))
    assert [(span.phase, span.lasted_ns) for span in one.path[:2]] == [
        ("router", 0),
        ("decode_queue", MS),
    ]
    assert one.path[0].begun_ns == one.path[0].ended_ns == one.zero_ns
    assert all(
        before.ended_ns == after.begun_ns
        for before, after in itertools.pairwise((*one.before, *one.path))
    )


def test_a_clock_that_was_set_meanwhile_is_reported() -> None:
    simulation = Simulation()
    producer, consumer = simulation.engine("p"), simulation.engine("d")
    for number, ahead_ns in enumerate((0, 400 * MS)):
        producer.scheduler.ahead_ns = ahead_ns
        simulation.handover(producer, consumer, number * 1000 * MS, request=f"r{number}")
    found = matched(simulation)
    clocks = compare(found)
    assert clocks.shift_ns == {}
    assert [str(one) for one in clocks.differences] == [
        "clocks of p on host-of-p and d on host-of-d differ by at least 397.000 ms, and not always: "
        "some clock was set while it was recorded; nothing is shifted"
    ]
    for one in found:
        assert all(span.lasted_ns >= 0 for span in make_timeline(one, clocks).path)


@pytest.mark.parametrize(
    ("times", "how", "reason"),
    [(Times(kept=-20 * MS), "expired", ""), (Times(report=-MS), "release", "deadline")],
    ids=[
        "an expired lease may be over before the consumer comes",
        "a load given up may end after it was reported",
    ],
)
def test_what_has_no_certain_order_says_nothing_about_clocks(
    times: Times, how: str, reason: str
) -> None:
    simulation = Simulation()
    consumer = simulation.engine("d", workers=2)
    consumer.workers[1].started = msgspec.structs.replace(
        consumer.workers[1].started, host="second"
    )
    simulation.handover(simulation.engine("p"), consumer, times=times, reason=reason, how=how)
    assert compare(matched(simulation)) == Clocks()


def test_hosts_of_one_engine_have_clocks_of_their_own(tmp_path: Path) -> None:
    simulation = Simulation()
    consumer = simulation.engine("d", workers=2)
    there = consumer.workers[1]
    there.started = msgspec.structs.replace(there.started, host="second")
    there.ahead_ns = -30 * MS
    simulation.handover(simulation.engine("p"), consumer)
    recording = read_recording([simulation.write(tmp_path)])
    clocks = compare(match(recording.processes))
    assert [(one.ahead.host, one.behind.host) for one in clocks.differences] == [
        ("host-of-d", "second")
    ]
    assert len(processes(simulation)) == 5


A, B, C, D = CLOCKS = tuple(Clock(name, "host") for name in "abcd")
PAIRS = st.tuples(st.sampled_from(CLOCKS), st.sampled_from(CLOCKS)).filter(
    lambda pair: pair[0] != pair[1]
)


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({(A, B): -6, (B, A): 11}, {A: -6, B: 0}),
        ({(A, B): -6, (B, A): 3}, None),
        ({(A, B): 6, (B, C): 0, (C, A): 3}, {A: 0, B: 0, C: 0}),
        ({(A, B): -2, (B, C): -3, (C, A): 5}, {A: -5, B: -3, C: 0}),
        ({(A, B): -2, (B, C): -3, (C, A): 4}, None),
    ],
)
def test_the_shifts_are_the_smallest_that_satisfy_all_bounds(
    bounds: dict[tuple[Clock, Clock], int], found: dict[Clock, int] | None
) -> None:
    assert shifts(bounds) == found


@given(st.dictionaries(PAIRS, st.integers(-9, 9)))
def test_only_bounds_that_contradict_one_another_have_no_shifts(
    bounds: dict[tuple[Clock, Clock], int],
) -> None:
    """The oracle adds up the bounds along every cycle."""
    cycles = (ring for size in (2, 3, 4) for ring in itertools.permutations(CLOCKS, size))
    pairs = [[*zip(ring, (*ring[1:], ring[0]), strict=True)] for ring in cycles]
    contradictory = any(
        all(one in bounds for one in ring) and sum(bounds[one] for one in ring) < 0
        for ring in pairs
    )
    found = shifts(bounds)
    assert (found is None) == contradictory
    if found is not None:
        assert all(found[late] - found[early] <= bound for (late, early), bound in bounds.items())
