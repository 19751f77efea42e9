"""All handovers of a recording together."""

from __future__ import annotations

from pathlib import Path

from kvferry.trace.events import Phase
from kvferry.trace.reading import read_recording
from kvferry.trace.summary import Summary, summarize
from tests.trace.simulated import MS, Simulation, Times, engine_pair


def summary_of(simulation: Simulation, folder: Path) -> Summary:
    return summarize(read_recording([simulation.write(folder)]))


def test_the_slowest_handover_is_first_and_what_never_ended_is_last(
    tmp_path: Path,
) -> None:
    simulation, producer, consumer = engine_pair()
    for router in (5, 50, 20):
        times = Times(router=router * MS)
        simulation.handover(producer, consumer, 0, times, request=f"r{router}")
    for kept in (1, 9):
        times = Times(kept=kept * MS)
        name = f"kept{kept}"
        simulation.handover(producer, None, 0, times, request=name, how="expired")
    summary = summary_of(simulation, tmp_path)
    names = [one.producer.request for one in summary.handovers]
    assert names == ["r50", "r20", "r5", "kept9", "kept1"]
    assert summary.outcomes == {"loaded": 3, "not fetched: expired": 2}
    phases = [*summary.durations]
    assert phases[:4] == ["prefill_queue", "prefill", "handover", "router"]


def test_percentiles_are_by_nearest_rank(tmp_path: Path) -> None:
    simulation, producer, consumer = engine_pair()
    for number in range(1, 201):
        times = Times(router=number * MS)
        simulation.handover(producer, consumer, 0, times, request=f"r{number}")
    router = summary_of(simulation, tmp_path).durations[Phase.ROUTER]
    assert (router.count, router.p50_ms, router.p99_ms, router.max_ms) == (
        200,
        100,
        198,
        200,
    )


def test_stages_count_for_every_worker_from_the_end_of_the_prefill_on(
    tmp_path: Path,
) -> None:
    simulation, producer, consumer = engine_pair(workers=2)
    stages = {n: {"reading": 32 * MS} for n in range(2)}
    times = Times(prefill=80 * MS, stages=stages)
    simulation.handover(producer, consumer, times=times, steps=4)
    durations = summary_of(simulation, tmp_path).durations.items()
    counted = {phase: (lasted.count, lasted.max_ms) for phase, lasted in durations}
    assert counted[Phase.READING] == (2, 8)
    assert counted[Phase.CHUNK_READ] == (8, 8)
    assert counted[Phase.PREFILL_STEP] == (4, 20)
