"""Which records belong together."""

from __future__ import annotations

import itertools
import random

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
)
from kvferry.trace.joining import join
from tests.trace.simulated import MS, SimulatedEngine, Simulation, engine_pair

OF_PREFILL = {PrefillArrived, PrefillScheduled, ParamsGiven, LeaseOver}
OF_DECODE = {DecodeArrived, LoadOrdered, LoadReported, DecodeScheduled, Finished}


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
        request = f"r{next(names[producer])}"
        decode = f"r{next(names[consumer])}"
        lease = simulation.handover(
            producer,
            consumer,
            draw.randint(0, 100) * MS,
            request=request,
            decode_request=decode,
            tokens=number + 1,
        )
        wanted[lease] = ((producer.name, request), (consumer.name, decode), number + 1)
    files = simulation.processes()
    draw.shuffle(files)
    found = join({file.started: file.in_order() for file in files})
    assert len(found) == requests
    for one in found:
        assert one.lease is not None
        producer_key, consumer_key, tokens = wanted[one.lease]
        assert (one.producer, one.consumer) == (producer_key, consumer_key)
        assert set(one.prefill) == OF_PREFILL
        assert set(one.decode) == OF_DECODE
        for event in (
            one.get(PrefillArrived),
            one.get(ParamsGiven),
            one.get(DecodeArrived),
        ):
            assert event is not None
            assert event.tokens == tokens
        places = [process.place for process in one.loads]
        assert sorted(places) == [f"tp{rank}" for rank in range(workers)]
        for process, load in one.loads.items():
            assert (process.engine_id, load.request) == consumer_key


def test_several_requests_may_read_one_lease() -> None:
    simulation, producer, consumer = engine_pair()
    lease = simulation.handover(producer, consumer, decode_request="a")
    simulation.handover(producer, consumer, MS, decode_request="b")
    for event in consumer.scheduler.events:
        if isinstance(event, DecodeArrived):
            consumer.scheduler.replace(event, lease=lease)
    found = [one for one in simulation.joined() if one.lease == lease]
    assert sorted(one.consumer.request for one in found) == ["a", "b"]
    assert all(set(one.prefill) == OF_PREFILL for one in found)


@pytest.mark.parametrize(
    ("recorded", "producer", "consumer", "loads"),
    [
        ({"p"}, ("p", "r"), ("", ""), 0),
        ({"d"}, ("p", "r"), ("d", "s"), 0),
        ({"tp0", "tp1"}, ("", ""), ("d", "s"), 2),
    ],
)
def test_what_one_part_recorded_alone_is_a_handover_too(
    recorded: set[str],
    producer: tuple[str, str],
    consumer: tuple[str, str],
    loads: int,
) -> None:
    simulation, there, here = engine_pair(workers=2)
    simulation.handover(there, here, request="r", decode_request="s")
    parts = {"p": there.scheduler, "d": here.scheduler}
    parts |= {worker.started.place: worker for worker in here.workers}
    for name, process in parts.items():
        if name not in recorded:
            process.events.clear()
    (one,) = simulation.joined()
    assert (one.producer, one.consumer) == (producer, consumer)
    assert len(one.loads) == loads


def test_a_load_of_which_the_arrival_was_not_recorded_is_not_lost() -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer, decode_request="s")
    consumer.scheduler.forget(DecodeArrived)
    found = {one.consumer.request: one for one in simulation.joined()}
    assert found["s"].lease is None
    assert len(found["s"].loads) == 1
    assert set(found[""].prefill) == OF_PREFILL


def test_a_prompt_that_was_never_scheduled_is_shown() -> None:
    simulation, producer, _ = engine_pair()
    simulation.handover(producer, None, request="r")
    del producer.scheduler.events[1:]
    (one,) = simulation.joined()
    assert (one.lease, one.producer) == (None, ("p", "r"))


def test_of_an_event_that_was_recorded_twice_the_first_counts() -> None:
    """A prompt that is preempted is scheduled again; a file may have been copied."""
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer, steps=3)
    scheduled = producer.scheduler.the(PrefillScheduled)
    again = {"request": scheduled.request, "lease": scheduled.lease}
    producer.scheduler.record(PrefillScheduled, scheduled.at_ns + MS, **again)
    once = simulation.joined()
    copies = {one.started: one.in_order() * 2 for one in simulation.processes()}
    for (one,) in (once, join(copies)):
        assert one.get(PrefillScheduled) == scheduled
        assert (len(one.prefill_steps), len(one.loads)) == (3, 1)
