"""Throughput of loads between two processes on real NIXL, beside what lies beneath: about five minutes, `--quick` one.

    python -m bench.transfer
    python -m bench.transfer --quick
    python -m bench.transfer --device cuda

A load is a whole one, through a worker and its transfer thread: from the order to the result, with both reads of the
lease's slot, the check of the MAC, and the notification of the producer. In the same run, in turn with it: a bare NIXL
loop with one agent and the very same descriptors (make, post, poll, release, index arrays at hand), `process_vm_readv`
of the same pieces, and memcpy of as many pieces within one process. With `--device cuda` the caches are in the memory
of one GPU; no machine with one has run it yet.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time

import torch

from bench.figures import Results, Table, publish
from bench.provenance import begin
from bench.transfer_engine import serve
from bench.transfer_extras import extras
from bench.transfer_links import lanes, links
from bench.transfer_measure import Bench, Measured, measure
from bench.transfer_memory import Memory
from bench.transfer_report import charts, raw, tables, targets
from bench.transfer_shapes import MIB, Scenario, equal_shards, other_layout, unequal_shards

RUNS = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB)
SIZES = tuple(size * MIB for size in (1, 4, 16, 64, 256))
QUICK_RUNS = (4 << 10, 64 << 10, MIB)
QUICK_SIZES = tuple(size * MIB for size in (1, 16, 64))
SPLIT_RUN = 64 << 10
_RANKS = 2
_LINKS_POOL_BYTES = 128 * MIB
WHAT = (
    "Throughput of whole loads between two processes: from the order to the result, with both reads of the lease's "
    "slot, the check of the MAC and the notification of the producer. Beside it, in turn, a bare NIXL loop with the "
    "same descriptors and one agent, process_vm_readv of the same pieces, and memcpy of as many within one process."
)


def scenarios(runs: tuple[int, ...], most_bytes: int, pool_bytes: int, *, huge: bool) -> list[Scenario]:
    """Equal shards by run length; with huge pages also unequal ones, and layouts that differ."""
    found = [equal_shards(run, most_bytes, pool_bytes, huge=huge) for run in runs]
    if huge:
        found += [unequal_shards(run, most_bytes, pool_bytes, huge=huge) for run in (4 << 10, 64 << 10) if run in runs]
        found += [other_layout(256, most_bytes, pool_bytes, staged=staged, huge=huge) for staged in (False, True)]
    return found


def turns_of(request_bytes: int, quick: bool) -> int:
    """Turns of every candidate: more where one takes little."""
    most = {1: 31, 4: 21, 16: 15, 64: 9}.get(request_bytes // MIB, 5)
    return max(3, most // 3) if quick else most


def run(*, quick: bool, device_name: str) -> Results:
    """Measure everything."""
    begun_s = time.monotonic()
    runs, sizes = (QUICK_RUNS, QUICK_SIZES) if quick else (RUNS, SIZES)
    pool_bytes = (max(sizes) * (4 if quick else 1) + 64 * MIB) * (1 if quick else 4)
    device = torch.device(device_name)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=serve, args=(theirs, pool_bytes, _RANKS, device_name), name="producer")
    producer.start()
    theirs.close()
    measured: list[Measured] = []
    more: list[Table] = []
    huge_bytes = {}
    try:
        for huge in (True,) if quick or device.type == "cuda" else (True, False):
            bench = Bench(
                ours,
                target=Memory(pool_bytes, huge=huge, device=device),
                source=Memory(pool_bytes, huge=huge, device=device),
            )
            huge_bytes["huge pages" if huge else "pages of 4 KiB"] = bench.target.huge_bytes
            for scenario in scenarios(runs, max(sizes), pool_bytes, huge=huge):
                split = sizes if huge and scenario == equal_shards(SPLIT_RUN, max(sizes), pool_bytes, huge=True) else ()
                measured.append(measure(bench, scenario, sizes, lambda size: turns_of(size, quick), split))
            if huge:
                more = extras(bench, pool_bytes, huge=huge, turns=11 if quick else 31)
            del bench
    finally:
        ours.close()
        producer.join(30.0)
        if producer.is_alive():
            producer.kill()
    if device.type == "cpu":
        more += [make(_LINKS_POOL_BYTES, turns=11 if quick else 31) for make in (links, lanes)]
    return Results(
        command=f"python -m bench.transfer{' --quick' if quick else ''}"
        + (f" --device {device_name}" if device_name != "cpu" else ""),
        what=WHAT,
        tables=[*tables(measured), *more],
        charts=charts(measured),
        targets=targets(measured),
        notes=_notes(device, huge_bytes, time.monotonic() - begun_s),
        raw={"huge_bytes": huge_bytes, "cells": raw(measured)},
        quick=quick,
    )


def _notes(device: torch.device, huge_bytes: dict[str, int], seconds: float) -> list[str]:
    notes = [
        "Blocks lie scattered on both sides, so that nothing is merged: a descriptor is one run.",
        "memcpy gathers runs from anywhere into one place; the others write them anywhere.",
        "A post within a host copies in the call, so several loads at once follow one another, bookkeeping included.",
        "Requests do not share a post: it saves what the table says, and one bad lease would fail all of them.",
        "Blocks that are scattered on the consumer alone are not staged for that: see the table.",
        "The pages are as each table says. An engine has huge ones with `THP_MEM_ALLOC_ENABLE=1`.",
        f"All of it took {seconds:.0f} s.",
    ]
    if device.type == "cuda":
        notes.append("Over CUDA there is no process_vm_readv, and memcpy is index_select on the device.")
    elif not huge_bytes.get("huge pages"):
        notes.append("The system gave no huge pages: transparent_hugepage is `never`, or there is no room.")
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three run lengths, three sizes, huge pages only")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the caches are")
    arguments = parser.parse_args()
    started = begin()
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    name = "transfer" if arguments.device == "cpu" else f"transfer-{arguments.device}"
    publish(name, run(quick=arguments.quick, device_name=arguments.device), started)


if __name__ == "__main__":
    main()
