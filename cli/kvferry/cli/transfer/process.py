"""The child process, an owner or a reader: `python -m kvferry.cli.transfer.process`.

Both register memory of known content first. The message that follows makes it an owner, whose memory is read until the
pipe is closed, or a reader, which reads, times and compares: sizes go by powers of four, in one descriptor and in runs
of 16 KiB.
"""

from __future__ import annotations

import secrets
import socket
import time

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cli.formatting import binary_bytes
from kvferry.cli.transfer.child import Pipe, play
from kvferry.cli.transfer.messages import (
    MIN_BYTES,
    CaseProgress,
    CaseResult,
    Connect,
    Device,
    Kind,
    Measured,
    ReadableAgent,
    ReadsFailed,
    Task,
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
# Reads of a case that are not counted.
WARM_UP = 3
MIN_READS = WARM_UP + 5
MAX_READS = WARM_UP + 5000
_STEP = 4
_REPORT_S = 0.25
_US = 1e6
_MAX_REASON = 400

Bytes = npt.NDArray[np.uint8]


def run(pipe: Pipe) -> None:
    """Offer memory, then read or be read until the command closes the pipe."""
    task = pipe.take()
    if not isinstance(task, Task):
        return
    fabric = NixlFabric(f"kvferry-bench-{secrets.token_hex(8)}")
    memory = registered_memory(fabric, task.device, task.max_bytes)
    # Another content each time: what an earlier run left in memory must not pass for this one's.
    seed = secrets.randbits(62)
    memory.write(content(seed, memory.length))
    # A reader sends one too: the owner needs its agent's metadata, which is part of it.
    offer = ReadableAgent(
        host=socket.gethostname()[:256] or "unnamed",
        agent_metadata=fabric.metadata(),
        kind=memory.kind,
        address=memory.address,
        length=memory.length,
        seed=seed,
    )
    pipe.send(offer)
    message = pipe.take()
    if isinstance(message, ReadableAgent):
        if message.kind != memory.kind:
            raise ReadsFailed(
                f"the listener offers {message.kind}, this end has {memory.kind}; give both the same --device"
            )
        pipe.send(CaseProgress(what="first contact"))
        reader = _Reader(pipe, task, fabric, memory, message)
        pipe.send(reader.measure())
    elif isinstance(message, Connect):
        fabric.add_peer(message.agent_metadata)
        # NIXL's own thread serves the reader, until the command closes the pipe: that raises `EOFError`.
        pipe.take()
    fabric.close()


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
        pipe: Pipe,
        task: Task,
        fabric: Fabric,
        mine: RegisteredMemory,
        theirs: ReadableAgent,
    ) -> None:
        self._pipe = pipe
        self._task = task
        self._fabric = fabric
        self._mine = mine
        self._theirs = theirs
        length = min(mine.length, theirs.length) // RUN_BYTES * RUN_BYTES or MIN_BYTES
        self._expected = content(theirs.seed, length)
        self._cases = cases_of(length)
        if task.is_short and len(self._cases) > 3:
            # The smallest read, for the first contact, and the largest ones.
            self._cases = [self._cases[0], *self._cases[-2:]]
        self._reported_s = 0.0
        self._first_contact_ms = 0.0
        self._started_s = time.perf_counter()
        self._peer = fabric.add_peer(theirs.agent_metadata)

    def measure(self) -> Measured:
        """Every case."""
        reads = tuple(
            self._measure(num_bytes, run_bytes) for num_bytes, run_bytes in self._cases
        )
        return Measured(first_contact_ms=self._first_contact_ms, reads=reads)

    def _measure(self, num_bytes: int, run_bytes: int) -> CaseResult:
        """Time the reads of one case, and compare every byte of each."""
        fabric = self._fabric
        kind = self._mine.kind
        descriptors = num_bytes // run_bytes
        all_bytes = max(len(self._expected), run_bytes)
        remote = fabric.prepare_remote(
            self._peer, rows_of(kind, self._theirs.address, all_bytes, run_bytes)
        )
        local = fabric.prepare_local(
            rows_of(kind, self._mine.address, num_bytes, run_bytes)
        )
        sources = np.zeros(1, np.int32)
        if descriptors > 1:
            # Scattered: NIXL would merge descriptors that are neighbours on both sides.
            # The same order in every run, so that runs can be compared.
            order = np.random.default_rng(num_bytes).permutation(all_bytes // run_bytes)
            sources = order[:descriptors].astype(np.int32)
        targets = np.arange(descriptors, dtype=np.int32)
        expected = self._expected.reshape(-1, run_bytes)[sources].ravel()
        untouched = ~expected
        what = f"a read of {binary_bytes(num_bytes)} of {kind} in {counted(descriptors, 'descriptor')}"
        durations_s: list[float] = []
        num_wrong = 0
        first_wrong = -1
        end_s = time.monotonic() + self._task.seconds
        try:
            while len(durations_s) < MAX_READS:
                if len(durations_s) >= MIN_READS and time.monotonic() > end_s:
                    break
                self._report(what)
                # Every byte is set wrong before a read, and compared after it. Neither is timed.
                self._mine.write(untouched)
                durations_s.append(self._read(what, local, targets, remote, sources))
                wrong, offset = count_wrong(self._mine.read(num_bytes), expected)
                num_wrong += wrong
                if first_wrong < 0:
                    first_wrong = offset
        finally:
            fabric.release(local)
            fabric.release(remote)
        # The first reads set up lanes and registrations.
        p50_us, p99_us = np.percentile(durations_s[WARM_UP:], (50, 99)) * _US
        return CaseResult(
            kind=kind,
            num_bytes=num_bytes,
            descriptors=descriptors,
            reads=len(durations_s) - WARM_UP,
            p50_us=float(p50_us),
            p99_us=float(p99_us),
            checked=len(durations_s) * num_bytes,
            wrong=num_wrong,
            first_wrong=first_wrong,
        )

    def _read(
        self,
        what: str,
        local: LocalDescriptors,
        targets: Indices,
        remote: RemoteDescriptors,
        sources: Indices,
    ) -> float:
        """One read; returns its duration in seconds."""
        fabric = self._fabric
        started_s = time.perf_counter()
        transfer = fabric.post_read(local, targets, remote, sources)
        # No pauses: those of an engine's transfer thread are not the fabric's.
        while fabric.poll(transfer) is not TransferState.DONE:
            if time.perf_counter() - started_s > self._task.timeout_s:
                raise ReadsFailed(
                    f"{what} did not end within {self._task.timeout_s:g} s", late=True
                )
        ended_s = time.perf_counter()
        fabric.release(transfer)
        if not self._first_contact_ms:
            self._first_contact_ms = (ended_s - self._started_s) * 1e3
        return ended_s - started_s

    def _report(self, what: str) -> None:
        """Show from time to time that the reader does not hang."""
        now_s = time.monotonic()
        if now_s - self._reported_s > _REPORT_S:
            self._reported_s = now_s
            self._pipe.send(CaseProgress(what=what))


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


class RegisteredMemory:
    """`length` bytes that are registered with a fabric.

    Raises:
        FabricUnavailable: they cannot be registered.
        RuntimeError: torch cannot allocate them.
    """

    def __init__(self, fabric: Fabric, kind: Kind, length: int) -> None:
        device = "cuda:0" if kind == "VRAM" else "cpu"
        self._bytes = torch.zeros(length, dtype=torch.uint8, device=device)
        self.kind = kind
        self.length = length
        self.address = self._bytes.data_ptr()
        fabric.register([Region(self.address, length, MemoryKind(kind))])

    def write(self, new: Bytes) -> None:
        """Replace the first bytes."""
        self._bytes[: len(new)].copy_(torch.from_numpy(new))

    def read(self, length: int) -> Bytes:
        """The first bytes; not a copy if they are in the host."""
        read: Bytes = self._bytes[:length].cpu().numpy()
        return read


def registered_memory(fabric: Fabric, device: Device, length: int) -> RegisteredMemory:
    """Registered memory; `auto`: on GPU 0 if torch sees one, else in the host.

    Raises:
        ReadsFailed: there is no GPU memory.
        FabricUnavailable: host memory could not be registered.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not has_gpu):
        return RegisteredMemory(fabric, "DRAM", length)
    if not has_gpu:
        raise _no_gpu_memory(f"torch {torch.__version__} sees no CUDA device")
    try:
        return RegisteredMemory(fabric, "VRAM", length)
    except (RuntimeError, KvferryError) as refused:
        raise _no_gpu_memory(str(refused)) from None


def _no_gpu_memory(why: str) -> ReadsFailed:
    reason = " ".join(why.split())[:_MAX_REASON]
    return ReadsFailed(f"no GPU memory here ({reason}); --device cpu does without")


def rows_of(kind: Kind, address: int, length: int, run_bytes: int) -> DescriptorRows:
    """`length` bytes at an address, in descriptors of `run_bytes`."""
    row = (address, run_bytes, 0, run_bytes, length // run_bytes)
    return DescriptorRows.from_tuples(MemoryKind(kind), [row])


if __name__ == "__main__":
    raise SystemExit(play(run))
