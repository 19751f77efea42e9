"""Clocks of simulated engines, whose true differences are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.clocks import Clock, align, ordered_moments
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
    ahead_ns = {one.started: one.ahead_ns for one in simulation.processes()}
    handovers = simulation.joined()
    notes = align(handovers)
    shifted = set()
    for handover in handovers:
        reference = handover.reference
        by_clock = {}
        for process, shift_ns in handover.shift_ns.items():
            behind_ns = ahead_ns[reference] - ahead_ns[process]
            assert 0 <= shift_ns <= behind_ns or behind_ns <= shift_ns <= 0
            by_clock[Clock.of(process)] = shift_ns
            if shift_ns:
                shifted.add((process.engine_id, reference.engine_id))
        for before, after in ordered_moments(handover):
            before_ns = before.at_ns + by_clock.get(before.clock, 0)
            assert before_ns <= after.at_ns + by_clock.get(after.clock, 0)
    assert len(notes) == len(shifted)


def test_a_producer_that_is_ahead_is_put_back_and_reported() -> None:
    simulation, producer, consumer = engine_pair()
    producer.scheduler.ahead_ns = 20 * MS
    simulation.handover(producer, consumer, times=Times(router=3 * MS, kept=MS))
    assert align(simulation.joined()) == [
        "clocks of p on host-of-p and d on host-of-d differ by at least 17.000 ms "
        "and at most 21.000 ms: shifted"
    ]
    (handover,) = simulation.handovers()
    assert [(span.phase, span.lasted_ms) for span in handover.path[:2]] == [
        ("router", 0),
        ("decode_queue", 1),
    ]
    assert handover.before[-1].ended_ms == handover.path[0].begun_ms == 0


def test_hosts_of_one_engine_have_clocks_of_their_own() -> None:
    simulation, producer, consumer = engine_pair(workers=2)
    consumer.workers[1].restarted(host="second")
    consumer.workers[1].ahead_ns = -30 * MS
    simulation.handover(producer, consumer)
    (note,) = align(simulation.joined())
    assert note.startswith(
        "clocks of d on second and d on host-of-d differ by at least 29.5"
    )
    (handover,) = simulation.handovers()
    (ordered_ms,) = (
        span.ended_ms for span in handover.path if span.phase == "decode_queue"
    )
    # Shifted to its order, and no more.
    assert handover.workers[1].stages[0].begun_ms == ordered_ms


def test_a_clock_that_was_set_meanwhile_leaves_all_other_pairs_shifted() -> None:
    simulation, producer, consumer = engine_pair()
    other = simulation.engine("other", ahead_ns=20 * MS)
    for number, ahead_ns in enumerate((0, 400 * MS)):
        producer.scheduler.ahead_ns = ahead_ns
        at_ns = number * 1000 * MS
        simulation.handover(producer, consumer, at_ns, request=f"r{number}")
    simulation.handover(other, consumer, request="r3")
    handovers = simulation.joined()
    contradiction, difference = align(handovers)
    # By the later params the producer is ahead by 400 - 3 ms or more, by the earlier end of a lease by 1 ms or less.
    assert contradiction == (
        "clocks of p on host-of-p and d on host-of-d contradict themselves by 396.000 ms: "
        "one was set meanwhile, and nothing is shifted between them"
    )
    assert "other on host-of-other and d on host-of-d differ" in difference
    for handover in handovers:
        shift_ns = {"p": 0, "other": -17 * MS}[handover.producer.engine_id]
        assert {*handover.shift_ns.values()} == {0, shift_ns}
        assert all(span.lasted_ms >= 0 for span in handover.path)


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
    simulation, producer, consumer = engine_pair(workers=2)
    consumer.workers[1].restarted(host="second")
    simulation.handover(producer, consumer, times=times, reason=reason, how=how)
    assert align(simulation.joined()) == []


@pytest.mark.parametrize(
    ("ahead_ns", "note"),
    [(0, ""), (70 * MS, "at least 69.000 ms"), (-70 * MS, "at least 69.000 ms")],
)
def test_params_that_come_before_the_end_of_the_prefill_do_not_shift_clocks(
    ahead_ns: int, note: str
) -> None:
    simulation, producer, consumer = engine_pair()
    for process in (consumer.scheduler, *consumer.workers):
        process.ahead_ns = ahead_ns
    times = Times(router=MS, stages={0: {"reading": 32 * MS}})
    simulation.handover(producer, consumer, times=times, steps=8)
    assert note in " ".join(align(simulation.joined()))
