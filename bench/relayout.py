"""The relayout beside a plain copy of the same bytes and beside gathering and scattering layer by layer.

    python -m bench.relayout                 # writes results/relayout-cuda.json, or -cpu.json without a GPU; minutes
    python -m bench.relayout --quick         # few layers and repetitions, for orientation
    python -m bench.relayout --calibrate     # prints the constants of the planner's cost model for this machine
    python -m bench.relayout --tokens 512 8192 --pool-mib 256 2048 --tile 512 1024 2048

GB/s are bytes read and written, over time. On a GPU there are two figures of the relayout: `kernel`, all waves of a
request in one CUDA graph, which is the time that the device takes, and `driven`, the waves started one by one as a
worker does, tables and uploads included. As long as `driven` is faster than the link, neither delays a load.
On a CPU, times are processor time of the one thread that works, as the neighbours' work is not of interest.
Everything touches at least four times the second-level cache on both sides before it touches anything again, the pool
apart where that is smaller (the table says when).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.figures import publish
from bench.provenance import begin
from bench.relayout_report import results_of
from bench.relayout_waves import HEADS, Memory, Setup, layer_by_layer, setups, shuffled, waves
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.reference import ReferenceRelayout

L2_FACTOR = 4


@dataclass
class Figure:
    """One row. GB/s of bytes read and written; None where it was not measured."""

    setup: str
    layers: int
    tokens: int
    pool_mib: int
    tile: int | None
    waves: int
    launches: int
    moved_mb: float
    copy_gb_s: float
    kernel_gb_s: float | None
    driven_gb_s: float
    layer_by_layer_gb_s: float

    @property
    def best(self) -> float:
        return self.kernel_gb_s or self.driven_gb_s

    def line(self) -> str:
        kernel = "     –" if self.kernel_gb_s is None else f"{self.kernel_gb_s:6.0f}"
        return (
            f"{self.setup:<26} {self.tokens:>6} {self.pool_mib:>5} {self.tile or '–':>5} {self.waves:>5} "
            f"{self.launches:>8} {self.moved_mb:>8.0f} {self.copy_gb_s:>6.1f} {kernel} {self.driven_gb_s:>6.1f} "
            f"{self.layer_by_layer_gb_s:>6.1f} {self.best / self.copy_gb_s:>6.0%} "
            f"{self.best / self.layer_by_layer_gb_s:>6.1f}×"
        )


HEADER = (
    f"{'setup':<26} {'tokens':>6} {'pool':>5} {'tile':>5} {'waves':>5} {'launches':>8} {'MB':>8} "
    f"{'copy':>6} {'kernel':>6} {'driven':>6} {'layers':>6} {'/copy':>6} {'/layers':>7}"
)


class Timer:
    """Times work on one device: the median of some repetitions, after one that does not count."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats

    def seconds(self, work: Callable[[], None]) -> float:
        """Time of `work` until the device has done it: on the wall, or on a CPU that of this thread alone."""
        now = time.perf_counter if self.device.type == "cuda" else time.thread_time
        taken = []
        for number in range(self._repeats + 1):
            self.wait()
            start = now()
            work()
            self.wait()
            if number:
                taken.append(now() - start)
        return sorted(taken)[len(taken) // 2]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def l2_bytes(device: torch.device) -> int:
    """The second-level cache (of a CPU: a guess)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return 4 << 20


def measure(setup: Setup, layers: int, tokens: int, pool_bytes: int, tile: int | None, timer: Timer) -> Figure:
    """One row of the table."""
    device = timer.device
    per_block = 2 * layers * setup.local.block_bytes
    request_blocks = setup.local.blocks(tokens)
    rounds = max(1, -(-L2_FACTOR * l2_bytes(device) // (request_blocks * per_block)))
    memory = Memory.of(setup, layers, pool_bytes, rounds * request_blocks, device)
    requests = [list(waves(setup, memory, tokens, turn * request_blocks)) for turn in range(rounds)]
    read, written = (sum(table.num_bytes[side] for table in requests[0]) for side in (0, 1))
    moved = rounds * (read + written)

    relayout = _make(memory, tile)
    before = relayout.launches
    _drive(relayout, requests)
    launches = (relayout.launches - before) / rounds
    driven = timer.seconds(lambda: _drive(relayout, requests))
    kernel = _graph_seconds(requests, memory, tile, timer) if tile else None

    copied = _copy_seconds(moved // 2, timer)
    received = torch.empty(setup.remote.blocks(tokens), setup.remote.block_bytes, dtype=torch.uint8, device=device)
    received.zero_()
    theirs = torch.from_numpy(shuffled(setup.remote.blocks(tokens))).to(device)
    ours = torch.from_numpy(shuffled(request_blocks)).to(device)
    by_layer = timer.seconds(lambda: layer_by_layer(setup, received, memory.cache, theirs, ours)) * rounds
    return Figure(
        setup=setup.name,
        layers=layers,
        tokens=tokens,
        pool_mib=pool_bytes >> 20,
        tile=tile,
        waves=len(requests[0]),
        launches=round(launches),
        moved_mb=moved / rounds / 1e6,
        copy_gb_s=moved / copied / 1e9,
        kernel_gb_s=moved / kernel / 1e9 if kernel else None,
        driven_gb_s=moved / driven / 1e9,
        layer_by_layer_gb_s=moved / by_layer / 1e9,
    )


def check(setup: Setup, layers: int, pool_bytes: int, tile: int | None, device: torch.device) -> None:
    """That the relayout being measured puts every byte where the reference does, for one wave.

    Raises:
        SystemExit: it does not.
    """
    memory = Memory.of(setup, layers, pool_bytes, setup.local.blocks(1024), device)
    table = next(waves(setup, memory, 1024))
    found = []
    for relayout in (ReferenceRelayout([memory.pool], [memory.cache]), _make(memory, tile)):
        memory.cache.zero_()
        Timer(device, 1).wait()
        _drive(relayout, [[table]])
        Timer(device, 1).wait()
        found.append(memory.cache.clone())
    if not torch.equal(*found):
        raise SystemExit(f"{setup.name}: the relayout is WRONG, {int((found[0] != found[1]).sum())} bytes differ")


def _copy_seconds(num_bytes: int, timer: Timer) -> float:
    """A plain copy: as many bytes are written as are read."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device)
    destination = torch.zeros_like(source)

    def copy() -> None:
        destination.copy_(source)

    return timer.seconds(copy)


def _make(memory: Memory, tile: int | None) -> Relayout:
    if tile is None:
        return ReferenceRelayout([memory.pool], [memory.cache])
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    return TritonRelayout([memory.pool], [memory.cache], tile=tile)


def _drive(relayout: Relayout, requests: list[list[Any]]) -> None:
    for request in requests:
        for table in request:
            while relayout.try_start(table) is None:
                time.sleep(0)


def _graph_seconds(requests: list[list[Any]], memory: Memory, tile: int, timer: Timer) -> float:
    """All waves as one CUDA graph: the time of the device, without the launches."""
    from kvferry.worker.relayout.device_table import DevicePieces, DeviceTable
    from kvferry.worker.relayout.kernel import launch_relayout, tile_of

    device = memory.pool.device
    launches = []
    for table in (table for request in requests for table in request):
        converts = table.pieces.converts
        compiled = DeviceTable.of(table, DevicePieces.of(table.pieces), tile_of(tile, converts))
        names = ("programs", "pieces", "shapes", "units", "scales")
        sections = {
            name: torch.from_numpy(section).to(device) for name, section in zip(names, compiled.sections, strict=True)
        }
        launches.append((sections, len(compiled.programs), converts))

    def all_of_them() -> None:
        for sections, programs, converts in launches:
            launch_relayout(**sections, num_programs=programs, converts=converts, tile=tile_of(tile, converts))

    all_of_them()
    timer.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    return timer.seconds(graph.replay)


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--pool-mib", type=int, nargs="+")
    parser.add_argument("--tile", type=int, nargs="+", default=[1024])
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true", help="writes results/quick/relayout-….json")
    parser.add_argument("--calibrate", action="store_true", help="measure the constants of the cost model instead")
    chosen = parser.parse_args()
    started = begin()
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device(chosen.device)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)  # as a worker's transfer thread, beside an engine that computes on all cores
    if chosen.quick:
        chosen.tokens, chosen.layers, chosen.pool_mib, chosen.repeats = [256], 2, [32], 3
    tokens = chosen.tokens or ([512, 2048, 8192, 32768] if on_gpu else [256, 1024])
    layers = chosen.layers or (80 if on_gpu else 4)
    pools = chosen.pool_mib or ([256, 2048] if on_gpu else [32])
    timer = Timer(device, chosen.repeats or (20 if on_gpu else 5))
    tiles: list[int | None] = list(chosen.tile) if on_gpu else [None]
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; {layers} layers, {HEADS} KV heads; second-level cache {l2_bytes(device) >> 20} MiB")
    if chosen.calibrate:
        from bench.calibrate import calibrate

        fastest = measure(setups()[0], layers, tokens[0], pools[0] << 20, tiles[0], timer)
        calibrate(device, fastest.driven_gb_s)
        return
    for pool in pools:
        if pool << 20 < L2_FACTOR * l2_bytes(device):
            print(f"a pool of {pool} MiB is less than {L2_FACTOR} times the second-level cache")
    print(HEADER)
    figures = []
    for setup in setups():
        for tile in tiles:
            check(setup, layers, pools[0] << 20, tile, device)
            for pool in pools:
                for count in tokens:
                    figures.append(measure(setup, layers, count, pool << 20, tile, timer))
                    print(figures[-1].line(), flush=True)
    for figure in figures:
        if figure.launches != figure.waves:
            raise SystemExit(f"{figure.setup}: {figure.launches} launches for {figure.waves} waves")
    command = f"python -m bench.relayout --device {device.type}{' --quick' * chosen.quick}"
    rows = [asdict(figure) for figure in figures]
    publish(f"relayout-{device.type}", results_of(rows, name, on_gpu, command, chosen.quick), started)


if __name__ == "__main__":
    main()
