"""Time that calls take of one thread: of its processor, and by the wall."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Microseconds: median, 99th percentile, the largest."""

    p50: float
    p99: float
    max: float
    count: int

    @classmethod
    def of_ns(cls, samples: Iterable[int]) -> Spread:
        ordered = sorted(samples)
        last = len(ordered) - 1
        p50, p99, most = (
            ordered[round(last * share)] / 1e3 for share in (0.5, 0.99, 1.0)
        )
        return cls(p50, p99, most, len(ordered))


@dataclass(slots=True)
class StepClock:
    """Adds up, step by step, what the wrapped calls of one object take.

    A call that is made by another wrapped one counts once.

    Attributes:
        cpu_ns, wall_ns: one sample for each step that has ended.
        samples_ns: processor time of every single call by its name.
    """

    cpu_ns: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)
    samples_ns: dict[str, list[int]] = field(default_factory=dict)
    _cpu_now: int = 0
    _wall_now: int = 0
    _depth: int = 0

    def wrap(self, owner: Any, names: Iterable[str]) -> None:
        """Time these methods of an object from now on; those that it does not have are left out."""
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, self.timed(name, getattr(owner, name)))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return call(*args, **kwargs)
            self._depth = 1
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                cpu = time.thread_time_ns() - cpu
                self._wall_now += time.perf_counter_ns() - wall
                self._depth = 0
                self._cpu_now += cpu
                self.samples_ns.setdefault(name, []).append(cpu)

        return measured

    def end_step(self) -> None:
        """End a step: the calls timed since the last one."""
        self.cpu_ns.append(self._cpu_now)
        self.wall_ns.append(self._wall_now)
        self._cpu_now = self._wall_now = 0

    def forget(self) -> None:
        """Begin anew."""
        self.cpu_ns.clear()
        self.wall_ns.clear()
        self.samples_ns.clear()
        self._cpu_now = self._wall_now = 0

    @property
    def cpu(self) -> Spread:
        return Spread.of_ns(self.cpu_ns)

    @property
    def wall(self) -> Spread:
        return Spread.of_ns(self.wall_ns)

    def singly(self) -> dict[str, Spread]:
        """Time of one call, by its name."""
        return {
            name: Spread.of_ns(samples) for name, samples in self.samples_ns.items()
        }
