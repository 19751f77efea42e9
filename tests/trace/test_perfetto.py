"""The trace for Perfetto, against the rules of its format."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.events import PrefillStep
from kvferry.trace.handover import Handover
from kvferry.trace.perfetto import perfetto_trace
from tests.trace.simulated import MS, Simulation, Times, engine_pair

_Event = dict[str, Any]


def traced(handovers: list[Handover]) -> list[_Event]:
    """The events, after a check of the format's rules."""
    document = json.loads(b"".join(perfetto_trace(handovers)))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] == "ms"
    events: list[_Event] = document["traceEvents"]
    check_format(events)
    return events


def check_format(events: list[_Event]) -> None:
    """Known phases, named processes, times in order, slices that nest and end, arrows that lead forward."""
    named = set()
    latest = 0.0
    open_slices: defaultdict[tuple[str, int, str], list[str]] = defaultdict(list)
    track_of_id: dict[tuple[int, str], str] = {}
    arrows: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            assert event["name"] == "process_name"
            assert event["args"]["name"]
            assert event["pid"] not in named
            named.add(event["pid"])
            continue
        assert event["pid"] in named
        assert event["ts"] >= latest, "events are in the order of their times"
        latest = event["ts"]
        # A viewer joins begins and ends by category, process and local id.
        slices = open_slices[event["cat"], event["pid"], event["id2"]["local"]]
        if event["ph"] == "b":
            assert event["name"]
            if not slices:
                of_process = (event["pid"], event["id2"]["local"])
                assert of_process not in track_of_id, (
                    "an id is of one request in one track"
                )
                track_of_id[of_process] = event["name"]
            slices.append(event["name"])
            arrows[event.get("bind_id", "")] += {"flow_out", "flow_in"} & event.keys()
        else:
            assert event["ph"] == "e", event
            assert slices.pop() == event["name"], "what begins last ends first"
    assert not any(open_slices.values()), "every begin has an end"
    for kinds in arrows.values():
        assert kinds == [] or (kinds[0] == "flow_out" and set(kinds[1:]) <= {"flow_in"})


def slices_of(
    events: list[_Event],
) -> dict[str, list[tuple[str, float, float, _Event]]]:
    """By track: the requests' slices with begin, end and the event that begins them."""
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"
    }
    by_id: defaultdict[tuple[int, str], list[_Event]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            by_id[event["pid"], event["id2"]["local"]].append(event)
    found: defaultdict[str, list[tuple[str, float, float, _Event]]] = defaultdict(list)
    for (pid, _), (track, request, *_, last) in by_id.items():
        where = f"{names[pid]}: {track['name']}"
        found[where].append((request["name"], track["ts"], last["ts"], request))
    return found


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
    consumers = [
        simulation.engine(f"d{n}", workers=workers, ahead_ns=skews[n]) for n in (1, 2)
    ]
    for number in range(requests):
        consumer = draw.choice([*consumers, None])
        bad = draw.choice(("", "", "fence"))
        simulation.handover(
            producer,
            consumer,
            draw.randint(0, 200) * MS,
            Times(router=draw.randint(0, 90) * MS),
            request=f"r{number}",
            steps=draw.choice((0, 0, 5)),
            reason=bad,
            recomputed=bad,
        )
    num_steps = 0
    for process in simulation.processes():
        process.events[:] = [event for event in process.events if draw.random() > 0.1]
        num_steps += sum(isinstance(event, PrefillStep) for event in process.events)
    handovers = simulation.handovers()
    events = traced(handovers)
    # A prompt of which only steps are left has no request to be shown for.
    shown = sum(
        event["ph"] == "b" and event["name"] == "prefill step" for event in events
    )
    assert shown == sum(len(handover.steps) for handover in handovers) <= num_steps


def test_a_request_is_in_a_track_of_each_part_with_its_ids_and_phases() -> None:
    simulation, producer, consumer = engine_pair(workers=2)
    simulation.handover(producer, consumer, request="r", decode_request="s")
    events = traced(simulation.handovers())
    tracks = slices_of(events)
    assert {
        name: [piece[0] for piece in pieces] for name, pieces in tracks.items()
    } == {
        "p: prefills": ["r"],
        "p: blocks kept": ["r"],
        "d: handovers": ["s"],
        "d: loads of tp0": ["s"],
        "d: loads of tp1": ["s"],
    }
    times = Times()
    prefill_us = (times.prefill_queue + times.prefill) / 1000
    ((_, begun, ended, request),) = tracks["p: prefills"]
    assert (begun, ended) == (0.0, prefill_us)
    assert request["args"]["consumer_request"] == "s"
    ((_, begun, _, _),) = tracks["d: handovers"]
    assert begun == prefill_us
    ((_, _, _, load),) = tracks["d: loads of tp1"]
    assert load["args"]["producer_request"] == "r"
    assert load["args"]["bytes"] == 4096 * 131072 // 2
    phases = [
        event
        for event in events
        if event["ph"] == "b" and event["name"] == "decode queue"
    ]
    assert "no blocks or no step" in phases[0]["args"]["meaning"]


def test_arrows_lead_from_the_prefill_to_the_handover_and_to_every_worker() -> None:
    simulation, producer, consumer = engine_pair(workers=2)
    simulation.handover(producer, consumer)
    tracks = slices_of(traced(simulation.handovers()))
    begins = [
        track for track, ((*_, event),) in tracks.items() if event.get("flow_out")
    ]
    ends = [track for track, ((*_, event),) in tracks.items() if event.get("flow_in")]
    assert begins == ["p: prefills"]
    assert ends == ["d: handovers", "d: loads of tp0", "d: loads of tp1"]


def test_where_clocks_contradict_no_arrow_leads_back_in_time() -> None:
    simulation, producer, consumer = engine_pair()
    for number, ahead_ns in enumerate((0, 400 * MS)):
        producer.scheduler.ahead_ns = ahead_ns
        simulation.handover(
            producer, consumer, number * 1000 * MS, decode_request=f"s{number}"
        )
    tracks = slices_of(traced(simulation.handovers()))
    loads = {
        request: event.get("flow_in")
        for request, *_, event in tracks["d: loads of tp0"]
    }
    assert loads == {"s0": True, "s1": None}
