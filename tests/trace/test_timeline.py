"""Phases of handovers whose true times are known."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.events import (
    DecodeArrived,
    Finished,
    LoadOrdered,
    LoadReported,
    PrefixAsked,
)
from kvferry.trace.reading import read_recording
from kvferry.trace.summary import durations, summarize
from tests.trace.simulated import MS, STAGES, Simulation, Times, engine_pair

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


def lasted(spans: object) -> list[tuple[str, int]]:
    return [(span.phase, span.lasted_ns) for span in spans]  # type: ignore[attr-defined]


@given(TIMES)
def test_every_phase_is_as_long_as_it_truly_was_and_follows_the_one_before(
    times: Times,
) -> None:
    simulation = Simulation()
    simulation.handover(
        simulation.engine("p"), simulation.engine("d", workers=3), times=times
    )
    (one,) = simulation.timelines()
    ends = [sum(times.of_worker(number).values()) for number in range(3)]
    assert one.last is not None
    last = times.of_worker(
        [worker.load.process.place for worker in one.workers].index(
            one.last.load.process.place
        )
    )
    assert sum(last.values()) == max(ends)
    before, stages = (
        [("prefill_queue", times.prefill_queue), ("prefill", times.prefill)],
        list(last.items()),
    )
    waits = [
        ("router", times.router),
        ("decode_queue", times.decode_queue),
        ("order", times.order),
    ]
    after = [("report", times.report), ("first_step", times.first_step)]
    assert lasted(one.before) == before
    assert lasted(one.path) == waits + stages + after
    whole = (*one.before, *one.path)
    assert all(
        earlier.ended_ns == later.begun_ns
        for earlier, later in itertools.pairwise(whole)
    )
    assert one.path[0].begun_ns == one.zero_ns
    assert one.lasted_ns == sum(length for _, length in waits + stages) + times.report
    assert one.held is not None
    assert one.held.lasted_ns == one.lasted_ns - times.report + times.kept
    assert [lasted(worker.spans) for worker in one.workers] == [
        list(times.of_worker(n).items()) for n in range(3)
    ]
    assert (one.outcome, one.missing) == ("loaded", ())


def test_bytes_per_second_are_of_the_time_in_which_anybody_read() -> None:
    simulation = Simulation()
    times = Times(
        stages={
            0: {"posting": MS, "reading": 3 * MS},
            1: {"posting": MS, "reading": 7 * MS},
        }
    )
    simulation.handover(
        simulation.engine("p"),
        simulation.engine("d", workers=2),
        times=times,
        tokens=1000,
        token_bytes=8000,
    )
    (one,) = simulation.timelines()
    assert one.bytes == 8_000_000
    assert one.gb_s == pytest.approx(1.0)


LOADED = ("router", "decode_queue", "order", *STAGES, "report", "first_step")
TO_THE_QUEUE = LOADED[:2]


@dataclass(frozen=True)
class Recorded:
    """A handover of which a part was not recorded, or that ended in another way.

    Attributes:
        how: arguments of the simulated handover.
        without: kinds of events that the consumer's scheduler has not recorded.
        silent: engines and workers of which there is no event: `p`, or `tp0` of the consumer.
    """

    outcome: str
    path: tuple[str, ...]
    how: dict[str, str] = field(default_factory=dict)
    without: tuple[type, ...] = ()
    silent: str = ""
    missing: tuple[str, ...] = ()
    has_end: bool = True


@pytest.mark.parametrize(
    "case",
    [
        Recorded(
            "recomputed: load (deadline)",
            (
                "router",
                "decode_queue",
                "order",
                "queued",
                "connecting",
                "fence",
                "report",
                "first_step",
            ),
            {"reason": "deadline", "recomputed": "load"},
        ),
        Recorded(
            "recomputed: params",
            (*TO_THE_QUEUE, "first_step"),
            {"recomputed": "params"},
        ),
        Recorded(
            "recomputed: lease_over",
            (*TO_THE_QUEUE, "first_step"),
            {"recomputed": "lease_over"},
            without=(DecodeArrived,),
        ),
        Recorded("loaded", LOADED[1:], silent="p", missing=("producer",)),
        Recorded(
            "loaded",
            (*TO_THE_QUEUE, "load", "first_step"),
            silent="tp0",
            missing=("consumer's workers",),
        ),
        Recorded(
            "nothing to load",
            TO_THE_QUEUE,
            without=(LoadOrdered, LoadReported),
            silent="tp0",
        ),
        Recorded(
            "ended before it was loaded",
            LOADED[:9],
            without=(LoadReported,),
            has_end=False,
        ),
        Recorded(
            "under way", LOADED[:9], without=(LoadReported, Finished), has_end=False
        ),
    ],
    ids=lambda case: " ".join((case.outcome, *case.missing)),
)
def test_what_became_of_a_handover_follows_from_what_was_recorded_of_it(
    case: Recorded,
) -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer, **case.how)  # type: ignore[arg-type]
    consumer.scheduler.forget(*case.without)
    for name, process in (("p", producer.scheduler), ("tp0", consumer.workers[0])):
        if case.silent == name:
            process.events.clear()
    (one,) = simulation.timelines()
    assert (one.outcome, one.missing, one.lasted_ns is not None) == (
        case.outcome,
        case.missing,
        case.has_end,
    )
    assert tuple(span.phase for span in one.path) == case.path
    assert one.path[0].begun_ns == one.zero_ns
    if "recomputed" in case.how:
        assert (one.bytes, one.gb_s) == (0, None)


@pytest.mark.parametrize(
    ("how", "outcome", "missing"),
    [("expired", "not fetched: expired", ()), ("done", "fetched: done", ("consumer",))],
)
def test_without_a_consumer_the_lease_says_whether_there_was_one(
    how: str, outcome: str, missing: tuple[str, ...]
) -> None:
    simulation = Simulation()
    simulation.handover(
        simulation.engine("p"), None, times=Times(kept=480_000 * MS), how=how
    )
    (one,) = simulation.timelines()
    assert (one.outcome, one.missing, one.lasted_ns) == (outcome, missing, None)
    assert one.held is not None
    assert one.held.lasted_ns == 480_000 * MS


def test_a_prefix_begins_when_engines_are_asked_for_it_and_has_no_router() -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer)
    events = consumer.scheduler.events
    (arrived,) = (event for event in events if isinstance(event, DecodeArrived))
    asked_ns = arrived.at_ns - MS
    asked = PrefixAsked(at_ns=asked_ns, request=arrived.request, tokens=64, sources=2)
    events.append(asked)
    (one,) = simulation.timelines()
    assert lasted(one.path[:2]) == [("prefix_query", MS), ("decode_queue", MS)]
    assert (one.zero_ns, "router" in dict(lasted(one.path))) == (asked_ns, False)


def test_a_load_may_be_reported_after_the_end_of_its_request() -> None:
    simulation, producer, consumer = engine_pair()
    simulation.handover(producer, consumer, reason="handshake")
    events = consumer.scheduler.events
    (reported,) = (event for event in events if isinstance(event, LoadReported))
    consumer.scheduler.forget(Finished)
    events.append(Finished(at_ns=reported.at_ns - 1, request=reported.request))
    (one,) = simulation.timelines()
    assert one.outcome == "load failed (handshake)"
    assert len(one.workers) == 1


def test_the_slowest_handover_is_first_and_what_never_ended_is_last(
    tmp_path: Path,
) -> None:
    simulation, producer, consumer = engine_pair()
    for number, router in enumerate((5, 50, 20)):
        times = replace(Times(), router=router * MS)
        simulation.handover(
            producer, consumer, number * MS, times, request=f"r{router}"
        )
    simulation.handover(
        producer, None, request="short", times=Times(kept=MS), how="expired"
    )
    simulation.handover(
        producer, None, request="long", times=Times(kept=9 * MS), how="expired"
    )
    summary = summarize(read_recording([simulation.write(tmp_path)]))
    names = [one.handover.producer_request for one in summary.timelines]
    assert names == ["r50", "r20", "r5", "long", "short"]
    assert summary.outcomes == {"loaded": 3, "not fetched: expired": 2}
    phases = [one.phase for one in durations(summary.timelines)]
    assert phases[:4] == ["prefill_queue", "prefill", "handover", "router"]


def test_percentiles_are_by_nearest_rank() -> None:
    simulation, producer, consumer = engine_pair()
    for number in range(1, 201):
        simulation.handover(
            producer, consumer, 0, Times(router=number * MS), request=f"r{number}"
        )
    (router,) = (
        one for one in durations(simulation.timelines()) if one.phase == "router"
    )
    assert (router.p50_ns, router.p99_ns, router.max_ns) == (
        100 * MS,
        198 * MS,
        200 * MS,
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cmpl-a", True),
        ("abc", True),
        ("code-7", True),
        ("00000000000000", True),
        ("/0000", True),
        ("d-7b", False),
    ],
)
def test_a_request_is_found_by_a_part_of_any_of_its_ids(text: str, found: bool) -> None:
    simulation = Simulation()
    simulation.handover(
        simulation.engine("p"),
        simulation.engine("d"),
        request="cmpl-abc",
        decode_request="decode-7",
    )
    (one,) = simulation.handovers()
    assert one.has_id(text) is found
    assert len(simulation.read()) == 4
