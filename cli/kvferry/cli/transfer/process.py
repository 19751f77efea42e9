"""The child process, an owner or a reader: `python -m kvferry.cli.transfer.process`.

Both register memory of known content first. The message that follows makes it an owner, whose memory is read until the
pipe is closed, or a reader, which reads, times and compares: sizes go by powers of four, in one descriptor and in runs
of 16 KiB.
"""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass

import numpy as np

from kvferry.cli.formatting import binary_bytes, counted
from kvferry.cli.transfer.child import Pipe, play
from kvferry.cli.transfer.memory import Bytes, Memory, content, count_wrong, registered_memories, rows_of
from kvferry.cli.transfer.messages import (
    MIN_BYTES,
    Connect,
    Measured,
    Offer,
    OfferedMemory,
    Progress,
    Reads,
    ReadsFailed,
    Task,
)
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
    memories, no_cuda = registered_memories(fabric, task.device, task.max_bytes)
    offered = []
    for memory in memories:
        seed = secrets.randbits(62)
        memory.write(content(seed, memory.length))
        offered.append(OfferedMemory(kind=memory.kind, address=memory.address, length=memory.length, seed=seed))
    mine = Offer(
        host=socket.gethostname()[:256] or "unnamed",
        agent_metadata=fabric.metadata(),
        memories=tuple(offered),
        no_cuda=no_cuda,
    )
    pipe.send(mine)
    asked = pipe.take()
    if isinstance(asked, Offer):
        read_all(pipe, task, fabric, memories, asked)
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


def read_all(pipe: Pipe, task: Task, fabric: Fabric, memories: list[Memory], offer: Offer) -> None:
    """Read each kind of memory that both sides have, and send the results."""
    pairs = [_Pair.of(mine, theirs) for mine in memories for theirs in offer.memories if mine.kind == theirs.kind]
    if not pairs:
        there = ", ".join(theirs.kind for theirs in offer.memories)
        raise ReadsFailed(f"no kind of memory on both sides: the listener has {there}; see --device of both")
    pipe.send(Progress(what="first contact"))
    pipe.send(_Measuring(pipe, task, fabric, offer, pairs).all())


@dataclass(frozen=True, slots=True)
class _Pair:
    """Local and remote memory of one kind, the remote content, and the cases that it has room for."""

    mine: Memory
    theirs: OfferedMemory
    expected: Bytes
    cases: list[tuple[int, int]]

    @classmethod
    def of(cls, mine: Memory, theirs: OfferedMemory) -> _Pair:
        length = min(mine.length, theirs.length) // RUN_BYTES * RUN_BYTES or MIN_BYTES
        return cls(mine, theirs, content(theirs.seed, length), cases_of(length))


class _Measuring:
    """One reader's measurements, in their order."""

    def __init__(self, pipe: Pipe, task: Task, fabric: Fabric, offer: Offer, pairs: list[_Pair]) -> None:
        self._pipe, self._task, self._fabric, self._pairs = pipe, task, fabric, pairs
        self._cases = sum(len(pair.cases) for pair in pairs)
        self._done = 0
        self._reported_s = 0.0
        self._first_contact_ms = 0.0
        self._started_s = time.perf_counter()
        self._peer = fabric.add_peer(offer.agent_metadata)

    def all(self) -> Measured:
        """Every case."""
        reads = []
        for pair in self._pairs:
            for num_bytes, run_bytes in pair.cases:
                reads.append(self._reads(pair, num_bytes, run_bytes))
                self._done += 1
        return Measured(first_contact_ms=self._first_contact_ms, reads=tuple(reads))

    def _reads(self, pair: _Pair, num_bytes: int, run_bytes: int) -> Reads:
        """Time reads. Before each one every byte is set wrong, after it every byte is compared; neither is timed."""
        fabric, kind, descriptors = self._fabric, pair.mine.kind, num_bytes // run_bytes
        total = max(len(pair.expected), run_bytes)
        remote = fabric.prepare_remote(self._peer, rows_of(kind, pair.theirs.address, total, run_bytes))
        local = fabric.prepare_local(rows_of(kind, pair.mine.address, num_bytes, run_bytes))
        # Scattered: NIXL would merge descriptors that are neighbours on both sides.
        order = np.random.default_rng(num_bytes).permutation(total // run_bytes)
        picked = order[:descriptors].astype(np.int32) if descriptors > 1 else np.zeros(1, np.int32)
        targets = np.arange(descriptors, dtype=np.int32)
        expected = pair.expected.reshape(-1, run_bytes)[picked].ravel()
        untouched = ~expected
        what = f"a read of {binary_bytes(num_bytes)} of {kind} in {counted(descriptors, 'descriptor')}"
        taken_s: list[float] = []
        checked: list[tuple[int, int]] = []
        end_s = time.monotonic() + self._task.seconds
        try:
            while len(taken_s) < LEAST or (len(taken_s) < MOST and time.monotonic() <= end_s):
                self._report(what)
                pair.mine.write(untouched)
                started_s = time.perf_counter()
                transfer = fabric.post_read(local, targets, remote, picked)
                # No pauses: those of an engine's transfer thread are not the fabric's.
                while fabric.poll(transfer) is not TransferState.DONE:
                    if time.perf_counter() - started_s > self._task.timeout_s:
                        raise ReadsFailed(f"{what} did not end within {self._task.timeout_s:g} s", late=True)
                ended_s = time.perf_counter()
                fabric.release(transfer)
                self._first_contact_ms = self._first_contact_ms or (ended_s - self._started_s) * 1e3
                taken_s.append(ended_s - started_s)
                checked.append(count_wrong(pair.mine.read(num_bytes), expected))
        finally:
            fabric.release(local)
            fabric.release(remote)
        p50_us, p99_us = np.percentile(taken_s[WARM_UP:], (50, 99)) * _US
        return Reads(
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
            self._pipe.send(Progress(what=what, done=self._done, cases=self._cases))


if __name__ == "__main__":
    raise SystemExit(play(run))
