"""Phases of handovers whose true times are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.events import (
    DecodeArrived,
    Finished,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    PrefillStep,
    PrefixAsked,
    TracedLease,
)
from kvferry.trace.handover import Handover, Span
from kvferry.trace.outcome import missing_parts, outcome_of
from tests.trace.simulated import BEGIN_NS, MS, STAGES, Simulation, Times, engine_pair
from tests.trace.test_perfetto import slices_of, traced

LENGTH = st.integers(0, 10**10)
TIMES = st.builds(
    Times,
    prefill_queue=LENGTH,
    prefill=LENGTH,
    router=LENGTH,
    decode_queue=LENGTH,
    order=LENGTH,
    stages=st.dictionaries(
        st.integers(0, 2), st.dictionaries(st.sampled_from(list(STAGES)), LENGTH)
    ),
    report=LENGTH,
    first_step=LENGTH,
    kept=LENGTH,
)


def lasted(spans: Iterable[Span]) -> list[tuple[str, int]]:
    """Each phase and its nanoseconds."""
    return [(span.phase, round(span.lasted_ms * MS)) for span in spans]


@given(TIMES)
def test_every_phase_is_as_long_as_it_truly_was_and_follows_the_one_before(
    times: Times,
) -> None:
    simulation, producer, consumer = engine_pair(workers=3)
    simulation.handover(producer, consumer, times=times)
    (one,) = simulation.handovers()
    of_workers = [times.of_worker(number) for number in range(3)]
    loads_ns = [sum(stages.values()) for stages in of_workers]
    assert [lasted(worker.stages) for worker in one.workers] == [
        list(stages.items()) for stages in of_workers
    ]
    last = one.workers[loads_ns.index(max(loads_ns))]
    assert one.last is last
    assert lasted(one.before) == [
        ("prefill_queue", times.prefill_queue),
        ("prefill", times.prefill),
    ]
    assert lasted(one.path) == [
        ("router", times.router),
        ("decode_queue", times.decode_queue),
        ("order", times.order),
        *lasted(last.stages),
        ("report", times.report),
        ("first_step", times.first_step),
    ]
    for earlier, later in itertools.pairwise((*one.before, *one.path)):
        assert earlier.ended_ms == later.begun_ms
    assert one.path[0].begun_ms == 0
    loaded_ns = times.router + times.decode_queue + times.order + max(loads_ns)
    assert one.handover_ms == (loaded_ns + times.report) / MS
    assert one.held is not None
    assert lasted([one.held]) == [("held", loaded_ns + times.kept)]
    assert (outcome_of(one), missing_parts(one)) == ("loaded", ())


def test_bytes_per_second_are_of_the_time_in_which_anybody_read() -> None:
    simulation, producer, consumer = engine_pair(workers=2)
    stages = {n: {"posting": MS, "reading": ms * MS} for n, ms in enumerate((3, 7))}
    times = Times(stages=stages)
    simulation.handover(producer, consumer, 0, times, tokens=1000, token_bytes=8000)
    (one,) = simulation.handovers()
    assert one.bytes == 8_000_000
    assert one.gb_s == pytest.approx(1.0)


LOADED = ("router", "decode_queue", "order", *STAGES, "report", "first_step")
FAILED = (*LOADED[:6], "report", "first_step")
UNTIL_LOADED = LOADED[:9]
TO_THE_QUEUE = LOADED[:2]


@pytest.mark.parametrize(
    ("outcome", "how", "forgotten", "path"),
    [
        ("load failed (deadline)", {"reason": "deadline"}, (), FAILED),
        ("recomputed: fence", {"reason": "fence", "recomputed": "fence"}, (), FAILED),
        (
            "recomputed: load (deadline)",
            {"reason": "deadline", "recomputed": "load"},
            (),
            FAILED,
        ),
        (
            "recomputed: params",
            {"recomputed": "params"},
            (),
            (*TO_THE_QUEUE, "first_step"),
        ),
        (
            "recomputed: lease_over",
            {"recomputed": "lease_over"},
            (DecodeArrived,),
            (*TO_THE_QUEUE, "first_step"),
        ),
        ("nothing to load", {}, (LoadOrdered, LoadReported, LoadEnded), TO_THE_QUEUE),
        ("ended before it was loaded", {}, (LoadReported,), UNTIL_LOADED),
        ("under way", {}, (LoadReported, Finished), UNTIL_LOADED),
    ],
)
def test_what_became_of_a_handover_follows_from_what_was_recorded_of_it(
    outcome: str, how: dict[str, Any], forgotten: tuple[type, ...], path: tuple[str]
) -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer, **how)
    for process in (consumer.scheduler, *consumer.workers):
        process.forget(*forgotten)
    (one,) = simulation.handovers()
    assert (outcome_of(one), missing_parts(one)) == (outcome, ())
    assert tuple(span.phase for span in one.path) == path
    assert one.path[0].begun_ms == 0
    assert (one.handover_ms is None) == (path == UNTIL_LOADED)
    if how:
        assert (one.bytes, one.gb_s) == (0, None)


@pytest.mark.parametrize(
    ("silent", "missing", "path"),
    [
        ("p", "producer", LOADED[1:]),
        ("tp0", "consumer's workers", (*TO_THE_QUEUE, "load", "first_step")),
    ],
)
def test_a_part_that_recorded_nothing_is_named_and_the_rest_is_shown(
    silent: str, missing: str, path: tuple[str]
) -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer)
    parts = {"p": producer.scheduler, "tp0": consumer.workers[0]}
    parts[silent].events.clear()
    (one,) = simulation.handovers()
    assert (outcome_of(one), missing_parts(one)) == ("loaded", (missing,))
    assert tuple(span.phase for span in one.path) == path
    assert one.path[0].begun_ms == 0


@pytest.mark.parametrize(
    ("how", "outcome", "missing"),
    [("expired", "not fetched: expired", ()), ("done", "fetched: done", ("consumer",))],
)
def test_without_a_consumer_the_lease_says_whether_there_was_one(
    how: str, outcome: str, missing: tuple[str, ...]
) -> None:
    simulation, producer, _ = engine_pair()
    simulation.handover(producer, None, times=Times(kept=480_000 * MS), how=how)
    (one,) = simulation.handovers()
    assert (outcome_of(one), missing_parts(one), one.handover_ms) == (
        outcome,
        missing,
        None,
    )
    assert one.held is not None
    assert one.held.lasted_ms == 480_000


def test_a_prefix_begins_when_engines_are_asked_for_it_and_has_no_router() -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer)
    arrived = consumer.scheduler.the(DecodeArrived)
    asked_ns = arrived.at_ns - MS
    asked = {"request": arrived.request, "tokens": 64, "sources": 2}
    consumer.scheduler.record(PrefixAsked, asked_ns, **asked)
    (one,) = simulation.handovers()
    assert lasted(one.path[:2]) == [("prefix_query", MS), ("decode_queue", MS)]
    assert (one.zero_ns, "router" in dict(lasted(one.path))) == (asked_ns, False)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cmpl-a", True),
        ("code-7", True),
        ("0af7651916cd43dd", True),
        ("00000000000000", True),
        ("/0000", True),
        ("d-7b", False),
    ],
)
def test_a_request_is_found_by_a_part_of_any_of_its_ids(text: str, found: bool) -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(
        producer, consumer, request="cmpl-abc", decode_request="decode-7"
    )
    arrived = consumer.scheduler.the(DecodeArrived)
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    consumer.scheduler.replace(arrived, traceparent=traceparent)
    (one,) = simulation.handovers()
    assert one.has_id(text) is found


# Prompts that are read while they are computed.

STREAMED = Times(
    prefill=80 * MS, router=MS, stages={n: {"reading": 32 * MS} for n in range(2)}
)


def streamed(simulation: Simulation, workers: int = 1) -> Handover:
    producer = simulation.engine("p")
    consumer = simulation.engine("d", workers=workers)
    simulation.handover(producer, consumer, times=STREAMED, steps=4)
    (handover,) = simulation.handovers()
    return handover


def test_each_read_begins_at_the_end_of_the_step_whose_tokens_it_reads() -> None:
    one = streamed(Simulation(), workers=2)
    assert [(step.begun_ms, step.ended_ms, step.stop_token) for step in one.steps] == [
        (-80, -60, 1024),
        (-60, -40, 2048),
        (-40, -20, 3072),
        (-20, 0, 4096),
    ]
    assert len(one.workers) == 2
    for worker in one.workers:
        assert [(chunk.begun_ms, chunk.stop_token) for chunk in worker.chunks] == [
            (step.ended_ms, step.stop_token) for step in one.steps
        ]
        assert {chunk.lasted_ms for chunk in worker.chunks} == {8}


def test_the_handover_is_what_is_left_after_the_prefill() -> None:
    one = streamed(Simulation())
    assert [part for part in lasted(one.path) if part[1]] == [
        ("reading", 8 * MS),
        ("fence_again", MS // 5),
        ("report", STREAMED.report),
        ("first_step", STREAMED.first_step),
    ]
    assert min(span.begun_ms for span in one.path) == 0
    assert one.handover_ms == 8 + 0.2 + STREAMED.report / MS
    assert one.early_bytes * 4 == one.bytes * 3
    assert one.gb_s is None, "reads waited for steps: no rate"


def test_events_of_a_damaged_recording_are_shown_as_far_as_they_make_sense() -> None:
    simulation, producer, consumer = engine_pair()
    lease = simulation.handover(producer, consumer, times=STREAMED, steps=8)
    record = producer.scheduler.record
    record(PrefillStep, BEGIN_NS + 10**12, lease=lease, tokens=2**40)
    record(PrefillStep, BEGIN_NS - MS, lease=lease, tokens=0)
    unknown = TracedLease(boot="f" * 32, epoch="f" * 15)
    record(PrefillStep, 5, lease=unknown, tokens=7)
    (worker,) = consumer.workers
    load = worker.the(LoadEnded)
    backwards = []
    for chunk in reversed(load.chunks):
        backwards.append(msgspec.structs.replace(chunk, ended_ns=0))
    worker.replace(load, early_bytes=2**40, chunks=tuple(backwards))
    (one,) = simulation.handovers()
    computed = [512 * step for step in range(1, 9)]
    assert [step.stop_token for step in one.steps] == [0, *computed, 2**40]
    spans = (*one.steps, *one.workers[0].chunks)
    assert all(span.begun_ms <= span.ended_ms for span in spans)
    assert one.early_bytes == one.bytes
    tracks = slices_of(traced([one]))
    assert {"p: prefill steps", "d: reads of tp0"} <= tracks.keys()
