"""A reader: it reads, times and compares.

Sizes go by powers of four, in one descriptor and in runs of 16 KiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.cli.formatting import binary_bytes, counted
from kvferry.cli.transfer.child import Pipe
from kvferry.cli.transfer.memory import Bytes, Memory, content, count_wrong, rows_of
from kvferry.cli.transfer.messages import (
    MIN_BYTES,
    Echoes,
    Measured,
    Offer,
    OfferedMemory,
    Progress,
    Reads,
    ReadsFailed,
    Task,
)
from kvferry.worker.fabric.port import Fabric, TransferState

RUN_BYTES = 16 << 10
"""The published knee: shorter descriptors are slow. Also the block of one head in many caches."""
WARM_UP = 3
LEAST = 5
MOST = 5000
ECHO_BYTES = 16
_STEP = 4
_REPORT_S = 0.25
_US = 1e6


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
        """Every case, then notifications."""
        reads = []
        for pair in self._pairs:
            for num_bytes, run_bytes in pair.cases:
                reads.append(self._reads(pair, num_bytes, run_bytes))
                self._done += 1
        echoes, p50_us, p99_us = self._timed("notifications", self._echo)
        return Measured(
            first_contact_ms=self._first_contact_ms,
            reads=tuple(reads),
            notifications=Echoes(reads=echoes, p50_us=p50_us, p99_us=p99_us),
        )

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
        checked: list[tuple[int, int]] = []

        def read(_: int) -> float:
            pair.mine.write(untouched)
            started_s = time.perf_counter()
            transfer = fabric.post_read(local, targets, remote, picked)
            # No pauses: those of an engine's transfer thread are not the fabric's.
            while fabric.poll(transfer) is not TransferState.DONE:
                self._check_deadline(what, started_s)
            ended_s = time.perf_counter()
            fabric.release(transfer)
            self._first_contact_ms = self._first_contact_ms or (ended_s - self._started_s) * 1e3
            checked.append(count_wrong(pair.mine.read(num_bytes), expected))
            return ended_s - started_s

        try:
            reads, p50_us, p99_us = self._timed(what, read)
        finally:
            fabric.release(local)
            fabric.release(remote)
        return Reads(
            kind=kind,
            num_bytes=num_bytes,
            descriptors=descriptors,
            reads=reads,
            p50_us=p50_us,
            p99_us=p99_us,
            checked=len(checked) * num_bytes,
            wrong=sum(wrong for wrong, _ in checked),
            first_wrong=next((first_wrong for _, first_wrong in checked if first_wrong >= 0), -1),
        )

    def _timed(self, what: str, once: Callable[[int], float]) -> tuple[int, float, float]:
        """(number of timed calls, their p50 and p99 in µs) of calls that return seconds."""
        taken_s: list[float] = []
        end_s = time.monotonic() + self._task.seconds
        for number in range(WARM_UP + MOST):
            now_s = time.monotonic()
            if number >= WARM_UP + LEAST and now_s > end_s:
                break
            if now_s - self._reported_s > _REPORT_S:  # shows that the reader does not hang, and costs little
                self._reported_s = now_s
                self._pipe.send(Progress(what=what, done=self._done, cases=self._cases))
            taken_s.append(once(number))
        timed_s = taken_s[WARM_UP:]
        p50_us, p99_us = np.percentile(timed_s, (50, 99)) * _US
        return len(timed_s), float(p50_us), float(p99_us)

    def _echo(self, number: int) -> float:
        message = (self._peer, number.to_bytes(ECHO_BYTES, "little"))
        started_s = time.perf_counter()
        self._fabric.notify(*message)
        while message not in self._fabric.take_notifications():
            self._check_deadline("a round trip of notifications", started_s)
        return time.perf_counter() - started_s

    def _check_deadline(self, what: str, started_s: float) -> None:
        if time.perf_counter() - started_s > self._task.timeout_s:
            raise ReadsFailed(f"{what} did not end within {self._task.timeout_s:g} s", late=True)
