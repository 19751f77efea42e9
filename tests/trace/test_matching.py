"""Which records belong together."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.events import (
    DecodeArrived,
    DecodeScheduled,
    Finished,
    LeaseOver,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillArrived,
    PrefillScheduled,
    ProcessRole,
)
from kvferry.trace.handover import match
from tests.trace.simulated import MS, SimulatedEngine, Simulation, engine_pair


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_every_request_has_all_of_its_events_and_no_other(
    producers: int, consumers: int, workers: int, requests: int, draw: random.Random
) -> None:
    """Ids recur across engines; files come in any order."""
    simulation = Simulation()
    there = [simulation.engine(f"p{number}") for number in range(producers)]
    here = [
        simulation.engine(f"d{number}", workers=workers) for number in range(consumers)
    ]
    names: dict[SimulatedEngine, itertools.count[int]] = {
        engine: itertools.count() for engine in (*there, *here)
    }
    wanted = {}
    for number in range(requests):
        producer, consumer = draw.choice(there), draw.choice(here)
        request, decode = f"r{next(names[producer])}", f"r{next(names[consumer])}"
        lease = simulation.handover(
            producer,
            consumer,
            draw.randint(0, 100) * MS,
            request=request,
            decode_request=decode,
            tokens=number + 1,
        )
        wanted[lease] = (producer.name, request, consumer.name, decode, number + 1)
    files = simulation.read()
    draw.shuffle(files)
    found = match(files)
    announced = {
        one.lease: (
            one.producer,
            one.producer_request,
            one.consumer,
            one.consumer_request,
            one.tokens,
        )
        for one in found
    }
    assert announced == wanted
    for one in found:
        assert one.prefill
        assert one.decode
        assert set(one.prefill.events) == {
            PrefillArrived,
            PrefillScheduled,
            ParamsGiven,
            LeaseOver,
        }
        assert set(one.decode.events) == {
            DecodeArrived,
            LoadOrdered,
            LoadReported,
            DecodeScheduled,
            Finished,
        }
        assert sorted(load.process.place for load in one.loads) == [
            f"tp{number}" for number in range(workers)
        ]
        assert {load.process.engine_id for load in one.loads} == {one.consumer}
        assert {load.ended.request for load in one.loads} == {one.consumer_request}


def test_several_requests_may_read_one_lease() -> None:
    simulation, producer, consumer = engine_pair()
    lease = simulation.handover(producer, consumer, decode_request="a")
    other = simulation.handover(producer, consumer, MS, decode_request="b")
    events = consumer.scheduler.events
    events[:] = [
        msgspec.structs.replace(event, lease=lease)
        if isinstance(event, DecodeArrived) and event.lease == other
        else event
        for event in events
    ]
    found = [one for one in simulation.handovers() if one.lease == lease]
    assert sorted(one.consumer_request for one in found) == ["a", "b"]
    assert all(one.prefill for one in found)


@pytest.mark.parametrize("role", ["p", "d"])
def test_one_half_alone_is_a_handover_too(role: str) -> None:
    simulation = Simulation()
    simulation.handover(
        simulation.engine("p"), simulation.engine("d"), request="r", decode_request="s"
    )
    (one,) = match(
        process for process in simulation.read() if process.started.engine_id == role
    )
    assert (one.prefill is None, one.decode is None) == (role == "d", role == "p")
    assert one.producer_request == "r"
    assert one.consumer_request == ("s" if role == "d" else "")


def test_loads_without_their_scheduler_are_not_lost() -> None:
    simulation = Simulation()
    simulation.handover(
        simulation.engine("p"), simulation.engine("d", workers=3), decode_request="s"
    )
    (one,) = match(
        process
        for process in simulation.read()
        if process.started.part is ProcessRole.WORKER
    )
    assert (one.consumer_request, len(one.loads)) == ("s", 3)


def test_a_load_of_which_the_arrival_was_not_recorded_is_not_lost() -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer, decode_request="s")
    consumer.scheduler.forget(DecodeArrived)
    found = {one.consumer_request: one for one in simulation.handovers()}
    assert len(found["s"].loads) == 1
    assert found["s"].lease is None
    assert found[""].prefill


def test_a_prompt_that_was_never_scheduled_is_shown() -> None:
    simulation = Simulation()
    producer = simulation.engine("p")
    simulation.handover(producer, None, request="r")
    del producer.scheduler.events[1:]
    (one,) = simulation.handovers()
    assert (one.lease, one.producer_request) == (None, "r")
