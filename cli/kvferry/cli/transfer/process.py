"""The child process, an owner or a reader: `python -m kvferry.cli.transfer.process`.

Both have memory that is registered. An owner's is read until its pipe is closed. A reader reads into its own, times and
compares: sizes go by powers of four, in one descriptor and in runs of 16 KiB.
"""

from __future__ import annotations

import math
import secrets
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cli.formatting import binary_bytes
from kvferry.cli.transfer.messages import (
    MIN_BYTES,
    CaseProgress,
    CaseResult,
    Device,
    Failed,
    Kind,
    Measured,
    Offer,
    ReadsFailed,
    Task,
    receive,
    send,
)
from kvferry.plan.wording import counted
from kvferry.protocol.errors import KvferryError
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    LocalDescriptors,
    MemoryKind,
    Region,
    RemoteDescriptors,
    TransferState,
)

# The published knee: shorter descriptors are slow. Also the block of one head in many caches.
RUN_BYTES = 16 << 10
# Reads of a case that are not counted: the first ones set up lanes and registrations.
WARM_UP = 3
MIN_READS = WARM_UP + 5
MAX_READS = WARM_UP + 5000
_STEP = 4
_REPORT_S = 0.25
_US = 1e6
_MAX_REASON = 400

Bytes = npt.NDArray[np.uint8]


def main() -> int:
    """Run until the work is done or the command closes the pipe, whose file number is the last argument.

    Returns:
        The exit status. An exception is sent to the command and not printed.
    """
    pipe = Connection(int(sys.argv[-1]))
    try:
        run(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except ReadsFailed as failed:
        send(pipe, Failed(reason=str(failed), late=failed.late))
        return 1
    except Exception as failure:  # noqa: BLE001 - the command reports it
        send(pipe, Failed(reason=f"{type(failure).__name__}: {failure}"))
        return 1
    return 0


def run(pipe: Connection) -> None:
    """Offer memory, or read what is offered."""
    # Made before the task has come: the doctor's reader waits for its owner's offer.
    fabric = NixlFabric(f"kvferry-bench-{secrets.token_hex(8)}")
    task = receive(pipe)
    if not isinstance(task, Task):
        return
    memory = RegisteredMemory(fabric, task.device, task.max_bytes)
    if task.offer is None:
        send(pipe, make_offer(fabric, memory))
        # NIXL's own thread serves the reader, until the command closes the pipe: that raises `EOFError`.
        receive(pipe)
        return
    reader = Reader(
        fabric, memory, task, lambda what: send(pipe, CaseProgress(what=what))
    )
    send(pipe, reader.measure(task.offer))
    fabric.close()


def make_offer(fabric: Fabric, memory: RegisteredMemory) -> Offer:
    """Fill an owner's memory, and describe it."""
    # Another content each time: what an earlier run left in memory must not pass for this one's.
    seed = secrets.randbits(62)
    memory.write(content(seed, memory.length))
    return Offer(
        host=socket.gethostname()[:256] or "unnamed",
        agent_metadata=fabric.metadata(),
        kind=memory.kind,
        address=memory.address,
        length=memory.length,
        seed=seed,
    )


class RegisteredMemory:
    """`length` bytes that are registered with a fabric; `auto`: on GPU 0 if torch sees one, else in the host.

    Raises:
        ReadsFailed: there is no GPU memory.
        FabricUnavailable: host memory could not be registered.
    """

    def __init__(self, fabric: Fabric, device: Device, length: int) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.kind: Kind = "VRAM" if device == "cuda" else "DRAM"
        self.length = length
        try:
            self._bytes = torch.zeros(length, dtype=torch.uint8, device=device)
            self.address = self._bytes.data_ptr()
            fabric.register([Region(self.address, length, MemoryKind(self.kind))])
        # The first is torch's where it was built without CUDA.
        except (AssertionError, RuntimeError, KvferryError) as refused:
            if self.kind == "DRAM":
                raise
            reason = " ".join(str(refused).split())[:_MAX_REASON]
            raise ReadsFailed(
                f"no GPU memory here ({reason}); --device cpu does without"
            ) from None

    def write(self, new: Bytes) -> None:
        """Replace the first bytes."""
        self._bytes[: len(new)].copy_(torch.from_numpy(new))

    def read(self, length: int) -> Bytes:
        """The first bytes; not a copy if they are in the host."""
        read: Bytes = self._bytes[:length].cpu().numpy()
        return read

    def rows(self, address: int, length: int, run_bytes: int) -> DescriptorRows:
        """`length` bytes of such memory at an address, in descriptors of `run_bytes`."""
        row = (address, run_bytes, 0, run_bytes, length // run_bytes)
        return DescriptorRows.from_tuples(MemoryKind(self.kind), [row])


def content(seed: int, length: int) -> Bytes:
    """`length` bytes, a multiple of 8; a prefix of every longer content of the same seed.

    The same on every machine and with every numpy, whose raw streams are fixed.
    """
    words = np.random.PCG64(seed).random_raw(length // 8)
    return words.astype("<u8", copy=False).view(np.uint8)


def count_wrong(read: Bytes, expected: Bytes) -> tuple[int, int]:
    """(bytes that differ, offset of the first of them or -1); the lengths are equal, and multiples of 8."""
    # By words first, since nearly every read is right.
    if np.array_equal(read.view(np.uint64), expected.view(np.uint64)):
        return 0, -1
    differs = read != expected
    return int(np.count_nonzero(differs)), int(np.argmax(differs))


def cases_of(max_bytes: int) -> list[tuple[int, int]]:
    """(bytes, bytes of a descriptor) of reads.

    4 KiB, 16 KiB … up to `max_bytes`, each in one descriptor; those of several runs also scattered.
    """
    cases: list[tuple[int, int]] = []
    num_bytes = MIN_BYTES
    while num_bytes <= max_bytes:
        cases.append((num_bytes, num_bytes))
        if num_bytes > RUN_BYTES:
            cases.append((num_bytes, RUN_BYTES))
        num_bytes *= _STEP
    return cases


class Reader:
    """Reads into its memory, times and compares.

    Args:
        report: called several times a second with what it is doing.
    """

    def __init__(
        self,
        fabric: Fabric,
        memory: RegisteredMemory,
        task: Task,
        report: Callable[[str], None],
    ) -> None:
        self._fabric = fabric
        self._memory = memory
        self._task = task
        self._report = report
        self._reported_s = -math.inf
        self._first_contact_s = 0.0

    def measure(self, offer: Offer) -> Measured:
        """Read what is offered, in every size."""
        memory = self._memory
        if offer.kind != memory.kind:
            raise ReadsFailed(
                f"the listener offers {offer.kind}, this end has {memory.kind}; give both the same --device"
            )
        length = min(memory.length, offer.length) // RUN_BYTES * RUN_BYTES or MIN_BYTES
        expected = content(offer.seed, length)
        cases = cases_of(length)
        if self._task.is_short and len(cases) > 3:
            # The smallest read, for the first contact, and the largest ones.
            cases = [cases[0], *cases[-2:]]
        self._show("first contact")
        started_s = time.perf_counter()
        peer = self._fabric.add_peer(offer.agent_metadata)
        reads: list[CaseResult] = []
        for num_bytes, run_bytes in cases:
            remote = self._fabric.prepare_remote(
                peer, memory.rows(offer.address, length, run_bytes)
            )
            reads.append(self._measure(remote, expected, num_bytes, run_bytes))
            self._fabric.release(remote)
        return Measured(
            listener=offer.host,
            first_contact_ms=(self._first_contact_s - started_s) * 1e3,
            reads=tuple(reads),
        )

    def _measure(
        self,
        remote: RemoteDescriptors,
        expected: Bytes,
        num_bytes: int,
        run_bytes: int,
    ) -> CaseResult:
        """Time the reads of one case, and compare every byte of each.

        Args:
            remote: all of the owner's memory, whose content is expected, in descriptors of `run_bytes`.
        """
        memory = self._memory
        descriptors = num_bytes // run_bytes
        local = self._fabric.prepare_local(
            memory.rows(memory.address, num_bytes, run_bytes)
        )
        sources = np.zeros(1, np.int32)
        if descriptors > 1:
            # Scattered: NIXL would merge descriptors that are neighbours on both sides.
            # The same order in every run, so that runs can be compared.
            order = np.random.default_rng(num_bytes).permutation(remote.count)
            sources = order[:descriptors].astype(np.int32)
        runs = expected[: remote.count * run_bytes].reshape(-1, run_bytes)
        expected = runs[sources].ravel()
        untouched = ~expected
        what = f"a read of {binary_bytes(num_bytes)} of {memory.kind} in {counted(descriptors, 'descriptor')}"
        durations_us: list[float] = []
        num_wrong = 0
        first_wrong = -1
        end_s = time.monotonic() + self._task.seconds
        while len(durations_us) < MAX_READS:
            if len(durations_us) >= MIN_READS and time.monotonic() > end_s:
                break
            self._show(what)
            # Every byte is set wrong before a read, and compared after it. Neither is timed.
            memory.write(untouched)
            durations_us.append(self._read(what, local, remote, sources))
            wrong, offset = count_wrong(memory.read(num_bytes), expected)
            num_wrong += wrong
            if first_wrong < 0:
                first_wrong = offset
        self._fabric.release(local)
        p50_us, p99_us = map(float, np.percentile(durations_us[WARM_UP:], (50, 99)))
        return CaseResult(
            kind=memory.kind,
            num_bytes=num_bytes,
            descriptors=descriptors,
            reads=len(durations_us) - WARM_UP,
            p50_us=p50_us,
            p99_us=p99_us,
            checked=len(durations_us) * num_bytes,
            wrong=num_wrong,
            first_wrong=first_wrong,
            gb_s=num_bytes / p50_us / 1e3,
        )

    def _read(
        self,
        what: str,
        local: LocalDescriptors,
        remote: RemoteDescriptors,
        sources: Indices,
    ) -> float:
        """One read; returns its duration in microseconds."""
        targets = np.arange(len(sources), dtype=np.int32)
        started_s = time.perf_counter()
        transfer = self._fabric.post_read(local, targets, remote, sources)
        # No pauses: those of an engine's transfer thread are not the fabric's.
        while self._fabric.poll(transfer) is not TransferState.DONE:
            if time.perf_counter() - started_s > self._task.timeout_s:
                raise ReadsFailed(
                    f"{what} did not end within {self._task.timeout_s:g} s", late=True
                )
        ended_s = time.perf_counter()
        self._fabric.release(transfer)
        if not self._first_contact_s:
            self._first_contact_s = ended_s
        return (ended_s - started_s) * _US

    def _show(self, what: str) -> None:
        """Report from time to time, which shows that the reader does not hang."""
        now_s = time.monotonic()
        if now_s - self._reported_s > _REPORT_S:
            self._reported_s = now_s
            self._report(what)


if __name__ == "__main__":
    raise SystemExit(main())
