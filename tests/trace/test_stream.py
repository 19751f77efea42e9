"""Handovers whose prompt is read while it is computed: steps beside reads, on one clock."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from kvferry.cli.trace.waterfall import THIN, WIDE_ZERO, ZERO, draw, height_of, scale_for
from kvferry.trace.chrome import chrome_trace
from kvferry.trace.clocks import compare
from kvferry.trace.events import (
    DecodeArrived,
    LoadEnded,
    ParamsGiven,
    PrefillScheduled,
    PrefillStep,
    TracedLease,
)
from kvferry.trace.summary import durations
from kvferry.trace.timeline import Timeline, make_timeline
from tests.trace.simulated import BEGIN_NS, MS, Simulation, Times
from tests.trace.simulated_stream import follow
from tests.trace.test_chrome import check_format
from tests.trace.test_matching import matched

TIMES = Times(prefill=80 * MS, router=MS, stages={n: {"reading": 32 * MS} for n in range(2)})


def streamed(steps: int = 8, **how: Any) -> Timeline:
    simulation = Simulation()
    follow(
        simulation, simulation.engine("p"), simulation.engine("d", **how), times=TIMES, steps=steps
    )
    (one,) = timelines(simulation)
    return one


def timelines(simulation: Simulation) -> list[Timeline]:
    found = matched(simulation)
    clocks = compare(found)
    return [make_timeline(one, clocks) for one in found]


def test_steps_and_reads_have_their_times_and_their_tokens() -> None:
    one = streamed(4, workers=2)
    begun = BEGIN_NS + TIMES.prefill_queue
    assert [
        (step.span.begun_ns - begun, step.span.ended_ns - begun, step.stop_token)
        for step in one.steps
    ] == [
        (0, 20 * MS, 1024),
        (20 * MS, 40 * MS, 2048),
        (40 * MS, 60 * MS, 3072),
        (60 * MS, 80 * MS, 4096),
    ]
    assert len(one.workers) == 2
    for worker in one.workers:
        assert [(chunk.span.begun_ns, chunk.stop_token) for chunk in worker.chunks] == [
            (step.span.ended_ns, step.stop_token) for step in one.steps
        ]
        assert {chunk.span.lasted_ns for chunk in worker.chunks} == {8 * MS}


def test_the_handover_is_what_is_left_after_the_prefill() -> None:
    one = streamed(4)
    assert [(span.phase, span.lasted_ns) for span in one.path if span.lasted_ns] == [
        ("reading", 8 * MS),
        ("fence_again", MS // 5),
        ("report", TIMES.report),
        ("first_step", TIMES.first_step),
    ]
    assert (
        min(span.begun_ns for span in one.path)
        == one.zero_ns
        == BEGIN_NS + TIMES.prefill_queue + 80 * MS
    )
    assert one.lasted_ns == 8 * MS + MS // 5 + TIMES.report
    assert (one.early_bytes * 4, one.gb_s) == (one.bytes * 3, None), (
        "reads waited for steps: no rate"
    )


@pytest.mark.parametrize(
    ("ahead_ns", "producer_ns"), [(0, []), (70 * MS, [-69 * MS]), (-70 * MS, [69 * MS])]
)
def test_params_that_come_before_the_end_of_the_prefill_do_not_shift_clocks(
    ahead_ns: int, producer_ns: list[int]
) -> None:
    simulation = Simulation()
    producer, consumer = simulation.engine("p"), simulation.engine("d", ahead_ns=ahead_ns)
    follow(simulation, producer, consumer, times=TIMES)
    clocks = compare(matched(simulation))
    assert list(clocks.ahead_ns.values()) == producer_ns


def test_events_of_a_damaged_recording_are_drawn_as_far_as_they_make_sense() -> None:
    simulation = Simulation()
    producer, consumer = simulation.engine("p"), simulation.engine("d")
    lease = follow(simulation, producer, consumer, times=TIMES)
    events = producer.scheduler.events
    events.append(PrefillStep(at_ns=BEGIN_NS + 10**12, lease=lease, tokens=2**40))
    events.append(PrefillStep(at_ns=BEGIN_NS - MS, lease=lease, tokens=0))
    events.append(PrefillStep(at_ns=5, lease=TracedLease(boot="f" * 32, epoch="f" * 15), tokens=7))
    (load,) = consumer.workers[0].events
    assert isinstance(load, LoadEnded)
    backwards = tuple(msgspec.structs.replace(chunk, ended_ns=0) for chunk in reversed(load.chunks))
    consumer.workers[0].events[:] = [
        msgspec.structs.replace(load, early_bytes=2**60, chunks=backwards)
    ]
    (one,) = timelines(simulation)
    assert [step.stop_token for step in one.steps] == [
        0,
        *(512 * step for step in range(1, 9)),
        2**40,
    ]
    spans = [chunk.span for chunk in (*one.steps, *one.workers[0].chunks)]
    assert all(span.begun_ns <= span.ended_ns for span in spans)
    assert one.early_bytes == one.bytes
    check_format(json.loads("".join(chrome_trace([one])))["traceEvents"])
    assert draw([one], 1).count("chunk read to token") == 8


@pytest.mark.parametrize("lost", [PrefillScheduled, ParamsGiven, DecodeArrived])
def test_an_event_that_is_lost_leaves_the_others(lost: type) -> None:
    simulation = Simulation()
    engines = simulation.engine("p"), simulation.engine("d")
    follow(simulation, *engines, times=TIMES)
    for engine in engines:
        engine.scheduler.events[:] = [
            event for event in engine.scheduler.events if not isinstance(event, lost)
        ]
    found = timelines(simulation)
    assert sum(len(one.steps) for one in found) == 8
    assert sum(len(worker.chunks) for one in found for worker in one.workers) == 8


def test_steps_and_reads_have_tracks_of_their_own_in_viewers() -> None:
    one = streamed(4, workers=2)
    events = json.loads("".join(chrome_trace([one])))["traceEvents"]
    check_format(events)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {
        *("prefills", "prefill steps", "handovers"),
        *("worker tp0", "worker tp0 reads", "worker tp1", "worker tp1 reads"),
    }
    assert sum(event["name"] == "chunk_read" for event in events) == 2 * 4
    begins = {
        event["name"].split()[0]: event["ts"]
        for event in events
        if "args" in event and event["ph"] == "X"
    }
    (arrow,) = {event["ts"] for event in events if event["ph"] == "s" and event["pid"] == 2}
    assert arrow == begins["handover"] < begins["prefill"] + 80_000, (
        "the arrow leaves when the consumer begins"
    )


def test_the_picture_has_the_reads_below_the_steps_that_they_overlap() -> None:
    one = streamed(4)
    picture = draw([one], 1)
    assert WIDE_ZERO > ZERO
    rows = {phase: rects(picture, phase) for phase in ("prefill_step", "chunk_read")}
    steps, reads = rows["prefill_step"], rows["chunk_read"]
    assert {y for _, _, y in reads} == {y + THIN + 1 for _, _, y in steps}
    assert len({y for _, _, y in steps}) == 1
    assert [end for _, end, _ in steps] == pytest.approx([begin for begin, _, _ in reads], abs=0.02)
    assert steps[-1][1] == WIDE_ZERO
    for (begun, ended, _), (read, done, _) in zip(steps[1:], reads, strict=False):
        assert begun - 0.02 <= read < done < ended, (
            "the part before is read while this one is computed"
        )
    assert "prefill step to token 2048: 20 ms" in picture
    assert "268" not in picture
    assert "537 MB, 75% early" in picture


def rects(picture: str, phase: str) -> list[tuple[float, float, float]]:
    """Left, right and top of the bars of a phase, without the legend."""
    found = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect")  # noqa: S314
    bars = [
        one.attrib
        for one in found
        if one.attrib.get("class") == f"p-{phase}" and "opacity" in one.attrib
    ]
    return [
        (float(one["x"]), float(one["x"]) + float(one["width"]), float(one["y"])) for one in bars
    ]


def test_a_handover_without_chunks_is_drawn_as_ever() -> None:
    simulation = Simulation()
    simulation.handover(simulation.engine("p"), simulation.engine("d"))
    (one,) = timelines(simulation)
    assert (one.steps, one.early_bytes, scale_for([one]).zero) == ((), 0, ZERO)
    assert height_of(one) < height_of(streamed())
    assert "early" not in draw([one], 1)


def test_stages_count_from_the_end_of_the_prefill_and_reads_one_by_one() -> None:
    counted = {str(one.phase): one for one in durations([streamed(4)])}
    assert (counted["reading"].count, counted["reading"].max_ns) == (1, 8 * MS)
    assert (counted["chunk_read"].count, counted["chunk_read"].max_ns) == (4, 8 * MS)
    assert (counted["prefill_step"].count, counted["prefill_step"].max_ns) == (4, 20 * MS)
