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

from kvferry.cli.formatting import binary_bytes
from kvferry.cli.transfer.child import Pipe, play
from kvferry.cli.transfer.memory import (
    RegisteredMemory,
    content,
    count_wrong,
    registered_memory,
    rows_of,
)
from kvferry.cli.transfer.messages import (
    MIN_BYTES,
    CaseProgress,
    CaseResult,
    Connect,
    Measured,
    ReadableAgent,
    ReadsFailed,
    Task,
)
from kvferry.plan.wording import counted
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric, TransferState

RUN_BYTES = 16 << 10
"""The published knee: shorter descriptors are slow. Also the block of one head in many caches."""
WARM_UP = 3
LEAST = WARM_UP + 5
MOST = WARM_UP + 5000
_STEP = 4
_REPORT_S = 0.25
_US = 1e6


def run(pipe: Pipe) -> None:
    """Offer memory, then read or be read until the command closes the pipe."""
    task = pipe.take()
    if not isinstance(task, Task):
        return
    fabric = NixlFabric(f"kvferry-bench-{secrets.token_hex(8)}")
    memory, seed = registered_memory(fabric, task.device, task.max_bytes), secrets.randbits(62)
    memory.write(content(seed, memory.length))
    mine = ReadableAgent(
        host=socket.gethostname()[:256] or "unnamed",
        agent_metadata=fabric.metadata(),
        kind=memory.kind,
        address=memory.address,
        length=memory.length,
        seed=seed,
    )
    pipe.send(mine)
    asked = pipe.take()
    if isinstance(asked, ReadableAgent):
        if asked.kind != memory.kind:
            raise ReadsFailed(
                f"the listener offers {asked.kind}, and here is {memory.kind}; see --device of both"
            )
        pipe.send(CaseProgress(what="first contact"))
        pipe.send(_Reader(pipe, task, fabric, memory, asked).measure())
    elif isinstance(asked, Connect):
        fabric.add_peer(asked.agent_metadata)
        pipe.take()  # until the command closes it, which raises `EOFError`; NIXL's own thread serves the reader
    fabric.close()


def cases_of(max_bytes: int) -> list[tuple[int, int]]:
    """(bytes, bytes of a descriptor) of reads: 4 KiB, 16 KiB … up to `max_bytes`, each in one descriptor; those of
    several runs also scattered."""
    found: list[tuple[int, int]] = []
    num_bytes = MIN_BYTES
    while num_bytes <= max_bytes:
        found.append((num_bytes, num_bytes))
        if num_bytes > RUN_BYTES:
            found.append((num_bytes, RUN_BYTES))
        num_bytes *= _STEP
    return found


class _Reader:
    """One reader's measurements, in their order."""

    def __init__(
        self, pipe: Pipe, task: Task, fabric: Fabric, mine: RegisteredMemory, theirs: ReadableAgent
    ) -> None:
        self._pipe, self._task, self._fabric, self._mine, self._theirs = (
            pipe,
            task,
            fabric,
            mine,
            theirs,
        )
        length = min(mine.length, theirs.length) // RUN_BYTES * RUN_BYTES or MIN_BYTES
        self._expected, cases = content(theirs.seed, length), cases_of(length)
        self._cases = [cases[0], *cases[-2:]] if task.is_short and len(cases) > 3 else cases
        self._reported_s = 0.0
        self._first_contact_ms = 0.0
        self._started_s = time.perf_counter()
        self._peer = fabric.add_peer(theirs.agent_metadata)

    def measure(self) -> Measured:
        """Every case."""
        reads = tuple(self._reads(num_bytes, run_bytes) for num_bytes, run_bytes in self._cases)
        return Measured(first_contact_ms=self._first_contact_ms, reads=reads)

    def _reads(self, num_bytes: int, run_bytes: int) -> CaseResult:
        """Time reads. Before each one every byte is set wrong, after it every byte is compared; neither is timed."""
        fabric, mine, kind, descriptors = (
            self._fabric,
            self._mine,
            self._mine.kind,
            num_bytes // run_bytes,
        )
        total = max(len(self._expected), run_bytes)
        remote = fabric.prepare_remote(
            self._peer, rows_of(kind, self._theirs.address, total, run_bytes)
        )
        local = fabric.prepare_local(rows_of(kind, mine.address, num_bytes, run_bytes))
        # Scattered: NIXL would merge descriptors that are neighbours on both sides.
        order = np.random.default_rng(num_bytes).permutation(total // run_bytes)
        picked = order[:descriptors].astype(np.int32) if descriptors > 1 else np.zeros(1, np.int32)
        targets = np.arange(descriptors, dtype=np.int32)
        expected = self._expected.reshape(-1, run_bytes)[picked].ravel()
        untouched = ~expected
        what = (
            f"a read of {binary_bytes(num_bytes)} of {kind} in {counted(descriptors, 'descriptor')}"
        )
        taken_s: list[float] = []
        checked: list[tuple[int, int]] = []
        end_s = time.monotonic() + self._task.seconds
        try:
            while len(taken_s) < LEAST or (len(taken_s) < MOST and time.monotonic() <= end_s):
                self._report(what)
                mine.write(untouched)
                started_s = time.perf_counter()
                transfer = fabric.post_read(local, targets, remote, picked)
                # No pauses: those of an engine's transfer thread are not the fabric's.
                while fabric.poll(transfer) is not TransferState.DONE:
                    if time.perf_counter() - started_s > self._task.timeout_s:
                        raise ReadsFailed(
                            f"{what} did not end within {self._task.timeout_s:g} s", late=True
                        )
                ended_s = time.perf_counter()
                fabric.release(transfer)
                self._first_contact_ms = self._first_contact_ms or (ended_s - self._started_s) * 1e3
                taken_s.append(ended_s - started_s)
                checked.append(count_wrong(mine.read(num_bytes), expected))
        finally:
            fabric.release(local)
            fabric.release(remote)
        p50_us, p99_us = np.percentile(taken_s[WARM_UP:], (50, 99)) * _US
        return CaseResult(
            kind=kind,
            num_bytes=num_bytes,
            descriptors=descriptors,
            reads=len(taken_s) - WARM_UP,
            p50_us=float(p50_us),
            p99_us=float(p99_us),
            checked=len(checked) * num_bytes,
            wrong=sum(wrong for wrong, _ in checked),
            first_wrong=next((first_wrong for _, first_wrong in checked if first_wrong >= 0), -1),
        )

    def _report(self, what: str) -> None:
        """Show from time to time that the reader does not hang."""
        now_s = time.monotonic()
        if now_s - self._reported_s > _REPORT_S:
            self._reported_s = now_s
            self._pipe.send(CaseProgress(what=what))


if __name__ == "__main__":
    raise SystemExit(play(run))
