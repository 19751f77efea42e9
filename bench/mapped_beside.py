"""Loads from a producer's cache that CUDA IPC has mapped, and a decoder's step beside them, by programs of a launch.

    python -m bench.mapped_beside             # a GPU, 8 GiB of its memory, a minute; results/mapped-beside.json
    python -m bench.mapped_beside --quick

A decode step is memory-bound: a chain of products of matrices with a vector, 2 GiB of weights. It is timed alone, and
while another thread has loads of 335 MB in place carried out one after the other. `MAX_PROGRAMS` of the relayout
decides between the two; it was never measured on a chip.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import threading
from dataclasses import dataclass
from typing import Any

import torch

from bench.figures import Results, Table, Target, publish
from bench.handover import EQUAL, HEADS, LAYERS, TOKEN_BYTES, Engines, scenario_of
from bench.provenance import begin
from bench.transfer_engines import Bench, two_processes
from bench.transfer_loads import Loads, connected
from bench.transfer_shapes import MIB
from kvferry.worker.relayout import triton_relayout

TOKENS = 1024
"""335 MB."""
PROGRAMS = (256, 512, 1024, 2048, 1 << 30)
"""Of a launch; the last bounds nothing."""
WIDTH = 8192
"""Of the matrices in bfloat16: 128 MiB each."""
MOST_SLOWER = 1.05


@dataclass(frozen=True)
class Measured:
    """One number of programs: milliseconds of every load, and of every step beside them."""

    programs: int
    load_ms: list[float]
    alone_ms: list[float]
    beside_ms: list[float]

    @property
    def slower(self) -> float:
        """How many times as long a step takes."""
        return statistics.median(self.beside_ms) / statistics.median(self.alone_ms)


class Decoder:
    """A decode step without a model."""

    def __init__(self, matrices: int) -> None:
        shape = (matrices, WIDTH, WIDTH)
        self._weights = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self._hidden = torch.zeros(WIDTH, dtype=torch.bfloat16, device="cuda")

    def step_ms(self) -> float:
        """The time of one step on the device."""
        cuda: Any = torch.cuda
        begun = cuda.Event(enable_timing=True)
        ended = cuda.Event(enable_timing=True)
        begun.record()
        hidden = self._hidden
        for matrix in self._weights:
            hidden = matrix @ hidden
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))


def measure(bench: Bench, programs: int, decoder: Decoder, steps: int) -> Measured:
    """Steps alone, then beside loads."""
    triton_relayout.MAX_PROGRAMS = programs
    engines = Engines(*EQUAL, "mapped")
    scenario = scenario_of(engines, TOKENS, len(bench.target))
    with connected(bench, scenario, 64 * engines.token_bytes) as loads:
        alone_ms = [decoder.step_ms() for _ in range(steps)]
        loading = _Loading(bench, loads)
        loading.start()
        beside_ms: list[float] = []
        while len(beside_ms) < steps:
            beside_ms.append(decoder.step_ms())
        loading.stop()
    # The first load may still compile.
    return Measured(programs, loading.load_ms[1:], alone_ms, beside_ms)


class _Loading(threading.Thread):
    """Loads, one after the other, until `stop`."""

    def __init__(self, bench: Bench, loads: Loads) -> None:
        super().__init__(name="loading")
        self.load_ms: list[float] = []
        self._from = bench
        self._loads = loads
        self._is_over = threading.Event()

    def run(self) -> None:
        num_bytes = TOKENS * TOKEN_BYTES
        while not self._is_over.is_set() or len(self.load_ms) < 2:
            (lease,) = self._from.leases(1)
            order = self._loads.order(lease, num_bytes)
            self.load_ms.append(1e3 * self._loads.load([order]))

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def results_of(found: list[Measured], *, quick: bool) -> Results:
    """A table, and the target for the number that the product has."""
    chosen = [one for one in found if one.programs == 1024]
    rows = [
        (
            str(one.programs) if one.programs < 1 << 30 else "any",
            len(one.load_ms),
            statistics.median(one.load_ms),
            len(one.beside_ms),
            statistics.median(one.alone_ms),
            statistics.median(one.beside_ms),
            one.slower,
        )
        for one in found
    ]
    columns = (
        "programs of a launch",
        "loads",
        "a load of 335 MB, ms",
        "steps",
        "a step alone, ms",
        "beside loads, ms",
        "times as long",
    )
    return Results(
        command=f"python -m bench.mapped_beside{' --quick' * quick}",
        what="A decode step of 2 GiB of weights, alone and beside loads from a cache that CUDA IPC has mapped.",
        tables=(Table("A decode step beside mapped loads", columns, rows),),
        targets=tuple(
            Target.at_most(
                "a decode step beside mapped loads",
                one.slower,
                MOST_SLOWER,
                "times as long",
            )
            for one in chosen
        ),
        quick=quick,
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 steps in place of 200")
    chosen = parser.parse_args()
    started = begin()
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    steps = 20 if chosen.quick else 200
    # Block 0 holds nothing.
    pool_bytes = 2 * TOKENS * TOKEN_BYTES + 64 * LAYERS * HEADS * 256 + MIB
    with two_processes(pool_bytes, 1, "cuda") as bench:
        decoder = Decoder(2 if chosen.quick else 16)
        found = [measure(bench, programs, decoder, steps) for programs in PROGRAMS]
    publish("mapped-beside", results_of(found, quick=chosen.quick), started)


if __name__ == "__main__":
    main()
