"""Alignment of the clocks of different hosts, from pairs of events of which one must precede the other.

A clock is the clock of one host for one engine, so engines on hosts of the same name have different clocks.
An event at time `a` on clock A that precedes one at time `b` on clock B bounds the offsets: a + o(A) ≤ b + o(B), so
o(A) - o(B) ≤ b - a. For each ordered pair only the least of these differences matters. The system is solved by shortest
paths (Bellman-Ford), which shifts no clock further than necessary.

    10 ms on A precedes 4 ms on B, and 9 ms on B precedes 12 ms on A
    → o(A) - o(B) ≤ -6 ms, o(B) - o(A) ≤ 3 ms: impossible, A's clock was set in between
    10 ms on A precedes 4 ms on B, and 9 ms on B precedes 20 ms on A
    → o(A) - o(B) ≤ -6 ms, o(B) - o(A) ≤ 11 ms: A is ahead by 6 to 11 ms, and is put back by 6
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvferry.trace.events import ProcessStarted
from kvferry.trace.handover import Handover

ClockT = TypeVar("ClockT", bound=Hashable)

_MOST_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Offsets(Generic[ClockT]):
    """The shift in nanoseconds to add to the times of each clock.

    Attributes:
        by_clock: shift of every clock in `clocks`; 0 for most of them.
        impossible: pairs whose bounds had to be loosened, and by how much: some clock did not run evenly.
    """

    by_clock: dict[ClockT, int]
    impossible: dict[tuple[ClockT, ClockT], int]


def offsets(bounds: Mapping[tuple[ClockT, ClockT], int], clocks: tuple[ClockT, ...]) -> Offsets[ClockT]:
    """The smallest shifts that satisfy every bound; bounds that contradict one another are loosened.

    Args:
        bounds: for (A, B) the maximum of o(A) - o(B).
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
    else:  # too many contradictions
        loosened = {pair: max(0, bound) for pair, bound in bounds.items()}
        shifts = dict.fromkeys(clocks, 0)
    impossible = {pair: loosened[pair] - bound for pair, bound in bounds.items() if loosened[pair] > bound}
    return Offsets(_around_zero(shifts, bounds), impossible)


def _shortest(
    bounds: Mapping[tuple[ClockT, ClockT], int], clocks: tuple[ClockT, ...]
) -> tuple[dict[ClockT, int], list[tuple[ClockT, ClockT]]]:
    """Distances from a source at distance 0 to every clock, and a cycle of bounds with a negative sum, [] if none."""
    distance = dict.fromkeys(clocks, 0)
    via: dict[ClockT, ClockT] = {}
    moved: list[ClockT] = []
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


def _around_zero(shifts: dict[ClockT, int], bounds: Mapping[tuple[ClockT, ClockT], int]) -> dict[ClockT, int]:
    """Shift each connected part, where only differences matter, so that most of its clocks have shift 0."""
    part = {clock: clock for clock in shifts}

    def root(clock: ClockT) -> ClockT:
        while part[clock] != clock:
            part[clock] = clock = part[part[clock]]
        return clock

    for one, other in bounds:
        part[root(one)] = root(other)
    counted: dict[ClockT, Counter[int]] = {}
    for clock, shift in shifts.items():
        counted.setdefault(root(clock), Counter())[shift] += 1
    usual = {name: max(found, key=lambda shift: (found[shift], shift)) for name, found in counted.items()}
    return {clock: shift - usual[root(clock)] for clock, shift in shifts.items()}


READ_BY_ALL = "done"
"""`LeaseOver.how` of a lease for which every worker of the consumer has sent `done`."""


class Clock(NamedTuple):
    """The clock of a host, for the processes of one engine."""

    engine_id: str
    host: str

    def __str__(self) -> str:
        return f"{self.engine_id} on {self.host}"


class Moment(NamedTuple):
    """A time on a clock."""

    clock: Clock
    at_ns: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two clocks that cannot both be right.

    Attributes:
        at_least_ns, at_most_ns: by how much `ahead` is ahead; None where there is no upper bound.
        unevenly_ns: more than 0 where no constant difference is consistent with the events.
    """

    ahead: Clock
    behind: Clock
    at_least_ns: int
    at_most_ns: int | None
    unevenly_ns: int = 0

    def __str__(self) -> str:
        if self.unevenly_ns:
            return (
                f"clocks of {self.ahead} and {self.behind} contradict themselves: one was set while it was recorded; "
                f"times between them may be wrong by {self.unevenly_ns / 1e6:.3f} ms"
            )
        most = "" if self.at_most_ns is None else f" and at most {self.at_most_ns / 1e6:.3f} ms"
        least = f"at least {self.at_least_ns / 1e6:.3f} ms"
        return f"clocks of {self.ahead} and {self.behind} differ by {least}{most}: shifted"


@dataclass(frozen=True, slots=True)
class Clocks:
    """The shift of each clock, and the differences that were found."""

    shift_ns: dict[Clock, int] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()

    def shift(self, process: ProcessStarted) -> int:
        """The shift of a process's times."""
        return self.shift_ns.get(clock_of(process), 0)


def clock_of(process: ProcessStarted) -> Clock:
    """The clock that a process reads."""
    return Clock(process.engine_id, process.host)


def compare(handovers: Iterable[Handover]) -> Clocks:
    """Shift the clocks as far as the handovers' events require."""
    bounds: dict[tuple[Clock, Clock], int] = {}
    clocks: dict[Clock, None] = {}
    for handover in handovers:
        for before, after in causes(handover):
            clocks[before.clock] = clocks[after.clock] = None
            pair = (before.clock, after.clock)
            gap_ns = after.at_ns - before.at_ns
            if before.clock != after.clock and gap_ns < bounds.get(pair, 1 << 64):
                bounds[pair] = gap_ns
    found = offsets(bounds, tuple(clocks))
    differences = []
    for (ahead, behind), gap_ns in bounds.items():
        unevenly_ns = found.impossible.get((ahead, behind), 0)
        if gap_ns < 0 or unevenly_ns:
            differences.append(Difference(ahead, behind, -gap_ns, bounds.get((behind, ahead)), unevenly_ns))
    return Clocks({clock: shift for clock, shift in found.by_clock.items() if shift}, tuple(differences))


def causes(handover: Handover) -> Iterator[tuple[Moment, Moment]]:
    """Pairs of moments of which the first must precede the second."""
    prefill, decode = handover.prefill, handover.decode
    here = clock_of(decode.process) if decode is not None else None
    there = clock_of(prefill.process) if prefill is not None else None
    arrived = Moment(here, decode.arrived.at_ns) if here and decode and decode.arrived else None
    ordered = Moment(here, decode.ordered.at_ns) if here and decode and decode.ordered else None
    reported = Moment(here, decode.reported.at_ns) if here and decode and decode.reported else None
    over = Moment(there, prefill.over.at_ns) if there and prefill and prefill.over else None
    read_by_all = over if prefill and prefill.over and prefill.over.how == READ_BY_ALL else None
    if there and prefill and prefill.given and arrived:
        yield Moment(there, prefill.given.at_ns), arrived
    if ordered and read_by_all:
        yield ordered, read_by_all
    is_good = decode is not None and decode.reported is not None and decode.reported.good  # else some were given up
    for load in handover.loads:
        clock = clock_of(load.process)
        if ordered:
            yield ordered, Moment(clock, load.begun_ns)
        if reported and is_good:
            yield Moment(clock, load.ended_ns), reported
        if read_by_all:
            yield Moment(clock, load.ended_ns), read_by_all
