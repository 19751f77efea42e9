"""The parts of a consumer worker's first contact with a producer, beside the published way.

    python -m bench.first_contact            # 100, 5,000 and 100,000 blocks; results/first_contact.json; 3 minutes
    python -m bench.first_contact --quick    # 100 and 5,000 blocks; half a minute

The producer is another process on this machine: a Llama of 30 layers with caches of reserved addresses, never touched.
Both ways end with the first bytes read from every rank. Every repetition has a new agent, which is made, with its
memory registered, before the clock starts. Each way has a process of its own; they take turns, so that other load
affects both. The first repetition of a process is listed separately: it is the one that engines see.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.figures import Chart, Results, Series, Table, Target, publish
from bench.first_contact_consumer import OURS, PLAN_AGAIN, PROCESSOR, PUBLISHED, ConsumerProcess
from bench.first_contact_producer import LAYERS, ProducerProcess
from bench.provenance import begin
from kvferry.worker.fabric.agent import ucx_defaults

BLOCKS = (100, 5_000, 100_000)
SIZES = ((1, 1), (8, 4), (4, 8))
FROM_BLOCKS, SHARE = 5_000, 0.25
_BESIDE = (PROCESSOR, PLAN_AGAIN)
_SLOW_S = 5.0
"""A repetition that took longer is not repeated."""

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """One pair of engines: milliseconds by part, and their sums, of every repetition.

    Attributes:
        published: with UCX as it is.
        published_alike: with UCX as kvferry sets it up.
    """

    producer_tp: int
    consumer_tp: int
    blocks: int
    ours: Samples
    published: Samples
    published_alike: Samples

    @property
    def name(self) -> str:
        return f"TP {self.producer_tp} → {self.consumer_tp}"

    @property
    def share(self) -> float:
        """Of the published way's time."""
        return _ratio(self.ours, self.published)


def in_turn(ways: Sequence[Callable[[], dict[str, float]]], repeats: int) -> tuple[Samples, ...]:
    """Milliseconds by part of every repetition of each way; one that is slow is not repeated."""
    samples: tuple[Samples, ...] = tuple(defaultdict(list) for _ in ways)
    for number in range(repeats):
        for way, of in zip(ways, samples, strict=True):
            if number and of["all"][-1] > _SLOW_S * 1e3:
                continue
            parts = way()
            total = sum(seconds for name, seconds in parts.items() if name not in _BESIDE)
            for name, seconds in {**parts, "all": total}.items():
                of[name].append(seconds * 1e3)
    return tuple(map(dict, samples))


def measure(producer_tp: int, consumer_tp: int, blocks: int, repeats: int) -> Measured:
    """Both ways in turn, with one producer."""
    producer = ProducerProcess(producer_tp, blocks)
    ways = [
        ConsumerProcess(way, producer, producer_tp, consumer_tp, blocks, ucx)
        for way, ucx in (("ours", {}), ("published", {}), ("published", ucx_defaults(os.environ)))
    ]
    try:
        ours, published, alike = in_turn([way.make_contact for way in ways], repeats)
    finally:
        for way in ways:
            way.close()
        producer.close()
    return Measured(producer_tp, consumer_tp, blocks, ours, published, alike)


def _ratio(left: Samples, right: Samples) -> float:
    return statistics.median(left["all"]) / statistics.median(right["all"])


def _note(one: Measured) -> str:
    """How much of it is UCX's settings; and of a miss, what both ways pay NIXL for the same calls."""
    alike = f"{_ratio(one.ours, one.published_alike):.2f} with UCX set up as kvferry does"
    if one.share <= SHARE:
        return alike
    both = sum(statistics.median(one.ours.get(part, [0.0])) for part in ("add_peer", "first read"))
    return (
        f"{alike}; {both:.3g} ms of {statistics.median(one.ours['all']):.3g} are NIXL's for adding the peer and "
        "connecting, which both ways pay; the rest grows with layers and ranks, not with blocks"
    )


def _ours(one: Measured) -> Samples:
    return one.ours


def _published(one: Measured) -> Samples:
    return one.published


def _published_alike(one: Measured) -> Samples:
    return one.published_alike


def results_of(found: Sequence[Measured], command: str, *, quick: bool) -> Results:
    """Tables, chart and targets."""

    def row(one: Measured, samples: Samples, parts: Sequence[str]) -> list[Any]:
        medians = [statistics.median(samples[part]) if part in samples else None for part in parts]
        span = f"{min(samples['all']):.3g} … {max(samples['all']):.3g}"
        reported = [statistics.median(samples["all"]), span, samples["all"][0], len(samples["all"])]
        beside = [statistics.median(samples[part]) if part in samples else None for part in _BESIDE]
        return [one.name, one.blocks, *medians, *reported, *beside]

    tables = [
        Table(
            f"{name}: milliseconds by part, medians",
            ("engines", "blocks", *parts, "all", "all: range", "all: first", "repetitions", *_BESIDE),
            [row(one, of(one), parts) for one in found],
        )
        for name, parts, of in (
            ("kvferry", OURS, _ours),
            ("the published way", PUBLISHED, _published),
            ("the published way with UCX as kvferry sets it up", PUBLISHED, _published_alike),
        )
    ]
    charts = [
        Chart(
            f"First contact, {LAYERS} layers",
            "blocks",
            "ms",
            [
                Series(
                    f"{who}, {size}",
                    [one.blocks for one in of],
                    [statistics.median(pick(one)["all"]) for one in of],
                    [min(pick(one)["all"]) for one in of],
                    [max(pick(one)["all"]) for one in of],
                )
                for who, pick in (("kvferry", _ours), ("published", _published))
                for size in dict.fromkeys(one.name for one in found)
                for of in [[one for one in found if one.name == size]]
            ],
            x_log=True,
            y_log=True,
        )
    ]
    targets = [
        Target.at_most(
            f"{one.name}, {one.blocks:,} blocks: share of the published way's time", one.share, SHARE, "", _note(one)
        )
        for one in found
        if one.blocks >= FROM_BLOCKS
    ]
    plan = max(statistics.median(one.ours["plan"]) / statistics.median(one.ours["all"]) for one in found)
    plan_ms = max(statistics.median(one.ours["plan"]) for one in found)
    return Results(
        command=command,
        what="A consumer's first worker meets a producer: from the question on the side channel to the first bytes "
        "read from every rank that it reads. Beside it the published connector's algorithm, written anew: one question "
        "for every rank, one descriptor for every layer and block, and the read that connects.",
        tables=tables,
        charts=charts,
        targets=targets,
        notes=[
            f"The plan is at most {plan:.0%} of kvferry's time, {plan_ms:.1f} ms, on the handshake's own thread. An "
            "engine plans with itself at its start, so the plan of a producer of its own shape is there already; that "
            "of another shape is made once. *plan of the next* is that of a producer whose shape was planned before.",
            "Each way sets up UCX as its connector does: kvferry as `ucx_defaults` says, the published one not at all.",
            "The published connector prepares its own side at the start. That is counted only where it splits its "
            "blocks for a producer with more ranks, once for each ratio of ranks, not for each producer.",
            "The first read is a part of the published way's first request, not of its handshake.",
        ],
        raw={"samples_ms": [vars(one) for one in found]},
        quick=quick,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer blocks and repetitions")
    parser.add_argument("--repeats", type=int, default=None)
    asked = parser.parse_args(arguments)
    started = begin()
    blocks = BLOCKS[:2] if asked.quick else BLOCKS
    repeats = asked.repeats or (3 if asked.quick else 9)
    found = []
    for producer_tp, consumer_tp in SIZES:
        for count in blocks:
            started_s = time.monotonic()
            found.append(measure(producer_tp, consumer_tp, count, repeats))
            print(f"{found[-1].name}, {count:,} blocks: {time.monotonic() - started_s:.0f} s", flush=True)
    command = "python -m bench.first_contact" + (" --quick" if asked.quick else "")
    publish("first_contact", results_of(found, command, quick=asked.quick), started)


if __name__ == "__main__":
    main()
