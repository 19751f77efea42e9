"""Counts of a soak: requests by outcome, faults, violations, and resources of its process."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.soak_schedule import Fault

_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVERY_S, _AT_THE_LATEST_S = 5.0, 30.0
_LIBC = ctypes.CDLL(None)


@dataclass
class Counts:
    """What a soak has counted.

    Attributes:
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
    """Resources of the process at one moment, after a garbage collection and malloc's own.

    Attributes:
        lives: of engines, so far.
        is_calm: there was no more in the process than its living engines. Where it is busy, engines that have ended
            take their time, and what they still hold is no growth.
        mapping: of each consumer, whether its present life maps the producers' caches. It changes with every life, and
            takes 52 to 60 descriptors, which are no growth either.
        rss_mb: resident memory. A segment of shared memory counts once for every time that it is attached.
        own_mb: the part of it that is neither shared memory nor files.
        objects: blocks of memory that Python's allocator has given out: what leaks in Python grows it, NIXL does not.
    """

    at_s: float
    requests: int
    lives: int
    rss_mb: float
    own_mb: float
    objects: int
    fds: int
    threads: int
    is_calm: bool = True
    mapping: tuple[bool, ...] = ()


@dataclass
class Gauges:
    """Samples of one soak.

    Attributes:
        warm: number of the first sample that was taken after every engine had been restarted once.
    """

    samples: list[Sample] = field(default_factory=list)
    warm: int = 0
    _start_s: float = field(default_factory=time.monotonic)

    def poll(
        self,
        requests: int,
        lives: int,
        *,
        mapping: tuple[bool, ...] = (),
        calm: bool = True,
        now: bool = False,
    ) -> bool:
        """Take a sample if it is time. Returns whether it was.

        Args:
            mapping: as in `Sample`.
            calm: there is no more in the process than its living engines; samples wait for that, but not for ever.
        """
        at_s = time.monotonic() - self._start_s
        every_s = _EVERY_S if calm else _AT_THE_LATEST_S
        if not now and self.samples and at_s < self.samples[-1].at_s + every_s:
            return False
        gc.collect()
        _LIBC.malloc_trim(
            0
        )  # else free pages of engines that have ended count: 40 MB in 40 lives
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        fds, threads = (
            len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")
        )
        rss_mb, own_mb = resident * _PAGE / 1e6, (resident - shared) * _PAGE / 1e6
        self.samples.append(
            Sample(
                at_s,
                requests,
                lives,
                rss_mb,
                own_mb,
                sys.getallocatedblocks(),
                fds,
                threads,
                calm,
                mapping,
            )
        )
        return True

    def added(self, name: str, after: float = 0.3) -> tuple[float, float]:
        """By least squares over all calm samples after the first part that are `warm`.

        Returns:
            How much of it is added per 1,000 requests, and how much per life of an engine.
        """
        last = self.samples[-1].requests
        chosen = [
            one
            for one in self.samples[self.warm :]
            if one.requests >= after * last and one.is_calm
        ]
        if not chosen:
            return 0.0, 0.0
        by = np.array(
            [(one.requests / 1000, one.lives, *one.mapping) for one in chosen], float
        )
        of = np.array([getattr(one, name) for one in chosen], float)
        # Of the solutions the least one: what did not vary adds nothing.
        per_1000, per_life, *_ = np.linalg.lstsq(
            by - by.mean(0), of - of.mean(), rcond=None
        )[0]
        return float(per_1000), float(per_life)
