"""The constants of the planner's cost model, measured: reads by NIXL between two processes of this machine.

    time = descriptors · per_descriptor + bytes · per_byte

Descriptors of several sizes are read; those of one list lie apart, so that NIXL merges none. On one machine this goes
through shared memory or cuda_ipc: for a link between machines, run it with the producer on the other one's address
space in mind, or take the link's own figures.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvferry.plan.cost import DIRECT_MIN_BYTES
from kvferry.worker.fabric.agent import apply_ucx_defaults
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region, TransferState

SIZES = tuple(1 << power for power in range(9, 21))
BUFFER_BYTES = 128 << 20
MOST_DESCRIPTORS = 8192
REPEATS = 5


def calibrate(device: torch.device, relayout_gb_s: float) -> None:
    """Measure, and print the constants in the form that the configuration takes."""
    apply_ucx_defaults(os.environ)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=_produce, args=(theirs, str(device)), daemon=True)
    producer.start()
    try:
        samples = _read_all(ours, device)
    finally:
        ours.send(None)
        producer.join(10)
        if producer.is_alive():
            producer.kill()
    per_descriptor, per_byte = fit(samples)
    print(f"{'descriptor':>12} {'number':>7} {'ms':>9} {'GB/s':>7} {'fitted ms':>10}")
    for size, count, taken in samples:
        fitted = count * per_descriptor + size * count * per_byte
        print(f"{size:>12} {count:>7} {taken * 1e3:>9.3f} {size * count / taken / 1e9:>7.2f} {fitted * 1e3:>10.3f}")
    print(
        f"per descriptor {per_descriptor * 1e6:.3f} µs; per byte {per_byte * 1e9:.4f} ns\n"
        f"Costs(direct_min_bytes={round(per_descriptor / per_byte)}, link_gb_s={1 / per_byte / 1e9:.1f}, "
        f"relayout_gb_s={relayout_gb_s:.1f})    # direct_min_bytes is {DIRECT_MIN_BYTES} as published"
    )


def fit(samples: list[tuple[int, int, float]]) -> tuple[float, float]:
    """Seconds per descriptor and per byte from (bytes of one, how many, seconds): least squares of relative errors.

    Both are at least a picosecond, or the quotient would say nothing.
    """
    terms = np.array([(count / taken, size * count / taken) for size, count, taken in samples])
    solution, *_ = np.linalg.lstsq(terms, np.ones(len(samples)), rcond=None)
    return max(float(solution[0]), 1e-12), max(float(solution[1]), 1e-12)


def _memory(device: str) -> tuple[torch.Tensor, Region]:
    buffer = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device=device)
    kind = MemoryKind.VRAM if buffer.device.type == "cuda" else MemoryKind.DRAM
    return buffer, Region(buffer.data_ptr(), BUFFER_BYTES, kind, buffer.device.index or 0)


def _rows(region: Region, size: int) -> DescriptorRows:
    """Descriptors of one size that lie twice as far apart."""
    count = min(MOST_DESCRIPTORS, BUFFER_BYTES // (2 * size))
    return DescriptorRows.of(region.kind, [(region.address, size, region.device, 2 * size, count)])


def _produce(pipe: Connection, device: str) -> None:
    """The other process: memory that is read, and an agent that does nothing else."""
    buffer, region = _memory(device)
    fabric = NixlFabric(f"calibrate-producer-{os.getpid()}")
    fabric.register([region])
    pipe.send((fabric.metadata(), region))
    while not pipe.poll(0.002):
        fabric.take_notifications()  # some transports advance only when they are asked
    pipe.recv()
    fabric.close()
    del buffer


def _read_all(pipe: Connection, device: torch.device) -> list[tuple[int, int, float]]:
    buffer, region = _memory(str(device))
    fabric = NixlFabric(f"calibrate-consumer-{os.getpid()}")
    samples = []
    try:
        fabric.register([region])
        if not pipe.poll(60):
            raise TimeoutError("the producer's process says nothing")
        metadata, remote_region = pipe.recv()
        peer = fabric.add_peer(metadata)
        for size in SIZES:
            local = fabric.prepare_local(_rows(region, size))
            remote = fabric.prepare_remote(peer, _rows(remote_region, size))
            indices = np.arange(local.count, dtype=np.int32)
            taken = []
            for _ in range(REPEATS + 1):
                start = time.perf_counter()
                transfer = fabric.post_read(local, indices, remote, indices)
                while fabric.poll(transfer) is not TransferState.DONE:
                    time.sleep(0)
                taken.append(time.perf_counter() - start)
                fabric.release(transfer)
            samples.append((size, local.count, min(taken[1:])))
            fabric.release(local)
            fabric.release(remote)
    finally:
        fabric.close()
        del buffer
    return samples
