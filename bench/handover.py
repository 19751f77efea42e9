"""Whole handovers of a Llama-70B's cache between two processes, beside a bare NIXL loop and a plain copy: a minute.

    python -m bench.handover                  # on the CPU: prompts of 256 and 1,024 tokens; results/handover-cpu.json
    python -m bench.handover --device cuda    # 1,024, 8,192 and 32,768 tokens, 45 GB of the GPU's memory
    python -m bench.handover --quick

80 layers of K and V, 8 heads of 128 elements in bfloat16, tensor parallel 1: 327,680 B a token. A handover is from the
order to the result, with both reads of the lease's slot, the check of the MAC, the relayout of what was staged, and
the notification of the producer. Blocks lie scattered on both sides.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from bench.figures import Chart, Results, Series, Table, publish, spread
from bench.provenance import begin
from bench.transfer import NO_LEASE, in_turn, pages_of, timed
from bench.transfer_engines import Bench, two_processes, use_huge_pages
from bench.transfer_loads import Loads, connected
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

    def gb_s(self, name: str) -> float | None:
        """Of the median; None where it was not measured."""
        samples = self.ms.get(name)
        return self.tokens * TOKEN_BYTES / statistics.median(samples) / 1e6 if samples else None


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
        staged=staged,
    )


def measure(bench: Bench, engines: str, lengths: Sequence[int], turns: int) -> list[Measured]:
    """All lengths for one pair of engines."""
    scenario = scenario_of(engines, max(lengths), len(bench.target))
    with connected(bench, scenario, 64 * TOKEN_BYTES) as loads:
        if scenario.staged:
            return [_measure(bench, loads, None, tokens, turns) for tokens in lengths]
        with closing(BareNixl(bench.target, loads.peer)) as bare:
            return [_measure(bench, loads, bare, tokens, turns) for tokens in lengths]


def _measure(
    bench: Bench, loads: Loads, bare: BareNixl | None, tokens: int, turns: int
) -> Measured:
    num_bytes = tokens * TOKEN_BYTES
    device = bench.target.device
    leases = bench.leases(turns + 1)
    calls = {
        HANDOVER: lambda: loads.load([loads.order(leases.pop(), num_bytes)]),
        COPY: lambda: timed(lambda: _copy(bench, num_bytes)),
    }
    if bare is not None:
        pieces = pieces_of(
            loads.scenario, loads.peer, loads.order(NO_LEASE, num_bytes), device.index or 0
        )
        reads, loop = bare.reads(pieces), bare
        calls[BARE] = lambda: timed(lambda: loop.read(reads))
    seconds = in_turn(turns, calls)
    ms = {name: [1e3 * one for one in samples] for name, samples in seconds.items()}
    (record,) = loads.records
    return Measured(loads.scenario.name, tokens, ms, record.descriptors, record.staged_bytes)


def _copy(bench: Bench, num_bytes: int) -> None:
    bench.target[:num_bytes].copy_(bench.source[:num_bytes])
    if bench.target.device.type == "cuda":
        torch.cuda.synchronize(bench.target.device)


def run(device_name: str, lengths: Sequence[int], turns: int, *, quick: bool) -> Results:
    """Start the producer, measure everything."""
    pool_bytes = (
        max(lengths) * TOKEN_BYTES + 64 * LAYERS * HEADS * CELL_BYTES + MIB
    )  # block 0 holds nothing
    with two_processes(pool_bytes, 1, device_name) as bench:
        found = [one for engines in ENGINES for one in measure(bench, engines, lengths, turns)]
        return results_of(found, device_name, pages_of(bench.target), quick=quick)


def results_of(found: Sequence[Measured], device_name: str, pages: str, *, quick: bool) -> Results:
    """One table, one chart."""
    rows = [
        [
            one.engines,
            one.tokens,
            one.tokens * TOKEN_BYTES / 1e6,
            one.descriptors,
            one.staged_bytes / 1e6,
            len(one.ms[HANDOVER]),
            statistics.median(one.ms[HANDOVER]),
            spread(one.ms[HANDOVER]),
            *(one.gb_s(name) for name in (HANDOVER, BARE, COPY)),
        ]
        for one in found
    ]
    columns = (
        "engines",
        "tokens",
        "MB",
        "descriptors",
        "staged, MB",
        "turns",
        "handover, ms",
        "range, ms",
    )
    direct = next(iter(ENGINES))
    lines = [(f"kvferry, {engines}", HANDOVER, engines) for engines in ENGINES]
    lines += [(BARE, BARE, direct), (COPY, COPY, direct)]
    series = [
        Series.of_samples(
            title, [(one.tokens, one.ms.get(name, ())) for one in found if one.engines == engines]
        )
        for title, name, engines in lines
    ]
    return Results(
        command=f"python -m bench.handover --device {device_name}{' --quick' * quick}",
        what=WHAT,
        tables=(
            Table("Handovers", (*columns, "GB/s", "bare NIXL, GB/s", "plain copy, GB/s"), rows),
        ),
        charts=(
            Chart(
                "Handover of a Llama-70B's cache",
                "tokens of the prompt",
                "ms",
                series,
                x_log=True,
                y_log=True,
            ),
        ),
        notes=(
            "Loads, the bare loop and the copy take turns. A plain copy counts bytes once, as the others do.",
            pages,
        ),
        quick=quick,
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where the caches are"
    )
    parser.add_argument("--quick", action="store_true", help="128 tokens, three turns")
    chosen = parser.parse_args()
    started = begin()
    use_huge_pages()
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    lengths = [1024, 8192, 32768] if chosen.device == "cuda" else [256, 1024]
    lengths, turns = ([128], 3) if chosen.quick else (lengths, 9)
    publish(
        f"handover-{chosen.device}", run(chosen.device, lengths, turns, quick=chosen.quick), started
    )


if __name__ == "__main__":
    main()
