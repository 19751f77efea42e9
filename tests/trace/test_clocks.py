"""Clocks of simulated engines, whose true differences are known."""

from __future__ import annotations

import random
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.clocks import Clocks, causes, clock_of, compare, reference_of
from kvferry.trace.timeline import make_timeline
from tests.trace.simulated import MS, Simulation, Times, engine_pair

SKEWS = st.lists(st.integers(-500 * MS, 500 * MS), min_size=3, max_size=6)


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
        simulation.handover(
            engines[number % 2], consumer, number * MS, times, request=f"r{number}"
        )
    return simulation


@given(SKEWS, st.randoms(use_true_random=False))
def test_after_the_shifts_nothing_happens_before_its_cause(
    skews: list[int], draw: random.Random
) -> None:
    simulation = simulated(skews, draw)
    ahead = {
        clock_of(process.started): process.ahead_ns
        for process in simulation.processes()
    }
    found = simulation.handovers()
    clocks = compare(found)
    for handover in found:
        reference = reference_of(handover)
        for before, after in causes(handover):
            before_ns = before.at_ns - clocks.ahead_ns.get((before.clock, reference), 0)
            after_ns = after.at_ns - clocks.ahead_ns.get((after.clock, reference), 0)
            assert before_ns <= after_ns
    for (clock, reference), ahead_ns in clocks.ahead_ns.items():
        truth_ns = ahead[clock] - ahead[reference]
        assert 0 < ahead_ns <= truth_ns or truth_ns <= ahead_ns < 0, "the least shift"
    assert len(clocks.notes) == len(clocks.ahead_ns)


def test_a_producer_that_is_ahead_is_put_back_and_reported() -> None:
    simulation = Simulation()
    producer, consumer = (
        simulation.engine("p", ahead_ns=20 * MS),
        simulation.engine("d"),
    )
    simulation.handover(producer, consumer, times=Times(router=3 * MS, kept=MS))
    (handover,) = simulation.handovers()
    clocks = compare([handover])
    assert clocks.notes == (
        "clocks of p on host-of-p and d on host-of-d differ by at least 17.000 ms "
        "and at most 21.000 ms: shifted",
    )
    timeline = make_timeline(handover, clocks)
    assert [(span.phase, span.lasted_ns) for span in timeline.path[:2]] == [
        ("router", 0),
        ("decode_queue", MS),
    ]
    assert timeline.before[-1].ended_ns == timeline.path[0].begun_ns == timeline.zero_ns


def test_a_clock_that_was_set_meanwhile_leaves_all_other_pairs_shifted() -> None:
    simulation, producer, consumer = engine_pair()
    other = simulation.engine("other", ahead_ns=20 * MS)
    for number, ahead_ns in enumerate((0, 400 * MS)):
        producer.scheduler.ahead_ns = ahead_ns
        simulation.handover(
            producer, consumer, number * 1000 * MS, request=f"r{number}"
        )
    simulation.handover(other, consumer, request="r3")
    found = simulation.handovers()
    clocks = compare(found)
    contradiction, difference = clocks.notes
    # By the later params the producer is ahead by 400 - 3 ms or more, by the earlier end of a lease by 1 ms or less.
    assert re.fullmatch(
        r"clocks of p on host-of-p and d on host-of-d contradict themselves by 396\.000 ms: "
        "one was set meanwhile, and nothing is shifted between them",
        contradiction,
    )
    assert "other on host-of-other and d on host-of-d differ" in difference
    assert list(clocks.ahead_ns.values()) == [17 * MS]
    for handover in found:
        assert all(span.lasted_ns >= 0 for span in make_timeline(handover, clocks).path)


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
    simulation.handover(
        simulation.engine("p"), consumer, times=times, reason=reason, how=how
    )
    assert compare(simulation.handovers()) == Clocks()


def test_hosts_of_one_engine_have_clocks_of_their_own() -> None:
    simulation = Simulation()
    consumer = simulation.engine("d", workers=2)
    there = consumer.workers[1]
    there.started = msgspec.structs.replace(there.started, host="second")
    there.ahead_ns = -30 * MS
    simulation.handover(simulation.engine("p"), consumer)
    (handover,) = simulation.handovers()
    clocks = compare([handover])
    (note,) = clocks.notes
    assert note.startswith(
        "clocks of d on second and d on host-of-d differ by at least 29.5"
    )
    timeline = make_timeline(handover, clocks)
    (ordered_ns,) = (
        span.ended_ns for span in timeline.to_load if span.phase == "decode_queue"
    )
    assert timeline.workers[1].begun_ns == ordered_ns, (
        "shifted to its order, and no more"
    )
