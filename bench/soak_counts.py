"""Counts of a soak: requests by outcome, faults, violations, and resources of its process."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.soak_schedule import Fault

_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVERY_S = 5.0


@dataclass
class Counts:
    """Attributes:
    outcomes: of requests, in words.
    by_fault: of requests with a fault, by fault and outcome.
    loads: of loads, by how they ended: `loaded`, or the reason for which they failed, …
    violations: what must never happen, in words.
    checked_bytes: of good loads, compared one by one.
    streamed: loads of prompts that were being computed when their consumer asked.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    by_fault: Counter[tuple[Fault, str]] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    checked_bytes: int = 0
    streamed: int = 0

    def over(self, fault: Fault | None, outcome: str) -> None:
        """A request has ended."""
        self.outcomes[outcome] += 1
        if fault is not None:
            self.by_fault[fault, outcome] += 1

    @property
    def requests(self) -> int:
        return self.outcomes.total()


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of the process at one moment, after a garbage collection.

    Attributes:
        rss_mb: resident memory. A segment of shared memory counts once for every time that it is attached.
        own_mb: the part of it that is neither shared memory nor files.
        objects: blocks of memory that Python's allocator has given out: what leaks in Python grows it, NIXL does not.
    """

    at_s: float
    requests: int
    rss_mb: float
    own_mb: float
    objects: int
    fds: int
    threads: int


@dataclass
class Gauges:
    """Samples of one soak."""

    samples: list[Sample] = field(default_factory=list)
    _start_s: float = field(default_factory=time.monotonic)

    def poll(self, requests: int, *, now: bool = False) -> bool:
        """Take a sample if it is time. Returns whether it was."""
        at_s = time.monotonic() - self._start_s
        if not now and self.samples and at_s < self.samples[-1].at_s + _EVERY_S:
            return False
        gc.collect()
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        fds, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
        rss_mb, own_mb = resident * _PAGE / 1e6, (resident - shared) * _PAGE / 1e6
        self.samples.append(
            Sample(at_s, requests, rss_mb, own_mb, sys.getallocatedblocks(), fds, threads)
        )
        return True

    def slope(self, name: str, after: float = 0.3) -> float:
        """How much of it is added per 1,000 requests, by least squares over all samples after the first part."""
        chosen = [x for x in self.samples if x.requests >= after * self.samples[-1].requests]
        xs = [one.requests / 1000 for one in chosen]
        ys = [float(getattr(one, name)) for one in chosen]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - mean_x) ** 2 for x in xs)
        return (
            sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
            if spread
            else 0.0
        )
