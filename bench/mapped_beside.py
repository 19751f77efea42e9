"""Loads from a producer's cache that is mapped, and a decoder's step beside them: on a GPU by programs of a launch.

    python -m bench.mapped_beside                 # a GPU, 8 GiB of its memory, a minute; mapped-beside-cuda.json
    python -m bench.mapped_beside --device cpu    # caches in shared files, 8 GB of memory, minutes
    python -m bench.mapped_beside --quick

A decode step is memory-bound: a chain of products of matrices with a vector, 2 GiB of weights. It is timed alone, and
while another thread has loads of 335 MB in place carried out one after the other. On a GPU `MAX_PROGRAMS` of the
relayout decides between the two; it was never measured on a chip. On the CPU the step has one thread, and the copies of
a load another.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.command import command, measure_and_publish
from bench.figures import Results, Table, Target
from bench.handover import EQUAL, HEADS, LAYERS, TOKEN_BYTES, Engines, scenario_of
from bench.transfer_engines import Bench, two_processes
from bench.transfer_loads import Loads, connected
from bench.transfer_shapes import MIB

TOKENS, QUICK_TOKENS = 1024, 128
"""335 and 42 MB."""
ANY = 1 << 30
PROGRAMS = {"cpu": (ANY,), "cuda": (256, 512, 1024, 2048, ANY)}
"""Of a launch; the last bounds nothing, as nothing does on the CPU."""
WIDTH = 8192
"""Of the matrices in bfloat16: 128 MiB each."""
MOST_SLOWER = 1.05


@dataclass(frozen=True)
class Measured:
    """One number of programs: milliseconds of every load of so many tokens, and of every step beside them."""

    programs: int
    tokens: int
    load_ms: list[float]
    alone_ms: list[float]
    beside_ms: list[float]

    @property
    def slower(self) -> float:
        """How many times as long a step takes."""
        return statistics.median(self.beside_ms) / statistics.median(self.alone_ms)


class Decoder:
    """A decode step without a model."""

    def __init__(self, device_name: str, matrices: int, width: int = WIDTH) -> None:
        shape = (matrices, width, width)
        self._weights = torch.zeros(shape, dtype=torch.bfloat16, device=device_name)
        self._hidden = torch.zeros(width, dtype=torch.bfloat16, device=device_name)

    def step_ms(self) -> float:
        """The time of one step on the device."""
        if not self._weights.is_cuda:
            begun_s = time.perf_counter()
            self._step()
            return 1e3 * (time.perf_counter() - begun_s)
        cuda: Any = torch.cuda
        begun = cuda.Event(enable_timing=True)
        ended = cuda.Event(enable_timing=True)
        begun.record()
        self._step()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))

    def _step(self) -> None:
        hidden = self._hidden
        for matrix in self._weights:
            hidden = matrix @ hidden


def measure(
    bench: Bench, programs: int, tokens: int, decoder: Decoder, steps: int
) -> Measured:
    """Steps alone, then beside loads."""
    if bench.target.is_cuda:
        # Imported here: a machine without a GPU need not have Triton.
        from kvferry.worker.relayout import triton_relayout

        triton_relayout.MAX_PROGRAMS = programs
    engines = Engines(*EQUAL, "mapped")
    scenario = scenario_of(engines, tokens, len(bench.target))
    with connected(bench, scenario, 64 * engines.token_bytes) as loads:
        alone_ms = [decoder.step_ms() for _ in range(steps)]
        loading = _Loading(bench, loads, tokens * engines.token_bytes)
        loading.start()
        beside_ms: list[float] = []
        while len(beside_ms) < steps:
            beside_ms.append(decoder.step_ms())
        loading.stop()
    # The first load may still compile.
    return Measured(programs, tokens, loading.load_ms[1:], alone_ms, beside_ms)


def run(device_name: str, tokens: int, steps: int, decoder: Decoder) -> list[Measured]:
    """Start the producer, measure every number of programs."""
    # Block 0 holds nothing, and the first load is of a block of 64 tokens.
    pool_bytes = 2 * max(tokens, 64) * TOKEN_BYTES + 64 * LAYERS * HEADS * 256 + MIB
    with two_processes(pool_bytes, 1, device_name) as bench:
        return [
            measure(bench, programs, tokens, decoder, steps)
            for programs in PROGRAMS[device_name]
        ]


class _Loading(threading.Thread):
    """Loads, one after the other, until `stop`."""

    def __init__(self, bench: Bench, loads: Loads, num_bytes: int) -> None:
        super().__init__(name="loading")
        self.load_ms: list[float] = []
        self._from = bench
        self._loads = loads
        self._num_bytes = num_bytes
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.is_set() or len(self.load_ms) < 2:
            (lease,) = self._from.leases(1)
            order = self._loads.order(lease, self._num_bytes)
            self.load_ms.append(1e3 * self._loads.load([order]))

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def results_of(found: list[Measured], device_name: str, *, quick: bool) -> Results:
    """A table, and on a GPU the target for the number that the product has."""
    chosen = [one for one in found if one.programs == 1024]
    rows = [
        (
            "any" if one.programs == ANY else str(one.programs),
            one.tokens * TOKEN_BYTES / 1e6,
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
        "MB of a load",
        "loads",
        "a load, ms",
        "steps",
        "a step alone, ms",
        "beside loads, ms",
        "times as long",
    )
    return Results(
        command=f"python -m bench.mapped_beside --device {device_name}{' --quick' * quick}",
        what="A memory-bound decode step, alone and beside loads from a cache that is mapped, by CUDA IPC on a GPU.",
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


def main() -> int:
    """Measure, print, write."""
    parser = command("mapped_beside", __doc__, "20 short steps in place of 200, 42 MB")
    parser.add_argument(
        "--device", default="cuda", choices=("cpu", "cuda"), help="where the caches are"
    )
    chosen = parser.parse_args()
    return measure_and_publish(
        f"mapped-beside-{chosen.device}",
        lambda: _run(chosen.device, quick=chosen.quick),
    )


def _run(device: str, *, quick: bool) -> Results:
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    tokens, steps, matrices = (TOKENS, 200, 16)
    if quick:
        tokens, steps, matrices = (QUICK_TOKENS, 20, 2)
    found = run(device, tokens, steps, Decoder(device, matrices))
    return results_of(found, device, quick=quick)


if __name__ == "__main__":
    raise SystemExit(main())
