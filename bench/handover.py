"""Whole handovers of a Llama-70B's cache between two processes, beside a bare NIXL loop and a plain copy: a minute.

    python -m bench.handover                  # on the CPU: prompts of 256 and 1,024 tokens; results/handover-cpu.json
    python -m bench.handover --device cuda    # 1,024, 8,192 and 32,768 tokens, 45 GB of the GPU's memory
    python -m bench.handover --quick

80 layers of K and V, 8 heads of 128 elements in bfloat16, tensor parallel 1: 327,680 B a token. A handover is from the
order to the result, with both reads of the lease's slot, the check of the MAC, the relayout of what was staged, and
the notification of the producer. Blocks lie scattered on both sides. No machine with a GPU has run it yet.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from bench.figures import Chart, Results, Series, Table, publish
from bench.provenance import begin
from bench.transfer_engine import Lease, serve
from bench.transfer_loads import Loads
from bench.transfer_measure import Bench
from bench.transfer_memory import Memory
from bench.transfer_rivals import BareNixl, pieces_of
from bench.transfer_shapes import MIB, Scenario, Side

LAYERS, HEADS, CELL_BYTES = 160, 8, 256
"""K and V of every layer; of one head and token."""
TOKEN_BYTES = LAYERS * HEADS * CELL_BYTES
ENGINES = {
    "equal engines, in place": (Side(), Side(), False),
    "blocks of 16 → 64 tokens, staged": (Side(), Side(block_tokens=64), True),
    "heads → tokens outermost, staged": (Side(), Side(tokens_first=True), True),
}
HANDOVER, BARE, COPY = "kvferry", "bare NIXL, the same descriptors", "plain copy of as many bytes"
_NO_LEASE = Lease(0, "0" * 14 + "1", "none")
WHAT = (
    "The cache of a prompt of a Llama-70B goes from a producer's process to a consumer's: from the order to the "
    "result, with both reads of the lease's slot, the check of the MAC, the relayout and the notification. Beside it, "
    "in turn: a bare NIXL loop with the same descriptors where nothing is staged, and a plain copy of as many bytes."
)


@dataclass(frozen=True)
class Measured:
    """One pair of engines and one length of prompt: milliseconds of every turn."""

    engines: str
    tokens: int
    ms: dict[str, list[float]]
    descriptors: int
    staged_bytes: int

    def median(self, name: str) -> float | None:
        return statistics.median(self.ms[name]) if self.ms.get(name) else None

    def gb_s(self, name: str) -> float | None:
        median = self.median(name)
        return self.tokens * TOKEN_BYTES / median / 1e6 if median else None


def scenario_of(engines: str, most_tokens: int, pool_bytes: int) -> Scenario:
    """A scenario of `bench.transfer` with the shape of a Llama-70B."""
    producer, consumer, staged = ENGINES[engines]
    return Scenario(
        name=engines,
        run_bytes=HEADS * producer.block_tokens * CELL_BYTES,
        layers=LAYERS,
        heads=HEADS,
        cell_bytes=CELL_BYTES,
        producer=producer,
        consumer=consumer,
        most_bytes=most_tokens * TOKEN_BYTES,
        pool_bytes=pool_bytes,
        huge=True,
        staged=staged,
    )


def measure(bench: Bench, engines: str, lengths: list[int], turns: int) -> list[Measured]:
    """All lengths for one pair of engines."""
    scenario = scenario_of(engines, max(lengths), len(bench.target.tensor))
    loads = Loads(scenario, bench.target, bench.ask("scenario", scenario))
    bare: BareNixl | None = None
    try:
        loads.load([loads.order(bench.leases(1)[0], 64 * TOKEN_BYTES)])  # the first contact
        bare = None if scenario.staged else BareNixl(scenario, bench.target, loads.peer)
        return [_measure_length(bench, loads, bare, tokens, turns) for tokens in lengths]
    finally:
        loads.close()
        if bare is not None:
            bare.close()


def _measure_length(bench: Bench, loads: Loads, bare: BareNixl | None, tokens: int, turns: int) -> Measured:
    num_bytes = tokens * TOKEN_BYTES
    device = bench.target.device
    rivals: dict[str, Callable[[], None]] = {COPY: lambda: _copy(bench, num_bytes)}
    if bare is not None:
        pieces = pieces_of(loads.scenario, loads.peer, loads.order(_NO_LEASE, num_bytes), device.index or 0)
        reads, loop = bare.reads(pieces), bare
        rivals[BARE] = lambda: loop.read(reads)
    ms: dict[str, list[float]] = {name: [] for name in (HANDOVER, *rivals)}
    totals = None
    for turn, lease in enumerate(bench.leases(turns + 1)):
        loaded = loads.load([loads.order(lease, num_bytes)])
        took_s = {HANDOVER: loaded.seconds} | {name: _seconds(rival) for name, rival in rivals.items()}
        if turn:  # the first one warms up
            for name, seconds in took_s.items():
                ms[name].append(1e3 * seconds)
        totals = loaded.records[0]
    assert totals is not None
    return Measured(loads.scenario.name, tokens, ms, totals.descriptors, totals.staged_bytes)


def _copy(bench: Bench, num_bytes: int) -> None:
    bench.target.tensor[:num_bytes].copy_(bench.source.tensor[:num_bytes])
    if bench.target.device.type == "cuda":
        torch.cuda.synchronize(bench.target.device)


def _seconds(call: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def run(device_name: str, lengths: list[int], turns: int, *, quick: bool) -> Results:
    """Start the producer, measure everything."""
    pool_bytes = max(lengths) * TOKEN_BYTES + 64 * LAYERS * HEADS * CELL_BYTES + MIB  # block 0 holds nothing
    device = torch.device(device_name)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=serve, args=(theirs, pool_bytes, 1, device_name), name="producer")
    producer.start()
    theirs.close()
    try:
        target, source = (Memory(pool_bytes, huge=True, device=device) for _ in range(2))
        bench = Bench(ours, target=target, source=source)
        found = [one for engines in ENGINES for one in measure(bench, engines, lengths, turns)]
    finally:
        ours.close()
        producer.join(30.0)
        if producer.is_alive():
            producer.kill()
    return results_of(found, device_name, quick=quick)


def results_of(found: list[Measured], device_name: str, *, quick: bool) -> Results:
    """One table, one chart."""
    rows = [
        [
            one.engines,
            one.tokens,
            one.tokens * TOKEN_BYTES / 1e6,
            one.descriptors,
            one.staged_bytes / 1e6,
            one.median(HANDOVER),
            f"{min(one.ms[HANDOVER]):.4g} … {max(one.ms[HANDOVER]):.4g}",
            *(one.gb_s(name) for name in (HANDOVER, BARE, COPY)),
        ]
        for one in found
    ]
    columns = ("engines", "tokens", "MB", "descriptors", "staged, MB", "handover, ms", "range, ms")
    by_engines = {name: [one for one in found if one.engines == name] for name in ENGINES}
    lines = [(f"kvferry, {name}", HANDOVER, of) for name, of in by_engines.items()]
    first = next(iter(by_engines.values()))
    lines += [(BARE, BARE, first), (COPY, COPY, first)]
    series = [
        Series(
            title,
            [one.tokens for one in of],
            [one.median(name) for one in of],
            [min(one.ms[name]) for one in of],
            [max(one.ms[name]) for one in of],
        )
        for title, name, of in lines
    ]
    return Results(
        command=f"python -m bench.handover --device {device_name}{' --quick' * quick}",
        what=WHAT,
        tables=(Table("Handovers", (*columns, "GB/s", "bare NIXL, GB/s", "plain copy, GB/s"), rows),),
        charts=(
            Chart("Handover of a Llama-70B's cache", "tokens of the prompt", "ms", series, x_log=True, y_log=True),
        ),
        notes=("Loads, the bare loop and the copy take turns. A plain copy counts bytes once, as the others do.",),
        raw={"samples": [asdict(one) for one in found]},
        quick=quick,
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the caches are")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the prompts")
    parser.add_argument("--quick", action="store_true", help="128 tokens, three turns")
    chosen = parser.parse_args()
    started = begin()
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    lengths = [1024, 8192, 32768] if chosen.device == "cuda" else [256, 1024]
    lengths, turns = ([128], 3) if chosen.quick else (chosen.tokens or lengths, 9)
    publish(f"handover-{chosen.device}", run(chosen.device, lengths, turns, quick=chosen.quick), started)


if __name__ == "__main__":
    main()
