"""A reader: it reads, times and compares.

Sizes go by powers of four, in one descriptor and in runs of 16 KiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.cli.formatting import binary_bytes
from kvferry.cli.transfer.child import Pipe
from kvferry.cli.transfer.memory import Bytes, Memory, content, count_wrong, rows_of
from kvferry.cli.transfer.messages import (
    MIN_BYTES,
    Echoes,
    Kind,
    Measured,
    Offer,
    OfferedMemory,
    Progress,
    Reads,
    ReadsFailed,
    Task,
)
from kvferry.worker.fabric.port import Fabric, PeerAgent, TransferState

RUN_BYTES = 16 << 10
"""The published knee: shorter descriptors are slow. Also the block of one head in many caches."""
WARM_UP = 3
LEAST = 5
MOST = 5000
ECHO_BYTES = 16
_STEP = 4
_SAY_S = 0.25
_US = 1e6


@dataclass(frozen=True, slots=True)
class Case:
    """Reads of `num_bytes` in descriptors of `run_bytes`."""

    kind: Kind
    num_bytes: int
    run_bytes: int

    @property
    def descriptors(self) -> int:
        """The number of descriptors of one read."""
        return self.num_bytes // self.run_bytes


def cases_of(kind: Kind, max_bytes: int) -> list[Case]:
    """4 KiB, 16 KiB … up to `max_bytes`: each in one descriptor; those of several runs also scattered."""
    found: list[Case] = []
    num_bytes = MIN_BYTES
    while num_bytes <= max_bytes:
        found.append(Case(kind, num_bytes, num_bytes))
        if num_bytes > RUN_BYTES:
            found.append(Case(kind, num_bytes, RUN_BYTES))
        num_bytes *= _STEP
    return found


def read_all(pipe: Pipe, task: Task, fabric: Fabric, memories: list[Memory], offer: Offer) -> None:
    """Read each kind of memory that both sides have, and send the results."""
    pairs = [_Pair.of(mine, theirs) for mine in memories for theirs in offer.memories if mine.kind == theirs.kind]
    if not pairs:
        there = ", ".join(theirs.kind for theirs in offer.memories)
        raise ReadsFailed(f"no kind of memory on both sides: the listener has {there}; see --device of both")
    started_s = time.perf_counter()
    pipe.send(Progress(what="first contact"))
    peer = fabric.add_peer(offer.agent_metadata)
    pipe.send(_Measuring(pipe, task, fabric, peer, pairs).all(started_s))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Local and remote memory of one kind, the remote content, and the cases that it has room for."""

    mine: Memory
    theirs: OfferedMemory
    expected: Bytes
    cases: list[Case]

    @classmethod
    def of(cls, mine: Memory, theirs: OfferedMemory) -> _Pair:
        length = min(mine.length, theirs.length) // RUN_BYTES * RUN_BYTES or MIN_BYTES
        return cls(mine, theirs, content(theirs.seed, length), cases_of(mine.kind, length))


class _Measuring:
    """One reader's measurements, in their order."""

    def __init__(self, pipe: Pipe, task: Task, fabric: Fabric, peer: PeerAgent, pairs: list[_Pair]) -> None:
        self._pipe, self._task, self._fabric, self._peer, self._pairs = pipe, task, fabric, peer, pairs
        self._cases = sum(len(pair.cases) for pair in pairs)
        self._done = 0
        self._said_s = 0.0

    def all(self, started_s: float) -> Measured:
        """First contact, every case, notifications."""
        self._reads(self._pairs[0], self._pairs[0].cases[0], first=True)
        first_contact_ms = (time.perf_counter() - started_s) * 1e3
        reads = []
        for pair in self._pairs:
            for case in pair.cases:
                reads.append(self._reads(pair, case))
                self._done += 1
        echoes, p50_us, p99_us = self._timed("notifications", self._echo)
        return Measured(
            first_contact_ms=first_contact_ms,
            reads=tuple(reads),
            notifications=Echoes(reads=echoes, p50_us=p50_us, p99_us=p99_us),
        )

    def _reads(self, pair: _Pair, case: Case, *, first: bool = False) -> Reads:
        """Time reads. Before each one every byte is set wrong, after it every byte is compared; neither is timed."""
        fabric, total = self._fabric, max(len(pair.expected), case.run_bytes)
        remote = fabric.prepare_remote(self._peer, rows_of(case.kind, pair.theirs.address, total, case.run_bytes))
        local = fabric.prepare_local(rows_of(case.kind, pair.mine.address, case.num_bytes, case.run_bytes))
        # Scattered: NIXL would merge descriptors that are neighbours on both sides.
        order = np.random.default_rng(case.num_bytes).permutation(total // case.run_bytes)
        picked = order[: case.descriptors].astype(np.int32) if case.descriptors > 1 else np.zeros(1, np.int32)
        targets = np.arange(case.descriptors, dtype=np.int32)
        expected = pair.expected.reshape(-1, case.run_bytes)[picked].ravel()
        untouched = ~expected
        what = f"{binary_bytes(case.num_bytes)} of {case.kind} in {case.descriptors} descriptors"
        checked: list[tuple[int, int]] = []

        def read(_: int) -> float:
            pair.mine.write(untouched)
            started_s = time.perf_counter()
            transfer = fabric.post_read(local, targets, remote, picked)
            # No pauses: those of an engine's transfer thread are not the fabric's.
            self._wait(lambda: fabric.poll(transfer) is TransferState.DONE, f"a read of {what}", started_s)
            took_s = time.perf_counter() - started_s
            fabric.release(transfer)
            checked.append(count_wrong(pair.mine.read(case.num_bytes), expected))
            return took_s

        try:
            reads, p50_us, p99_us = self._timed(what, read, first=first)
        finally:
            fabric.release(local)
            fabric.release(remote)
        return Reads(
            kind=case.kind,
            num_bytes=case.num_bytes,
            descriptors=case.descriptors,
            reads=reads,
            p50_us=p50_us,
            p99_us=p99_us,
            checked=len(checked) * case.num_bytes,
            wrong=sum(wrong for wrong, _ in checked),
            first_wrong=next((first_wrong for _, first_wrong in checked if first_wrong >= 0), -1),
        )

    def _timed(self, what: str, once: Callable[[int], float], *, first: bool = False) -> tuple[int, float, float]:
        """(number of timed calls, p50 and p99 in µs) of calls that return seconds; only one if it is the `first`."""
        taken_s: list[float] = []
        end_s = time.monotonic() + self._task.seconds
        for number in range(1 if first else WARM_UP + MOST):
            now_s = time.monotonic()
            if number >= WARM_UP + LEAST and now_s > end_s:
                break
            if now_s - self._said_s > _SAY_S:  # shows that the reader does not hang, and costs little
                self._said_s = now_s
                self._pipe.send(Progress(what=what, done=self._done, cases=self._cases))
            taken_s.append(once(number))
        timed_s = taken_s[0 if first else WARM_UP :]
        p50_us, p99_us = np.percentile(timed_s, (50, 99)) * _US
        return len(timed_s), float(p50_us), float(p99_us)

    def _echo(self, number: int) -> float:
        message = (self._peer, number.to_bytes(ECHO_BYTES, "little"))
        started_s = time.perf_counter()
        self._fabric.notify(*message)
        self._wait(lambda: message in self._fabric.take_notifications(), "a round trip of notifications", started_s)
        return time.perf_counter() - started_s

    def _wait(self, is_done: Callable[[], bool], what: str, started_s: float) -> None:
        while not is_done():
            if time.perf_counter() - started_s > self._task.timeout_s:
                raise ReadsFailed(f"{what} did not end within {self._task.timeout_s:g} s", late=True)
