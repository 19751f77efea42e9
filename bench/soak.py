"""A fleet of engines under faults of all kinds, on real NIXL: every load is right byte for byte, or reported failed.

    python -m bench.soak --requests 50000 --faults 0.05 --seed 1
    python -m bench.soak --minutes 3

Three producers and three consumers with shards, block sizes and layouts of their own live in one process, each worker
with a NIXL agent and a transfer thread. The seed gives the same requests with the same faults again; threads make what
comes of them similar, not equal. It prints a line every ten seconds, tables at the end, writes `results/soak.json`, and
exits with 1 if anything happened that must never happen, or memory, descriptors or threads grow, with the requests or
with the lives of engines: each engine is restarted once at the start and three times from the middle on. SIGTERM ends
it early, with the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import secrets
import signal
import threading
import time
from dataclasses import asdict
from typing import Any

import torch

from bench.figures import publish
from bench.provenance import begin
from bench.soak_fleet import Fleet
from bench.soak_report import GAUGES, grown, results_of
from bench.soak_schedule import Fault
from tests.harness.gates import holding_copies

STREAMED = 0.5
MAPPED = 0.5


def soak(
    requests: int | None,
    seconds: float | None,
    faults: float,
    seed: int,
    streamed: float = STREAMED,
    mapped: float = MAPPED,
) -> dict[str, Any]:
    """Run it and return its figures; `violations` is what must be empty."""
    logging.getLogger("kvferry").setLevel(
        logging.CRITICAL
    )  # faults are logged line by line
    torch.set_num_threads(
        1
    )  # tensors are tiny, and every transfer thread would have a team of its own
    start_s = time.monotonic()
    holding = contextlib.ExitStack()
    # Copies from mapped memory are held up as reads are.
    holding.enter_context(holding_copies())
    fleet = Fleet(seed, faults, streamed, mapped, lambda line: print(line, flush=True))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: fleet.stop.set())
    try:
        fleet.run(requests, seconds)
    finally:
        fleet.close()
        holding.close()
    added = {name: fleet.gauges.added(name) for name in GAUGES}
    counts, samples = fleet.counts, fleet.gauges.samples
    by_fault: dict[str, dict[str, int]] = {fault.value: {} for fault in Fault}
    for (fault, outcome), amount in sorted(
        counts.by_fault.items(), key=lambda one: -one[1]
    ):
        by_fault[fault.value][outcome] = amount
    return {
        "seed": seed,
        "fault_rate": faults,
        "streamed_rate": streamed,
        "mapped_rate": mapped,
        "requests": counts.requests,
        "seconds": time.monotonic() - start_s,
        "engine_lives": fleet.lives,
        "faults": by_fault,
        "loads": dict(counts.loads.most_common()),
        "checked_bytes": counts.checked_bytes,
        "streamed": counts.streamed,
        "moved": dict(fleet.moved),
        "leases": {
            f"{metric} {label}".strip(): amount
            for (metric, label), amount in sorted(fleet.counter_totals.items())
            if metric.startswith("leases_")
        }
        | {"ended with their engine": fleet.leases_ended_with_engines},
        "gauges": {
            name: {
                "first": getattr(samples[0], name),
                "last": getattr(samples[-1], name),
                "most": max(getattr(one, name) for one in samples),
                "per_1000_requests": added[name][0],
                "per_life": added[name][1],
            }
            for name in GAUGES
        },
        "samples": [asdict(one) for one in samples],
        "violations": dict(counts.violations),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests",
        type=int,
        help="how many; default 50000, unless --minutes is given",
    )
    parser.add_argument("--minutes", type=float, help="how long, instead")
    parser.add_argument(
        "--faults",
        type=float,
        default=0.05,
        help="the fraction of requests with a fault",
    )
    parser.add_argument(
        "--streamed", type=float, default=STREAMED, help="the fraction that is streamed"
    )
    parser.add_argument(
        "--mapped",
        type=float,
        default=MAPPED,
        help="the fraction of consumers that map producers",
    )
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    arguments = parser.parse_args()
    started = begin()
    requests = (
        50_000
        if arguments.requests is None and arguments.minutes is None
        else arguments.requests
    )
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    figures = soak(
        requests, seconds, arguments.faults, seed, arguments.streamed, arguments.mapped
    )
    publish("soak", results_of(figures), started)
    return int(bool(figures["violations"] or grown(figures)))


if __name__ == "__main__":
    raise SystemExit(main())
