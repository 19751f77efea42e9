"""Alignment of the clocks of different hosts, from pairs of events of which one must precede the other.

A clock is the clock of one host for one engine, so engines on hosts of the same name have different clocks.
An event at time `a` on clock A that precedes one at time `b` on clock B bounds the shifts: a + s(A) ≤ b + s(B), so
s(A) - s(B) ≤ b - a. For each ordered pair only the least of these differences matters. The system is solved by shortest
paths (Bellman-Ford), which shifts no clock further than necessary.

    10 ms on A precedes 4 ms on B, and 9 ms on B precedes 20 ms on A
    → s(A) - s(B) ≤ -6 ms, s(B) - s(A) ≤ 11 ms: A is ahead by 6 to 11 ms, and is put back by 6
    10 ms on A precedes 4 ms on B, and 9 ms on B precedes 12 ms on A
    → s(A) - s(B) ≤ -6 ms, s(B) - s(A) ≤ 3 ms: impossible, a clock was set in between; no clock is shifted
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.trace.events import (
    DecodeArrived,
    LeaseOver,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillScheduled,
    ProcessStarted,
    RequestEvent,
)
from kvferry.trace.handover import Handover

READ_BY_ALL = "done"
"""`LeaseOver.how` of a lease for which every worker of the consumer has sent `done`."""


class Clock(NamedTuple):
    """The clock of a host, for the processes of one engine."""

    engine_id: str
    host: str

    def __str__(self) -> str:
        return f"{self.engine_id} on {self.host}"


Bounds = Mapping[tuple[Clock, Clock], int]
"""For (A, B) the maximum of s(A) - s(B) in nanoseconds."""


class Moment(NamedTuple):
    """A time on a clock."""

    clock: Clock
    at_ns: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two clocks that cannot both be right.

    Attributes:
        at_least_ns, at_most_ns: by how much `ahead` is ahead; None where there is no upper bound.
        is_shifted: False where no constant differences explain all events.
    """

    ahead: Clock
    behind: Clock
    at_least_ns: int
    at_most_ns: int | None
    is_shifted: bool = True

    def __str__(self) -> str:
        clocks = f"clocks of {self.ahead} and {self.behind}"
        differ = f"{clocks} differ by at least {self.at_least_ns / 1e6:.3f} ms"
        if not self.is_shifted:
            return f"{differ}, and not always: some clock was set while it was recorded; nothing is shifted"
        if self.at_most_ns is not None:
            differ += f" and at most {self.at_most_ns / 1e6:.3f} ms"
        return f"{differ}: shifted"


@dataclass(frozen=True, slots=True)
class Clocks:
    """The nanoseconds to add to the times of each clock, and the differences that were found."""

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
    for handover in handovers:
        for before, after in causes(handover):
            if before.clock == after.clock:
                continue
            pair = (before.clock, after.clock)
            gap_ns = after.at_ns - before.at_ns
            bounds[pair] = min(gap_ns, bounds.get(pair, gap_ns))
    shift_ns = shifts(bounds)
    is_shifted = shift_ns is not None
    differences = []
    for (ahead, behind), gap_ns in bounds.items():
        # An event that precedes another one and has a later time.
        if gap_ns < 0:
            at_most_ns = bounds.get((behind, ahead))
            differences.append(Difference(ahead, behind, -gap_ns, at_most_ns, is_shifted))
    if shift_ns is None:
        return Clocks({}, tuple(differences))
    nonzero = {clock: clock_ns for clock, clock_ns in shift_ns.items() if clock_ns}
    return Clocks(nonzero, tuple(differences))


def shifts(bounds: Bounds) -> dict[Clock, int] | None:
    """The smallest shifts that satisfy every bound, 0 or negative; None if the bounds contradict one another."""
    shift_ns: dict[Clock, int] = {}
    for late, early in bounds:
        shift_ns[late] = 0
        shift_ns[early] = 0
    # Shortest paths by Bellman-Ford: after as many rounds as there are clocks nothing changes any more, unless a cycle
    # of bounds is negative, which is a contradiction.
    for _ in range(len(shift_ns) + 1):
        is_settled = True
        for (late, early), bound_ns in bounds.items():
            latest_ns = shift_ns[early] + bound_ns
            if latest_ns < shift_ns[late]:
                shift_ns[late] = latest_ns
                is_settled = False
        if is_settled:
            return shift_ns
    return None


def causes(handover: Handover) -> Iterator[tuple[Moment, Moment]]:
    """Pairs of moments of which the first must precede the second."""
    arrival = handover.get(DecodeArrived)
    given = moment(handover, ParamsGiven)
    if arrival is not None and arrival.is_early:
        # Its ticket came before the prompt was computed, and after it had a lease.
        given = moment(handover, PrefillScheduled)
    arrived = moment(handover, DecodeArrived)
    ordered = moment(handover, LoadOrdered)

    # The end of a lease follows its reads only if it was ended by them.
    over = None
    lease_end = handover.get(LeaseOver)
    if lease_end is not None and lease_end.how == READ_BY_ALL:
        over = moment(handover, LeaseOver)
    # A bad report does not follow all loads: some were given up, and end later.
    reported = None
    report = handover.get(LoadReported)
    if report is not None and report.good:
        reported = moment(handover, LoadReported)

    pairs = [(given, arrived), (ordered, over)]
    for load in handover.loads:
        clock = clock_of(load.process)
        begun = Moment(clock, load.begun_ns)
        ended = Moment(clock, load.ended_ns)
        pairs += [(ordered, begun), (ended, reported), (ended, over)]
    for before, after in pairs:
        if before is not None and after is not None:
            yield before, after


def moment(handover: Handover, kind: type[RequestEvent]) -> Moment | None:
    """When the event of a type was recorded; None if it was not."""
    for half in (handover.prefill, handover.decode):
        if half is None:
            continue
        event = half.get(kind)
        if event is not None:
            return Moment(clock_of(half.process), event.at_ns)
    return None
