"""Handovers whose prompt is read while it is computed: steps beside reads, on one clock."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.trace.clocks import compare
from kvferry.trace.events import (
    LoadEnded,
    PrefillStep,
    TracedLease,
)
from kvferry.trace.summary import durations
from kvferry.trace.timeline import Timeline
from tests.trace.simulated import BEGIN_NS, MS, Simulation, Times, engine_pair
from tests.trace.test_perfetto import slices_of, traced

TIMES = Times(
    prefill=80 * MS, router=MS, stages={n: {"reading": 32 * MS} for n in range(2)}
)


def streamed(steps: int = 4, **how: Any) -> Timeline:
    simulation = Simulation()
    engines = simulation.engine("p"), simulation.engine("d", **how)
    simulation.handover(*engines, times=TIMES, steps=steps)
    (timeline,) = simulation.timelines()
    return timeline


def test_each_read_begins_at_the_end_of_the_step_whose_tokens_it_reads() -> None:
    timeline = streamed(workers=2)
    begun = BEGIN_NS + TIMES.prefill_queue
    assert [
        (step.begun_ns - begun, step.ended_ns - begun, step.stop_token)
        for step in timeline.steps
    ] == [
        (0, 20 * MS, 1024),
        (20 * MS, 40 * MS, 2048),
        (40 * MS, 60 * MS, 3072),
        (60 * MS, 80 * MS, 4096),
    ]
    assert len(timeline.workers) == 2
    for worker in timeline.workers:
        assert [(chunk.begun_ns, chunk.stop_token) for chunk in worker.chunks] == [
            (step.ended_ns, step.stop_token) for step in timeline.steps
        ]
        assert {chunk.lasted_ns for chunk in worker.chunks} == {8 * MS}


def test_the_handover_is_what_is_left_after_the_prefill() -> None:
    timeline = streamed()
    assert [
        (span.phase, span.lasted_ns) for span in timeline.path if span.lasted_ns
    ] == [
        ("reading", 8 * MS),
        ("fence_again", MS // 5),
        ("report", TIMES.report),
        ("first_step", TIMES.first_step),
    ]
    prompt_ns = BEGIN_NS + TIMES.prefill_queue + 80 * MS
    assert min(span.begun_ns for span in timeline.path) == timeline.zero_ns == prompt_ns
    assert timeline.lasted_ns == 8 * MS + MS // 5 + TIMES.report
    assert timeline.early_bytes * 4 == timeline.bytes * 3
    assert timeline.gb_s is None, "reads waited for steps: no rate"


@pytest.mark.parametrize(
    ("ahead_ns", "producer_ns"), [(0, []), (70 * MS, [-69 * MS]), (-70 * MS, [69 * MS])]
)
def test_params_that_come_before_the_end_of_the_prefill_do_not_shift_clocks(
    ahead_ns: int, producer_ns: list[int]
) -> None:
    simulation = Simulation()
    producer, consumer = (
        simulation.engine("p"),
        simulation.engine("d", ahead_ns=ahead_ns),
    )
    simulation.handover(producer, consumer, times=TIMES, steps=8)
    clocks = compare(simulation.handovers())
    assert list(clocks.ahead_ns.values()) == producer_ns


def test_events_of_a_damaged_recording_are_shown_as_far_as_they_make_sense() -> None:
    simulation, producer, consumer = engine_pair()
    lease = simulation.handover(producer, consumer, times=TIMES, steps=8)
    events = producer.scheduler.events
    events.append(PrefillStep(at_ns=BEGIN_NS + 10**12, lease=lease, tokens=2**40))
    events.append(PrefillStep(at_ns=BEGIN_NS - MS, lease=lease, tokens=0))
    events.append(
        PrefillStep(at_ns=5, lease=TracedLease(boot="f" * 32, epoch="f" * 15), tokens=7)
    )
    (load,) = consumer.workers[0].events
    assert isinstance(load, LoadEnded)
    backwards = tuple(
        msgspec.structs.replace(chunk, ended_ns=0) for chunk in reversed(load.chunks)
    )
    damaged = msgspec.structs.replace(load, early_bytes=2**60, chunks=backwards)
    consumer.workers[0].events[:] = [damaged]
    (timeline,) = simulation.timelines()
    computed = [512 * step for step in range(1, 9)]
    assert [step.stop_token for step in timeline.steps] == [0, *computed, 2**40]
    spans = (*timeline.steps, *timeline.workers[0].chunks)
    assert all(span.begun_ns <= span.ended_ns for span in spans)
    assert timeline.early_bytes == timeline.bytes
    tracks = slices_of(traced([timeline]))
    assert {"p: prefill steps", "d: reads of tp0"} <= tracks.keys()


def test_stages_count_from_the_end_of_the_prefill_and_reads_one_by_one() -> None:
    counted = {str(lasted.phase): lasted for lasted in durations([streamed()])}
    assert (counted["reading"].count, counted["reading"].max_ns) == (1, 8 * MS)
    assert (counted["chunk_read"].count, counted["chunk_read"].max_ns) == (4, 8 * MS)
    assert (counted["prefill_step"].count, counted["prefill_step"].max_ns) == (
        4,
        20 * MS,
    )
