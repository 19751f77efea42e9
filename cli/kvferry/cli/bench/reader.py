"""The child of a client: reads, times and compares. `python -m kvferry.cli.bench.reader`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.cli.bench.cases import RUN_BYTES, Bytes, Case, cases_of, content, count_wrong
from kvferry.cli.bench.memory import Memory, registered_memories, rows_of
from kvferry.cli.bench.messages import (
    MIN_BYTES,
    BenchFailed,
    Done,
    Echoes,
    FirstContact,
    Offer,
    OfferedMemory,
    Progress,
    Reads,
    Ready,
    Task,
)
from kvferry.cli.bench.pipe import Pipe, play
from kvferry.cli.formatting import binary_bytes
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric, Indices, LocalDescriptors, PeerAgent, RemoteDescriptors, TransferState

WARM_UP = 3
LEAST = 5
MOST = 5000
ECHO_BYTES = 16
_SAY_S = 0.25
_US = 1e6


def read_all(pipe: Pipe) -> None:
    """Read each kind of memory that both sides have, and send the results."""
    task = pipe.take()
    if not isinstance(task, Task):
        return
    fabric = NixlFabric(f"kvferry-bench-reader-{secrets.token_hex(8)}")
    # Before memory is registered: the owner needs the address for notifications only.
    metadata = fabric.metadata()
    memories, no_cuda = registered_memories(fabric, task.device, task.max_bytes)
    pipe.tell(Ready(agent_metadata=metadata, no_cuda=no_cuda))
    offer = pipe.take()
    if isinstance(offer, Offer):
        _Measuring(pipe, task, fabric, offer, memories).all()
        pipe.tell(Done())
        fabric.close()


@dataclass(frozen=True, slots=True)
class _Pair:
    """Local and remote memory of one kind, and the remote content."""

    mine: Memory
    theirs: OfferedMemory
    expected: Bytes


class _Measuring:
    """One client's measurements, in their order."""

    def __init__(self, pipe: Pipe, task: Task, fabric: Fabric, offer: Offer, memories: list[Memory]) -> None:
        self._pipe, self._task, self._fabric = pipe, task, fabric
        self._said_s = 0.0
        self._done = 0
        self._pairs: dict[str, _Pair] = {}
        self._cases: list[Case] = []
        for mine in memories:
            for theirs in offer.memories:
                if mine.kind == theirs.kind:
                    length = min(mine.length, theirs.length) // RUN_BYTES * RUN_BYTES or MIN_BYTES
                    self._pairs[mine.kind] = _Pair(mine, theirs, content(theirs.seed, length))
                    self._cases += cases_of(mine.kind, length)
        if not self._cases:
            there = ", ".join(theirs.kind for theirs in offer.memories)
            raise BenchFailed(f"no kind of memory on both sides: the listener has {there}; see --device of both")
        self._offer = offer

    def all(self) -> None:
        """First contact, every case, notifications."""
        started_s = time.perf_counter()
        self._print("first contact")
        peer = self._fabric.add_peer(self._offer.agent_metadata)
        smallest = self._cases[0]
        self._measure(peer, smallest, self._one_read)
        self._pipe.tell(FirstContact(ms=(time.perf_counter() - started_s) * 1e3))
        for case in self._cases:
            self._pipe.tell(self._measure(peer, case, self._many_reads))
            self._done += 1
        self._pipe.tell(self._echoes(peer))

    def _measure(
        self, peer: PeerAgent, case: Case, reading: Callable[[Case, Bytes, Callable[[], float]], Reads]
    ) -> Reads:
        pair = self._pairs[case.kind]
        total = max(len(pair.expected), case.run_bytes)
        there = rows_of(case.kind, pair.theirs.address, total, case.run_bytes)
        here = rows_of(case.kind, pair.mine.address, case.num_bytes, case.run_bytes)
        remote, local = self._fabric.prepare_remote(peer, there), self._fabric.prepare_local(here)
        # Scattered: NIXL would merge descriptors that are neighbours on both sides.
        order = np.random.default_rng(case.num_bytes).permutation(total // case.run_bytes)
        picked = order[: case.descriptors].astype(np.int32)
        if case.descriptors == 1:
            picked[:] = 0
        expected = pair.expected.reshape(-1, case.run_bytes)[picked].ravel()
        landing = np.arange(case.descriptors, dtype=np.int32)
        try:
            return reading(case, expected, lambda: self._read_once(case, local, landing, remote, picked))
        finally:
            self._fabric.release(local)
            self._fabric.release(remote)

    def _one_read(self, case: Case, expected: Bytes, read: Callable[[], float]) -> Reads:
        return self._checked(case, expected, read, warm_up=0, enough=lambda reads: True)

    def _many_reads(self, case: Case, expected: Bytes, read: Callable[[], float]) -> Reads:
        end_s = time.monotonic() + self._task.seconds
        return self._checked(
            case, expected, read, WARM_UP, lambda reads: reads >= MOST or (reads >= LEAST and time.monotonic() > end_s)
        )

    def _checked(
        self, case: Case, expected: Bytes, read: Callable[[], float], warm_up: int, enough: Callable[[int], bool]
    ) -> Reads:
        """Time reads. Before each one every byte is set wrong, after it every byte is compared; neither is timed."""
        mine, untouched = self._pairs[case.kind].mine, ~expected
        taken_s: list[float] = []
        checked = wrong = 0
        first_wrong = -1
        while not taken_s or not enough(len(taken_s)):
            self._print(f"{case.kind} {binary_bytes(case.num_bytes)} × {case.descriptors}")
            mine.write(untouched)
            took_s = read()
            bad, first = count_wrong(mine.read(case.num_bytes), expected)
            first_wrong = first if first_wrong < 0 else first_wrong
            wrong += bad
            checked += case.num_bytes
            if checked > warm_up * case.num_bytes:
                taken_s.append(took_s)
        p50_us, p99_us = np.percentile(taken_s, (50, 99)) * _US
        return Reads(
            kind=case.kind,
            num_bytes=case.num_bytes,
            descriptors=case.descriptors,
            reads=len(taken_s),
            p50_us=float(p50_us),
            p99_us=float(p99_us),
            checked=checked,
            wrong=wrong,
            first_wrong=first_wrong,
        )

    def _read_once(
        self, case: Case, local: LocalDescriptors, landing: Indices, remote: RemoteDescriptors, picked: Indices
    ) -> float:
        """Seconds of one read. Polls without pauses: those of an engine's transfer thread are not the fabric's."""
        started_s = time.perf_counter()
        transfer = self._fabric.post_read(local, landing, remote, picked)
        while self._fabric.poll(transfer) is not TransferState.DONE:
            if time.perf_counter() - started_s > self._task.timeout_s:
                what = f"{binary_bytes(case.num_bytes)} of {case.kind} in {case.descriptors} descriptors"
                raise BenchFailed(f"a read of {what} did not end within {self._task.timeout_s:g} s")
        took_s = time.perf_counter() - started_s
        self._fabric.release(transfer)
        return took_s

    def _echoes(self, peer: PeerAgent) -> Echoes:
        taken_s: list[float] = []
        end_s = time.monotonic() + self._task.seconds
        for number in range(MOST):
            self._print("notifications")
            took_s = self._one_echo(peer, number.to_bytes(ECHO_BYTES, "little"))
            if number >= WARM_UP:
                taken_s.append(took_s)
            if len(taken_s) >= LEAST and time.monotonic() > end_s:
                break
        p50_us, p99_us = np.percentile(taken_s, (50, 99)) * _US
        return Echoes(reads=len(taken_s), p50_us=float(p50_us), p99_us=float(p99_us))

    def _one_echo(self, peer: PeerAgent, message: bytes) -> float:
        started_s = time.perf_counter()
        self._fabric.notify(peer, message)
        while (peer, message) not in self._fabric.take_notifications():
            if time.perf_counter() - started_s > self._task.timeout_s:
                raise BenchFailed(f"a notification did not come back within {self._task.timeout_s:g} s")
        return time.perf_counter() - started_s

    def _print(self, what: str) -> None:
        """Send the progress at most every `_SAY_S`: it shows that the reader does not hang, and costs little."""
        now_s = time.monotonic()
        if now_s - self._said_s > _SAY_S:
            self._said_s = now_s
            self._pipe.tell(Progress(what=what, done=self._done, cases=len(self._cases)))


if __name__ == "__main__":
    raise SystemExit(play(read_all))
