"""Whole handovers of a Llama-70B's cache between two processes, beside a bare NIXL loop and a plain copy: a minute.

Short loads too, of 256 KiB and 1 MiB, beside two wake-ups of threads: with the plain copy, what no load can go below.

    python -m bench.handover                  # on the CPU: prompts of 256 and 1,024 tokens; results/handover-cpu.json
    python -m bench.handover --device cuda    # 1,024, 8,192 and 32,768 tokens, 45 GB of the GPU's memory
    python -m bench.handover --device cuda --mapped    # beside them what is mapped by CUDA IPC, which is off by default
    python -m bench.handover --quick

80 layers of K and V, 8 heads of 128 elements in bfloat16, tensor parallel 1: 327,680 B a token. A handover is from the
order to the result, with both reads of the lease's slot, the check of the MAC, the relayout of what was staged, and
the notification of the producer. Blocks lie scattered on both sides.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from bench.figures import Cell, Chart, Results, Series, Table, publish, spread
from bench.provenance import begin
from bench.transfer import NO_LEASE, in_turn, pages_of, timed
from bench.transfer_engines import Bench, two_processes, use_huge_pages
from bench.transfer_loads import Loads, connected
from bench.transfer_rivals import BareNixl, WakeUps, pieces_of
from bench.transfer_shapes import MIB, Scenario, Side

LAYERS, HEADS, CELL_BYTES = 160, 8, 256
"""K and V of every layer; of one head and token."""
TOKEN_BYTES = LAYERS * HEADS * CELL_BYTES


@dataclass(frozen=True)
class Engines:
    """A pair of engines of one row.

    Attributes:
        way: how its bytes are placed: `in place`, `staged` or `mapped`.
        layers: tensors of K and of V, all together.
    """

    name: str
    producer: Side
    consumer: Side
    way: str
    layers: int = LAYERS

    @property
    def title(self) -> str:
        return f"{self.name}, {self.way}"

    @property
    def token_bytes(self) -> int:
        return self.layers * HEADS * CELL_BYTES


EQUAL = ("equal engines", Side(), Side())
BLOCKS = ("blocks of 16 → 64 tokens", Side(), Side(block_tokens=64))
LAYOUTS = ("heads → tokens outermost", Side(), Side(tokens_first=True))
PAIRS = (
    Engines(*EQUAL, "in place"),
    Engines(*BLOCKS, "staged"),
    Engines(*LAYOUTS, "staged"),
)
MAPPED_PAIRS = tuple(Engines(*pair, "mapped") for pair in (EQUAL, BLOCKS, LAYOUTS))
SHORT_LAYERS = 8
"""Of the engines of short loads: 16 KiB a token, so that a block of 16 tokens is 256 KiB."""
SHORT_PAIRS = tuple(
    Engines(*pair, way, SHORT_LAYERS)
    for pair, way in (
        (EQUAL, "in place"),
        (EQUAL, "mapped"),
        (LAYOUTS, "staged"),
        (LAYOUTS, "mapped"),
    )
)
SHORT_TOKENS = (16, 64)
"""256 KiB and 1 MiB."""
SHORT_TURNS_EACH = 10
HANDOVER, RESULT, BARE, COPY, WAKES = (
    "kvferry",
    "kvferry, to the result",
    "bare NIXL, the same descriptors",
    "plain copy of as many bytes",
    "two wake-ups",
)
WHAT = (
    "The cache of a prompt of a Llama-70B goes from a producer's process to a consumer's: from the order to the "
    "result, with both reads of the lease's slot, the check of the MAC, the relayout and the notification. Beside it, "
    "in turn: a bare NIXL loop with the same descriptors where bytes are read in place, and a plain copy of as many. "
    "Beside short loads also two threads that wake each other once, as the order and the result of a load do. "
    "Of mapped engines the producer's caches lie in a shared file, which has pages of 4 KiB, or on a GPU."
)


@dataclass(frozen=True)
class Measured:
    """One pair of engines and one length of prompt: milliseconds of every turn."""

    engines: Engines
    tokens: int
    ms: dict[str, list[float]]
    descriptors: int
    staged_bytes: int
    mapped_bytes: int

    def gb_s(self, name: str) -> float | None:
        """Of the median; None where it was not measured."""
        samples = self.ms.get(name)
        return self.num_bytes / statistics.median(samples) / 1e6 if samples else None

    @property
    def num_bytes(self) -> int:
        return self.tokens * self.engines.token_bytes


def scenario_of(engines: Engines, most_tokens: int, pool_bytes: int) -> Scenario:
    """A scenario of `bench.transfer` with the shape of a Llama-70B."""
    return Scenario(
        name=engines.title,
        run_bytes=HEADS * engines.producer.block_tokens * CELL_BYTES,
        layers=engines.layers,
        heads=HEADS,
        cell_bytes=CELL_BYTES,
        producer=engines.producer,
        consumer=engines.consumer,
        most_bytes=most_tokens * engines.token_bytes,
        pool_bytes=pool_bytes,
        staged=engines.way == "staged",
        mapped=engines.way == "mapped",
    )


def measure(
    bench: Bench, engines: Engines, lengths: Sequence[int], turns: int
) -> list[Measured]:
    """All lengths for one pair of engines."""
    scenario = scenario_of(engines, max(lengths), len(bench.target))
    with (
        connected(bench, scenario, 64 * engines.token_bytes) as loads,
        closing(WakeUps()) as wakes,
    ):
        if engines.way != "in place":
            return [
                _measure(bench, engines, loads, wakes, None, tokens, turns)
                for tokens in lengths
            ]
        with closing(BareNixl(bench.target, loads.peer)) as bare:
            return [
                _measure(bench, engines, loads, wakes, bare, tokens, turns)
                for tokens in lengths
            ]


def _measure(
    bench: Bench,
    engines: Engines,
    loads: Loads,
    wakes: WakeUps,
    bare: BareNixl | None,
    tokens: int,
    turns: int,
) -> Measured:
    num_bytes = tokens * engines.token_bytes
    device = bench.target.device
    leases = bench.leases(turns + 1)
    results_s: list[float] = []

    def load() -> float:
        seconds = loads.load([loads.order(leases.pop(), num_bytes)])
        results_s.append(loads.result_s)
        return seconds

    calls = {
        HANDOVER: load,
        COPY: lambda: timed(lambda: _copy(bench, num_bytes)),
        WAKES: lambda: timed(wakes.there_and_back),
    }
    if bare is not None:
        pieces = pieces_of(
            loads.scenario,
            loads.peer,
            loads.order(NO_LEASE, num_bytes),
            device.index or 0,
        )
        reads, loop = bare.reads(pieces), bare
        calls[BARE] = lambda: timed(lambda: loop.read(reads))
    seconds = in_turn(turns, calls)
    # The first turn warms up.
    seconds[RESULT] = results_s[1:]
    ms = {name: [1e3 * one for one in samples] for name, samples in seconds.items()}
    (record,) = loads.records
    return Measured(
        engines,
        tokens,
        ms,
        record.descriptors,
        record.staged_bytes,
        record.mapped_bytes,
    )


def _copy(bench: Bench, num_bytes: int) -> None:
    bench.target[:num_bytes].copy_(bench.source[:num_bytes])
    if bench.target.device.type == "cuda":
        torch.cuda.synchronize(bench.target.device)


def run(
    device_name: str,
    lengths: Sequence[int],
    turns: int,
    *,
    quick: bool,
    maps: bool = True,
) -> Results:
    """Start the producer, measure everything.

    Args:
        maps: the engines that map too.
    """
    pool_bytes = (
        max(lengths) * TOKEN_BYTES + 64 * LAYERS * HEADS * CELL_BYTES + MIB
    )  # block 0 holds nothing
    with two_processes(pool_bytes, 1, device_name) as bench:
        pairs = PAIRS + MAPPED_PAIRS if maps else PAIRS
        found = [
            one for engines in pairs for one in measure(bench, engines, lengths, turns)
        ]
        short: list[Measured] = []
        if maps:
            for engines in SHORT_PAIRS:
                short += measure(bench, engines, SHORT_TOKENS, SHORT_TURNS_EACH * turns)
        return results_of(
            found, short, device_name, pages_of(bench.target), quick=quick
        )


LONG_COLUMNS = (
    "engines",
    "tokens",
    "MB",
    "descriptors",
    "staged, MB",
    "mapped, MB",
    "turns",
    "handover, ms",
    "range, ms",
    "GB/s",
    "bare NIXL, GB/s",
    "plain copy, GB/s",
)
SHORT_COLUMNS = (
    "engines",
    "KiB",
    "turns",
    "to the result, ms",
    "range, ms",
    "handover, ms",
    "bare NIXL, ms",
    "plain copy, ms",
    "two wake-ups, ms",
)


def _by_way(
    title: str, found: Sequence[Measured]
) -> Iterator[tuple[str, Sequence[Measured]]]:
    """Those that read by NIXL, and those that read mapped memory; neither if there are none."""
    by_nixl = [one for one in found if one.engines.way != "mapped"]
    mapped = [one for one in found if one.engines.way == "mapped"]
    for way, some in (("by NIXL", by_nixl), ("mapped", mapped)):
        if some:
            yield f"{title} {way}", some


def _long_row(one: Measured) -> Sequence[Cell]:
    return (
        one.engines.title,
        one.tokens,
        one.num_bytes / 1e6,
        one.descriptors,
        one.staged_bytes / 1e6,
        one.mapped_bytes / 1e6,
        len(one.ms[HANDOVER]),
        statistics.median(one.ms[HANDOVER]),
        spread(one.ms[HANDOVER]),
        *(one.gb_s(name) for name in (HANDOVER, BARE, COPY)),
    )


def _short_row(one: Measured) -> Sequence[Cell]:
    others_ms = (
        statistics.median(one.ms[name]) if name in one.ms else None
        for name in (HANDOVER, BARE, COPY, WAKES)
    )
    return (
        one.engines.title,
        one.num_bytes / 1024,
        len(one.ms[RESULT]),
        statistics.median(one.ms[RESULT]),
        spread(one.ms[RESULT]),
        *others_ms,
    )


def results_of(
    found: Sequence[Measured],
    short: Sequence[Measured],
    device_name: str,
    pages: str,
    *,
    quick: bool,
) -> Results:
    """Tables of long loads and their chart, and tables of short ones."""
    # The page has tables of six rows at most.
    tables = [
        Table(title, LONG_COLUMNS, [_long_row(one) for one in some])
        for title, some in _by_way("Handovers", found)
    ]
    tables += [
        Table(title, SHORT_COLUMNS, [_short_row(one) for one in some])
        for title, some in _by_way("Short loads", short)
    ]
    direct = PAIRS[0].title
    titles = dict.fromkeys(one.engines.title for one in found)
    lines = [(f"kvferry, {engines}", HANDOVER, engines) for engines in titles]
    lines += [(BARE, BARE, direct), (COPY, COPY, direct)]
    series = [
        Series.of_samples(
            title,
            [
                (one.tokens, one.ms.get(name, ()))
                for one in found
                if one.engines.title == engines
            ],
        )
        for title, name, engines in lines
    ]
    return Results(
        command=f"python -m bench.handover --device {device_name}{' --quick' * quick}",
        what=WHAT,
        tables=tuple(tables),
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
    parser.add_argument(
        "--mapped", action="store_true", help="on cuda: also mapped, by CUDA IPC"
    )
    parser.add_argument("--quick", action="store_true", help="128 tokens, three turns")
    chosen = parser.parse_args()
    started = begin()
    use_huge_pages()
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    lengths = [1024, 8192, 32768] if chosen.device == "cuda" else [256, 1024]
    lengths, turns = ([128], 3) if chosen.quick else (lengths, 9)
    name = f"handover-{chosen.device}"
    maps = chosen.device == "cpu" or chosen.mapped
    if chosen.mapped and chosen.device == "cuda":
        name = f"{name}-mapped"
    results = run(chosen.device, lengths, turns, quick=chosen.quick, maps=maps)
    publish(name, results, started)


if __name__ == "__main__":
    main()
