"""Which of NIXL's calls keep the interpreter's lock, and for how long.

While a call runs, another thread counts in Python. It cannot count without the lock: what it counts during the call,
divided by its count in the same time without other load, is the share of the call for which the lock was free.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region

_BYTES = 64 << 20
_DESCRIPTOR = 4096
_SWITCH_S = 1e-5
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class HeldCall:
    """One call: the median of its time, and the share of it for which others could have the lock."""

    name: str
    us: float
    free_share: float


class _Counter:
    """Counts as fast as Python can, on a thread of its own."""

    def __init__(self) -> None:
        self.count = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self.count += 1


@contextmanager
def _counting() -> Iterator[_Counter]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    counter = _Counter()
    try:
        yield counter
    finally:
        counter.close()
        sys.setswitchinterval(before)


def held_calls(repeat: int) -> list[HeldCall]:
    """Each call with as much to do as makes it long enough to be seen."""
    giver, taker = NixlFabric(f"step-giver-{time.time_ns()}"), NixlFabric(f"step-taker-{time.time_ns()}")
    source, target = np.ones(_BYTES, dtype=np.uint8), np.zeros(_BYTES, dtype=np.uint8)
    for fabric, memory in ((giver, source), (taker, target)):
        fabric.register([Region(int(memory.ctypes.data), _BYTES, MemoryKind.DRAM)])
    peer = taker.add_peer(giver.metadata())
    count = _BYTES // _DESCRIPTOR
    rows = [_rows(memory, count) for memory in (target, source)]
    shuffled = np.random.default_rng(1).permutation(count).astype(np.int32)
    local, remote = taker.prepare_local(rows[0]), taker.prepare_remote(peer, rows[1])
    agent, nixl = taker._agent, taker._nixl
    found: list[HeldCall] = []
    with _counting() as counter:
        rate = _free_rate(counter)

        def measure(name: str, call: Callable[[], object], undo: Callable[[object], object] | None = None) -> None:
            times, shares = [], []
            for _ in range(repeat):
                time.sleep(0.002)  # the counter has the lock when the call asks for it
                before, began = counter.count, time.perf_counter()
                result = call()
                took, counted = time.perf_counter() - began, counter.count - before
                times.append(took)
                shares.append(min(1.0, counted / (rate * took)))
                if undo is not None:
                    undo(result)
            found.append(HeldCall(name, float(np.median(times)) * 1e6, float(np.median(shares))))

        def made() -> int:
            return int(agent.makeXferReq(nixl.NIXL_READ, local.raw, shuffled, remote.raw, shuffled))  # type: ignore[attr-defined]

        measure(f"prepXferDlist, {count:,} strided rows", lambda: taker.prepare_local(rows[0]), taker.release)  # type: ignore[arg-type]
        measure(f"makeXferReq, {count:,} scattered", made, agent.releaseXferReq)
        requests = [made() for _ in range(repeat)]
        left = iter(requests)
        measure(f"postXferReq, {count:,} scattered, {_BYTES >> 20} MiB", lambda: agent.postXferReq(next(left)))
        for raw in requests:
            _finish(agent, nixl, raw)
        raw = requests[0]
        measure("getXferStatus × 1,000", lambda: [agent.getXferStatus(raw) for _ in range(1000)])
        measure("getNotifs × 1,000", lambda: [agent.getNotifs({}) for _ in range(1000)])
        back = giver.add_peer(taker.metadata())

        def tell() -> None:
            for _ in range(100):
                giver.notify(back, b"x" * 64)

        measure("genNotif × 100", tell)
        for raw in requests:
            agent.releaseXferReq(raw)
    taker.close()
    giver.close()
    return found


def _rows(memory: np.ndarray, count: int) -> DescriptorRows:
    row = np.array([[int(memory.ctypes.data), _DESCRIPTOR, 0, _DESCRIPTOR, count]], dtype=np.int64)
    return DescriptorRows(MemoryKind.DRAM, row)


def _free_rate(counter: _Counter) -> float:
    """Counts a second while this thread sleeps."""
    before, began = counter.count, time.perf_counter()
    time.sleep(0.2)
    return (counter.count - before) / (time.perf_counter() - began)


def _finish(agent: object, nixl: object, raw: int) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while agent.getXferStatus(raw) != nixl.NIXL_SUCCESS:  # type: ignore[attr-defined]
        if time.monotonic() > end_s:
            raise TimeoutError("a read of this process's own memory does not end")
        time.sleep(0.001)
