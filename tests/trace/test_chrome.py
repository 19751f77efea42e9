"""The trace that viewers open, against the rules of its format."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.chrome import chrome_trace, lanes
from kvferry.trace.clocks import compare
from kvferry.trace.timeline import Timeline, make_timeline
from tests.trace.simulated import MS, Simulation, Times
from tests.trace.test_matching import matched

_Event = dict[str, Any]
INTERVALS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda one: (one[0], one[0] + one[1]))
)


@given(INTERVALS)
def test_lanes_never_overlap_and_are_no_more_than_needed(intervals: list[tuple[int, int]]) -> None:
    chosen = lanes(intervals)
    wide = [(begun, max(ended, begun + 1)) for begun, ended in intervals]
    by_lane = defaultdict(list)
    for interval, lane in zip(wide, chosen, strict=True):
        by_lane[lane].append(interval)
    for several in by_lane.values():
        several.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(several))
    most = max((sum(begun <= at < ended for begun, ended in wide) for at in range(80)), default=0)
    assert len(by_lane) == most


def traced(timelines: list[Timeline]) -> list[_Event]:
    document = json.loads("".join(chrome_trace(timelines)))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] == "ms"
    return list(document["traceEvents"])


def check_format(events: list[_Event]) -> None:
    """The rules: known phases, their fields, named tracks, slices that nest, arrows with two ends in slices."""
    named, slices, arrows = set(), defaultdict(list), defaultdict(list)
    for event in events:
        assert event["ph"] in {"M", "X", "s", "f"}, event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)
            named.add(
                (event["name"], *track)
                if event["name"] == "thread_name"
                else ("process_name", event["pid"])
            )
            continue
        assert event["ts"] >= 0
        begun = round(event["ts"] * 1000)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[track].append((begun, begun + round(event["dur"] * 1000)))
        else:
            assert event["ph"] == "s" or event["bp"] == "e"
            arrows[event["id"]].append((event["ph"], begun, track))
    for track, found in slices.items():
        assert {("process_name", track[0]), ("thread_name", *track)} <= named
        open_ends: list[int] = []
        for begun, ended in sorted(found, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= begun:
                open_ends.pop()
            assert not open_ends or ended <= open_ends[-1], "slices of a thread cross"
            open_ends.append(ended)
    for ends in arrows.values():
        assert sorted(kind for kind, _, _ in ends) == ["f", "s"]
        for _, at, track in ends:
            assert any(begun <= at <= ended for begun, ended in slices[track])


@given(
    st.integers(1, 25),
    st.integers(1, 3),
    st.lists(st.integers(-50 * MS, 50 * MS), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_recording_becomes_a_valid_trace(
    requests: int, workers: int, skews: list[int], draw: random.Random
) -> None:
    simulation = Simulation()
    producer = simulation.engine("p", ahead_ns=skews[0])
    consumers = [simulation.engine(f"d{n}", workers=workers, ahead_ns=skews[n]) for n in (1, 2)]
    for number in range(requests):
        consumer = draw.choice([*consumers, None])
        bad = draw.choice(("", "", "fence"))
        simulation.handover(
            producer,
            consumer,
            draw.randint(0, 200) * MS,
            Times(router=draw.randint(0, 90) * MS),
            request=f"r{number}",
            reason=bad,
            recomputed=bad,
        )
    for process in simulation.processes():
        process.events[:] = [event for event in process.events if draw.random() > 0.1]
    found = matched(simulation)
    check_format(traced([make_timeline(one, compare(found)) for one in found]))


def test_an_arrow_goes_from_each_prompt_to_its_decoder_and_from_there_to_every_worker() -> None:
    simulation = Simulation()
    simulation.handover(
        simulation.engine("p"), simulation.engine("d", workers=2), request="r", decode_request="s"
    )
    (one,) = matched(simulation)
    events = traced([make_timeline(one, compare([one]))])
    check_format(events)
    names = {
        event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"
    }
    assert sorted(name.split()[0] for name in names) == ["d", "p"]
    arrows = [event for event in events if event["ph"] in "sf"]
    assert len(arrows) == 2 * 3
    bars = {event["name"]: event for event in events if event["ph"] == "X" and "args" in event}
    assert bars["handover s"]["args"]["producer_request"] == "r"
    assert bars["load s"]["args"]["bytes"] == 4096 * 131072 // 2
    starts = [
        event for event in arrows if event["ph"] == "s" and event["pid"] == bars["prefill r"]["pid"]
    ]
    assert [event["ts"] for event in starts] == [(Times().prefill_queue + Times().prefill) / 1000]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"prefills", "handovers", "worker tp0", "worker tp1"}
