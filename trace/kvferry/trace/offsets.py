"""Offsets of clocks from what must have happened before what.

A difference between a time `a` on clock A and a later time `b` on clock B bounds the offsets: a + o(A) ≤ b + o(B), so
o(A) - o(B) ≤ b - a. The least of these differences for each ordered pair is all that matters, and such a system is
solved by shortest paths (Bellman and Ford): no clock is shifted further than it must be.

    A says 10 ms before B says 4 ms, and B says 9 ms before A says 12 ms
    → o(A) - o(B) ≤ -6 ms, o(B) - o(A) ≤ 3 ms: impossible, A's clock was set in between
    B says 9 ms before A says 20 ms
    → o(A) - o(B) ≤ -6 ms, o(B) - o(A) ≤ 11 ms: A is ahead by 6 to 11 ms, and is put back by 6
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Clock = TypeVar("Clock", bound=Hashable)

_MOST_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Offsets(Generic[Clock]):
    """What to add to the times of each clock, in nanoseconds.

    Attributes:
        by_clock: all clocks that were asked about; 0 for most of them.
        impossible: pairs whose bounds had to be loosened, and by how much: some clock did not run evenly.
    """

    by_clock: dict[Clock, int]
    impossible: dict[tuple[Clock, Clock], int]


def offsets(bounds: Mapping[tuple[Clock, Clock], int], clocks: tuple[Clock, ...]) -> Offsets[Clock]:
    """The smallest shifts that satisfy every bound, or all but those which contradict one another.

    Args:
        bounds: for (A, B) the most that o(A) - o(B) may be.
        clocks: every clock in `bounds`, and any others.
    """
    loosened = dict(bounds)
    for _ in range(_MOST_ROUNDS):
        shifts, cycle = _shortest(loosened, clocks)
        if not cycle:
            break
        missing = -sum(loosened[pair] for pair in cycle)
        share = -(-missing // len(cycle))
        for pair in cycle:
            loosened[pair] += share
    else:  # more contradictions than are worth sorting out
        loosened = {pair: max(0, bound) for pair, bound in bounds.items()}
        shifts = dict.fromkeys(clocks, 0)
    impossible = {pair: loosened[pair] - bound for pair, bound in bounds.items() if loosened[pair] > bound}
    return Offsets(_around_zero(shifts, bounds), impossible)


def _shortest(
    bounds: Mapping[tuple[Clock, Clock], int], clocks: tuple[Clock, ...]
) -> tuple[dict[Clock, int], list[tuple[Clock, Clock]]]:
    """Distances from a source that is 0 from every clock; or a cycle of bounds whose sum is negative, else []."""
    distance = dict.fromkeys(clocks, 0)
    via: dict[Clock, Clock] = {}
    moved: list[Clock] = []
    for _ in range(len(clocks) + 1):
        moved = []
        for (late, early), bound in bounds.items():
            if distance[early] + bound < distance[late]:
                distance[late] = distance[early] + bound
                via[late] = early
                moved.append(late)
        if not moved:
            return distance, []
    at = moved[-1]
    for _ in clocks:
        at = via[at]
    cycle = [(at, via[at])]
    while cycle[-1][1] != at:
        cycle.append((cycle[-1][1], via[cycle[-1][1]]))
    return distance, cycle


def _around_zero(shifts: dict[Clock, int], bounds: Mapping[tuple[Clock, Clock], int]) -> dict[Clock, int]:
    """Only differences within a connected part matter: most clocks of each part shall be right."""
    part = {clock: clock for clock in shifts}

    def root(clock: Clock) -> Clock:
        while part[clock] != clock:
            part[clock] = clock = part[part[clock]]
        return clock

    for one, other in bounds:
        part[root(one)] = root(other)
    counted: dict[Clock, Counter[int]] = {}
    for clock, shift in shifts.items():
        counted.setdefault(root(clock), Counter())[shift] += 1
    usual = {name: max(found, key=lambda shift: (found[shift], shift)) for name, found in counted.items()}
    return {clock: shift - usual[root(clock)] for clock, shift in shifts.items()}
