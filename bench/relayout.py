"""The relayout beside a plain copy of the same bytes and beside gathering and scattering layer by layer.

    python -m bench.relayout            # writes results/relayout-cuda.json, or -cpu.json without a GPU; minutes
    python -m bench.relayout --quick    # few layers and repetitions, for orientation

GB/s are bytes read and written, over time. On a GPU there are two figures of the relayout: `kernel`, all waves of a
request in one CUDA graph, which is the time that the device takes, and `driven`, the waves started one by one as a
worker does, tables and uploads included. As long as `driven` is faster than the link, neither delays a load.
On a CPU, times are processor time of the one thread that works, as the neighbours' work is not of interest.
Everything touches at least four times the second-level cache on both sides before it touches anything again, the pool
apart where that is smaller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch

from bench.command import command, measure_and_publish
from bench.figures import Chart, Results, Series, Table, Target
from bench.relayout_waves import (
    Memory,
    Setup,
    layer_by_layer,
    moved_bytes,
    setups,
    shuffled,
    waves,
)
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.reference import ReferenceRelayout
from kvferry.worker.relayout.wave_table import WaveTable

MIN_COPY_SHARE, MIN_PEER_RATIO = 0.9, 5.0
"""Targets on a GPU: the share of the copy's bandwidth, and the factor over layer by layer."""
_L2_FACTOR = 4
_CPU_L2_BYTES = 4 << 20  # a guess
_TILE = 1024
"""Chunks of one program of the kernel, as a worker has it."""
_WHAT = (
    "GB/s of the relayout, which puts what was read in the producer's shape in its place in the consumer's cache. The "
    "engines of a pair have other blocks, layouts or dtypes. Beside it, in the same run, a plain copy of the same "
    "bytes, and gathering and scattering layer by layer as vLLM's own connector does. Bytes read and written count."
)


@dataclass(frozen=True)
class Figure:
    """One row. GB/s of bytes read and written; None where it was not measured."""

    setup: str
    tokens: int
    pool_mib: int
    waves: int
    moved_mb: float
    copy_gb_s: float
    kernel_gb_s: float | None
    driven_gb_s: float
    layer_by_layer_gb_s: float

    @property
    def share(self) -> float:
        """Of the copy."""
        return (self.kernel_gb_s or self.driven_gb_s) / self.copy_gb_s

    @property
    def ratio(self) -> float:
        """Over layer by layer."""
        return (self.kernel_gb_s or self.driven_gb_s) / self.layer_by_layer_gb_s


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of some repetitions, after one that does not count: on the wall, or on a CPU of this thread alone."""
    now = time.perf_counter if device.type == "cuda" else time.thread_time
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        start = now()
        work()
        _wait(device)
        taken.append(now() - start)
    return statistics.median_low(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    setup: Setup,
    layers: int,
    tokens: int,
    pool_bytes: int,
    device: torch.device,
    repeats: int,
) -> Figure:
    """One row of the table.

    Raises:
        RuntimeError: a wave took more than one launch.
    """
    on_gpu = device.type == "cuda"
    l2_bytes = (
        torch.cuda.get_device_properties(device).L2_cache_size
        if on_gpu
        else _CPU_L2_BYTES
    )
    request_blocks = setup.local.blocks(tokens)
    request_bytes = request_blocks * 2 * layers * setup.local.block_bytes
    rounds = max(1, -(-_L2_FACTOR * l2_bytes // request_bytes))
    memory = Memory.of(setup, layers, pool_bytes, rounds * request_blocks, device)
    tables = [
        table
        for turn in range(rounds)
        for table in waves(setup, memory, tokens, turn * request_blocks)
    ]
    moved = sum(map(moved_bytes, tables))

    relayout = _make(memory)
    before = relayout.launches
    _drive(relayout, tables)
    if relayout.launches - before != len(tables):
        raise RuntimeError(
            f"{setup.name}: {relayout.launches - before} launches for {len(tables)} waves"
        )
    driven_s = seconds_of(lambda: _drive(relayout, tables), device, repeats)
    kernel_s = _graph_seconds(tables, memory, repeats) if on_gpu else None

    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    copied_s = seconds_of(
        partial(torch.zeros_like(source).copy_, source), device, repeats
    )
    received = torch.zeros(
        setup.remote.blocks(tokens),
        setup.remote.block_bytes,
        dtype=torch.uint8,
        device=device,
    )
    theirs = torch.from_numpy(shuffled(setup.remote.blocks(tokens))).to(device)
    ours = torch.from_numpy(shuffled(request_blocks)).to(device)
    by_layer = partial(layer_by_layer, setup, received, memory.cache, theirs, ours)
    by_layer_s = seconds_of(by_layer, device, repeats) * rounds
    return Figure(
        setup=setup.name,
        tokens=tokens,
        pool_mib=pool_bytes >> 20,
        waves=len(tables) // rounds,
        moved_mb=moved / rounds / 1e6,
        copy_gb_s=moved / copied_s / 1e9,
        kernel_gb_s=moved / kernel_s / 1e9 if kernel_s else None,
        driven_gb_s=moved / driven_s / 1e9,
        layer_by_layer_gb_s=moved / by_layer_s / 1e9,
    )


def _make(memory: Memory) -> Relayout:
    if memory.pool.device.type != "cuda":
        return ReferenceRelayout([memory.pool], [memory.cache])
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    return TritonRelayout([memory.pool], [memory.cache], tile=_TILE)


def _drive(relayout: Relayout, tables: Sequence[WaveTable]) -> None:
    for table in tables:
        while relayout.try_start(table) is None:
            time.sleep(0)


def _graph_seconds(tables: Sequence[WaveTable], memory: Memory, repeats: int) -> float:
    """All waves as one CUDA graph: the time of the device, without the launches."""
    from kvferry.worker.relayout.device_table import DevicePieces, DeviceTable
    from kvferry.worker.relayout.kernel import launch_relayout, tile_of

    device = memory.pool.device
    launches = []
    for table in tables:
        converts = table.pieces.converts
        compiled = DeviceTable.compile(
            table, DevicePieces.compile(table.pieces), tile_of(_TILE, converts)
        )
        names = ("programs", "pieces", "shapes", "units", "scales")
        sections = {
            name: torch.from_numpy(section).to(device)
            for name, section in zip(names, compiled.sections, strict=True)
        }
        launches.append((sections, len(compiled.programs), converts))

    def all_of_them() -> None:
        for sections, programs, converts in launches:
            launch_relayout(
                **sections,
                num_programs=programs,
                converts=converts,
                tile=tile_of(_TILE, converts),
            )

    all_of_them()
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    return seconds_of(graph.replay, device, repeats)


def results_of(
    found: Sequence[Figure], device: torch.device, *, quick: bool
) -> Results:
    """A table and a chart; limits are promised only for a GPU."""
    on_gpu = device.type == "cuda"
    columns = (
        "setup",
        "tokens",
        "pool, MiB",
        "waves",
        "moved, MB",
        "copy, GB/s",
        "kernel, GB/s",
        "driven, GB/s",
    )
    drawn = [one for one in found if one.pool_mib == max(one.pool_mib for one in found)]
    least_share, least_ratio = (
        min(one.share for one in found),
        min(one.ratio for one in found),
    )
    return Results(
        command=f"python -m bench.relayout --device {device.type}{' --quick' * quick}",
        what=_WHAT,
        tables=(
            Table(
                "All setups",
                (
                    *columns,
                    "layer by layer, GB/s",
                    "of the copy",
                    "over layer by layer",
                ),
                [[*astuple(one), one.share, one.ratio] for one in found],
            ),
        ),
        charts=(
            Chart(
                "The relayout, of a plain copy of the same bytes",
                "tokens of the request",
                "ratio",
                [
                    Series(name, [one.tokens for one in of], [one.share for one in of])
                    for name in dict.fromkeys(one.setup for one in drawn)
                    for of in [[one for one in drawn if one.setup == name]]
                ],
                x_log=True,
                limit=MIN_COPY_SHARE if on_gpu else None,
            ),
        ),
        targets=(
            Target.at_least(
                "the lowest share of a plain copy's bandwidth",
                least_share,
                MIN_COPY_SHARE,
                "",
            ),
            Target.at_least(
                "the lowest ratio over layer by layer", least_ratio, MIN_PEER_RATIO, "×"
            ),
        )
        if on_gpu
        else (),
        notes=(
            "A pair is named by heads (HND) or tokens (NHD) outermost, and tokens of a block.",
        ),
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    parser = command("relayout", __doc__, "256 tokens of two layers")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        choices=("cpu", "cuda"),
    )
    chosen = parser.parse_args()
    device = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda", 0)}[
        chosen.device
    ]
    return measure_and_publish(
        f"relayout-{device.type}", lambda: _run(device, quick=chosen.quick)
    )


def _run(device: torch.device, *, quick: bool) -> Results:
    if device.type == "cuda":
        tokens, layers, pools, repeats = [512, 2048, 8192, 32768], 80, [256, 2048], 20
    else:
        # As a worker's transfer thread, beside an engine that computes on all cores.
        torch.set_num_threads(1)
        tokens, layers, pools, repeats = [256, 1024], 4, [32], 5
    if quick:
        tokens, layers, pools, repeats = [256], 2, [32], 3
    found = []
    for setup in setups():
        found += [
            measure(setup, layers, count, pool << 20, device, repeats)
            for pool in pools
            for count in tokens
        ]
        print(setup.name, flush=True)
    return results_of(found, device, quick=quick)


if __name__ == "__main__":
    raise SystemExit(main())
