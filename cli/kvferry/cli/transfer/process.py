"""The child process, an owner or a reader: `python -m kvferry.cli.transfer.process`.

Both have memory that is registered. An owner's is read until its pipe is closed. A reader reads into its own, times and
compares: sizes go by powers of four, in one descriptor and in runs of 16 KiB.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
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
    if task.offer is not None:
        send(pipe, _Reader(pipe, task, task.offer, fabric, memory).measure())
        fabric.close()
        return
    # Another content each time: what an earlier run left in memory must not pass for this one's.
    seed = secrets.randbits(62)
    memory.write(content(seed, memory.length))
    offer = Offer(
        host=socket.gethostname()[:256] or "unnamed",
        agent_metadata=fabric.metadata(),
        kind=memory.kind,
        address=memory.address,
        length=memory.length,
        seed=seed,
    )
    send(pipe, offer)
    # NIXL's own thread serves the reader, until the command closes the pipe: that raises `EOFError`.
    receive(pipe)


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


class _Reader:
    """One reader's measurements, in their order."""

    def __init__(
        self,
        pipe: Connection,
        task: Task,
        offer: Offer,
        fabric: Fabric,
        memory: RegisteredMemory,
    ) -> None:
        if offer.kind != memory.kind:
            raise ReadsFailed(
                f"the listener offers {offer.kind}, this end has {memory.kind}; give both the same --device"
            )
        self._pipe = pipe
        self._task = task
        self._offer = offer
        self._fabric = fabric
        self._memory = memory
        length = min(memory.length, offer.length) // RUN_BYTES * RUN_BYTES or MIN_BYTES
        self._expected = content(offer.seed, length)
        self._reported_s = 0.0
        self._report("first contact")
        self._started_s = time.perf_counter()
        self._first_contact_ms = 0.0
        self._peer = fabric.add_peer(offer.agent_metadata)

    def measure(self) -> Measured:
        """Every case."""
        cases = cases_of(len(self._expected))
        if self._task.is_short and len(cases) > 3:
            # The smallest read, for the first contact, and the largest ones.
            cases = [cases[0], *cases[-2:]]
        reads = tuple(self._measure(*case) for case in cases)
        return Measured(
            listener=self._offer.host,
            first_contact_ms=self._first_contact_ms,
            reads=reads,
        )

    def _measure(self, num_bytes: int, run_bytes: int) -> CaseResult:
        """Time the reads of one case, and compare every byte of each."""
        memory = self._memory
        descriptors = num_bytes // run_bytes
        all_bytes = len(self._expected)
        remote = self._fabric.prepare_remote(
            self._peer, memory.rows(self._offer.address, all_bytes, run_bytes)
        )
        local = self._fabric.prepare_local(
            memory.rows(memory.address, num_bytes, run_bytes)
        )
        sources = np.zeros(1, np.int32)
        if descriptors > 1:
            # Scattered: NIXL would merge descriptors that are neighbours on both sides.
            # The same order in every run, so that runs can be compared.
            order = np.random.default_rng(num_bytes).permutation(all_bytes // run_bytes)
            sources = order[:descriptors].astype(np.int32)
        runs = self._expected[: all_bytes // run_bytes * run_bytes]
        expected = runs.reshape(-1, run_bytes)[sources].ravel()
        untouched = ~expected
        what = f"a read of {binary_bytes(num_bytes)} of {memory.kind} in {counted(descriptors, 'descriptor')}"
        durations_us: list[float] = []
        num_wrong = 0
        first_wrong = -1
        end_s = time.monotonic() + self._task.seconds
        while len(durations_us) < MAX_READS:
            if len(durations_us) >= MIN_READS and time.monotonic() > end_s:
                break
            self._report(what)
            # Every byte is set wrong before a read, and compared after it. Neither is timed.
            memory.write(untouched)
            durations_us.append(self._read(what, local, remote, sources))
            wrong, offset = count_wrong(memory.read(num_bytes), expected)
            num_wrong += wrong
            if first_wrong < 0:
                first_wrong = offset
        self._fabric.release(local)
        self._fabric.release(remote)
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
        if not self._first_contact_ms:
            self._first_contact_ms = (ended_s - self._started_s) * 1e3
        return (ended_s - started_s) * _US

    def _report(self, what: str) -> None:
        """Show from time to time that the reader does not hang."""
        now_s = time.monotonic()
        if now_s - self._reported_s > _REPORT_S:
            self._reported_s = now_s
            send(self._pipe, CaseProgress(what=what))


if __name__ == "__main__":
    raise SystemExit(main())
