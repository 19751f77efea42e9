"""A soak's figures as tables, charts and targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.figures import Chart, Results, Series, Table, Target

GAUGES = {
    "rss_mb": "memory, MB",
    "own_mb": "of it neither shared nor of files, MB",
    "objects": "Python's blocks of memory",
    "fds": "file descriptors",
    "threads": "threads",
}
MOST_ADDED = {
    "rss_mb": 4.0,
    "own_mb": 4.0,
    "objects": 8000.0,
    "fds": 30.0,
    "threads": 3.0,
}
"""Per 1,000 requests: limits for a soak of three minutes, some twice the most that was seen in one of 3,000 requests.
`objects` is eight of each request. Five of them are the ended lease that a consumer remembers (its key, the values of
the key, and its place in the order: counted with 10,000 of them), until 65,536 are remembered or its life ends. A
connection that is made again to a living peer leaves some descriptors; one left by every request would be 1,000."""
MOST_PER_LIFE = {
    "rss_mb": 1.5,
    "own_mb": 1.5,
    "objects": 2000.0,
    "fds": 6.0,
    "threads": 0.5,
}
"""Per life of an engine, one to eight workers. What an engine has kept is given back when it ends, so it may be less
than nothing."""
FEWEST_FOR_A_SLOPE = 4500
"""Requests. Memory grows until every pair of workers is connected and the allocators have seen the largest wave. With
3,000, as a busy machine has in three minutes, restarts of engines and new connections were taken for growth."""
_POINTS = 40
_WHAT = (
    "Is every load right byte for byte or reported failed, and does what the process takes stay bounded? Six engines "
    "of kvferry with shards, blocks and layouts of their own live in one process on real NIXL; some of the requests "
    "between them have a fault."
)


def limits(figures: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Gauge, by what, how much of it is added, at most how much may be; nothing of a soak that is too short to say."""
    if figures["requests"] < FEWEST_FOR_A_SLOPE:
        return []
    return [
        (GAUGES[name], what, float(figures["gauges"][name][key]), most[name])
        for what, key, most in (
            ("1,000 requests", "per_1000_requests", MOST_ADDED),
            ("life of an engine", "per_life", MOST_PER_LIFE),
        )
        for name in GAUGES
    ]


def grown(figures: dict[str, Any]) -> list[str]:
    """In words, which gauges grow by more than `MOST_ADDED` or `MOST_PER_LIFE`."""
    return [
        f"{gauge}: {added:+.1f} per {what}, at most {most:g}"
        for gauge, what, added, most in limits(figures)
        if added > most
    ]


def results_of(figures: dict[str, Any]) -> Results:
    """From the figures of `bench.soak.soak`."""
    samples = figures["samples"][:: -(-len(figures["samples"]) // _POINTS)]
    requests = [one["requests"] for one in samples]

    def over_requests(title: str, unit: str, *names: str) -> Chart:
        series = [
            Series(
                GAUGES[name].partition(",")[0], requests, [one[name] for one in samples]
            )
            for name in names
        ]
        return Chart(title, "requests so far", unit, series)

    return Results(
        command=f"python -m bench.soak --requests {figures['requests']} --faults {figures['fault_rate']:g} "
        f"--streamed {figures['streamed_rate']:g} --mapped {figures['mapped_rate']:g} --seed {figures['seed']}",
        what=_WHAT,
        tables=_tables(figures),
        charts=(
            over_requests(
                "Memory of the process with all six engines", "MB", "rss_mb", "own_mb"
            ),
            over_requests(
                "Descriptors and threads of the process with all six engines",
                "number",
                "fds",
                "threads",
            ),
        ),
        targets=(
            Target.at_most(
                "what must not happen in a soak",
                sum(figures["violations"].values()),
                0,
                "times",
            ),
            *(
                Target.at_most(f"added per {what}: {gauge}", added, most, "")
                for gauge, what, added, most in limits(figures)
            ),
        ),
        notes=(
            "Which requests have which faults follows from the seed; what comes of them also from the threads' timing.",
            "Memory and descriptors go up and down with engines that end and come back. Each is restarted once at "
            "the start, before the samples that count, and three times from the middle on: then lives rise, and "
            "requests hardly do.",
        ),
        quick=figures["requests"] < FEWEST_FOR_A_SLOPE,
    )


def _tables(figures: dict[str, Any]) -> Sequence[Table]:
    loads, gauges, moved = figures["loads"], figures["gauges"], figures["moved"]
    total, good = sum(loads.values()), loads.get("loaded", 0)
    reasons = {
        how.partition(": ")[2]: amount
        for how, amount in loads.items()
        if how.startswith("failed")
    }
    failed = sum(reasons.values())
    whole = {
        "requests": f"{figures['requests']:,}, seed {figures['seed']}, {100 * figures['fault_rate']:g}% with a fault",
        "time": f"{figures['seconds']:.0f} s, {figures['requests'] / figures['seconds']:.0f} requests/s",
        "engines": f"3 producers, 3 consumers, {figures['engine_lives']} lives",
        "loads": f"{total:,}: {good:,} right byte for byte, {failed:,} reported failed, "
        f"{total - good - failed} ended with their engine",
        "failed by reason": _counted(reasons),
        "of them streamed": f"{figures['streamed']:,}; begun again after a preemption {moved['restarts']:,} times",
        "compared": f"{figures['checked_bytes']:,} B; moved {moved['moved']:,} B, of these staged "
        f"{moved['staged']:,} B; copied from mapped memory {moved['mapped']:,} B; before the prefill had ended "
        f"{moved['early']:,} B",
        "leases": _counted(figures["leases"]),
        "what must not happen": _counted(figures["violations"]) or "nothing of it did",
    }
    faults = [
        (fault, sum(outcomes.values()), _counted(outcomes))
        for fault, outcomes in figures["faults"].items()
    ]
    taken = [
        (
            text,
            *(round(gauges[name][key]) for key in ("first", "last", "most")),
            gauges[name]["per_1000_requests"],
            gauges[name]["per_life"],
        )
        for name, text in GAUGES.items()
    ]
    return (
        Table("The whole", ("", "found"), list(whole.items())),
        Table("Faults", ("fault", "times", "what became of the requests"), faults),
        Table(
            "What the process took",
            ("", "first", "last", "most", "added per 1,000 requests", "added per life"),
            taken,
        ),
    )


def _counted(amounts: dict[str, int]) -> str:
    return ", ".join(f"{name} {amount:,}" for name, amount in amounts.items())
