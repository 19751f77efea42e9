"""The differences between the clocks of hosts, from pairs of events of which one must precede the other.

A handover's times are by the clock of its consumer's scheduler, the reference. The events of all handovers between the
reference and another clock bound how far that one is ahead. Its times are moved by the least that the bounds allow:

    given at 10 ms by the producer, arrived at 4 ms by the consumer: the producer is ahead by at least 6 ms
    read until 9 ms by the consumer, lease over at 20 ms by the producer: it is ahead by at most 11 ms
    -> its times are put back by 6 ms
    lease over at 12 ms instead: it is ahead by at most 3 ms, a contradiction; its times stay

Each pair of clocks is judged by itself. Earlier all were solved for at once, by shortest paths over the bounds: that
shifted nothing at all as soon as one clock of any engine had been set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
    """The clock of a host, for the processes of one engine: two hosts may have the same name."""

    engine_id: str
    host: str

    def __str__(self) -> str:
        return f"{self.engine_id} on {self.host}"


class Moment(NamedTuple):
    """A time on a clock."""

    clock: Clock
    at_ns: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far clocks are ahead of the reference.

    Attributes:
        ahead_ns: by clock and reference; negative where it is behind, absent where it need not differ.
        notes: a line for each difference, the largest first, and for each contradiction.
    """

    ahead_ns: dict[tuple[Clock, Clock], int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shift_ns(self, process: ProcessStarted, handover: Handover) -> int:
        """What a time of this process needs to be one on the handover's reference."""
        return -self.ahead_ns.get((clock_of(process), reference_of(handover)), 0)


def clock_of(process: ProcessStarted) -> Clock:
    """The clock that a process reads."""
    return Clock(process.engine_id, process.host)


def reference_of(handover: Handover) -> Clock:
    """The clock that a handover's times are shown by: the consumer's, without one the producer's."""
    half = handover.decode or handover.prefill
    if half is None:
        return Clock("", "")
    return clock_of(half.process)


def compare(handovers: Iterable[Handover]) -> Clocks:
    """Bound how far each clock is ahead by the events of all handovers that it shares with a reference."""
    at_least: dict[tuple[Clock, Clock], float] = {}
    at_most: dict[tuple[Clock, Clock], float] = {}
    for handover in handovers:
        reference = reference_of(handover)
        for before, after in causes(handover):
            gap_ns = before.at_ns - after.at_ns
            if after.clock == reference != before.clock:
                pair = (before.clock, reference)
                at_least[pair] = max(gap_ns, at_least.get(pair, -math.inf))
            elif before.clock == reference != after.clock:
                pair = (after.clock, reference)
                at_most[pair] = min(-gap_ns, at_most.get(pair, math.inf))
            # Else a worker on another host than its scheduler precedes the producer, which bounds neither of them
            # by the reference.
    ahead_ns: dict[tuple[Clock, Clock], int] = {}
    notes: list[tuple[float, str]] = []
    for pair in at_least | at_most:
        least_ns = at_least.get(pair, -math.inf)
        most_ns = at_most.get(pair, math.inf)
        clocks = f"clocks of {pair[0]} and {pair[1]}"
        if least_ns > most_ns:
            by_ns = least_ns - most_ns
            why = "one was set meanwhile, and nothing is shifted between them"
            note = f"{clocks} contradict themselves by {_ms(by_ns)}: {why}"
            notes.append((by_ns, note))
        elif least_ns > 0 or most_ns < 0:
            # Only what the order of events forces is shifted: a difference within the bounds cannot be seen.
            nearest_ns = min(max(0, least_ns), most_ns)
            ahead_ns[pair] = int(nearest_ns)
            farthest_ns = max(abs(least_ns), abs(most_ns))
            note = f"{clocks} differ by at least {_ms(abs(nearest_ns))}"
            if farthest_ns != math.inf:
                note += f" and at most {_ms(farthest_ns)}"
            notes.append((abs(nearest_ns), f"{note}: shifted"))
    notes.sort(reverse=True)
    return Clocks(ahead_ns, tuple(note for _, note in notes))


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def causes(handover: Handover) -> Iterator[tuple[Moment, Moment]]:
    """Pairs of moments of which the first must precede the second."""
    arrival = handover.get(DecodeArrived)
    lease_end = handover.get(LeaseOver)
    report = handover.get(LoadReported)
    given = _moment(handover, ParamsGiven)
    if arrival is not None and arrival.is_early:
        # Its ticket came before the prompt was computed, and after it had a lease.
        given = _moment(handover, PrefillScheduled)
    ordered = _moment(handover, LoadOrdered)
    # The end of a lease follows its reads only if it was ended by them.
    over = None
    if lease_end is not None and lease_end.how == READ_BY_ALL:
        over = _moment(handover, LeaseOver)
    # A bad report does not follow all loads: some were given up, and end later.
    reported = None
    if report is not None and report.good:
        reported = _moment(handover, LoadReported)
    pairs = [(given, _moment(handover, DecodeArrived)), (ordered, over)]
    for load in handover.loads:
        clock = clock_of(load.process)
        ended = Moment(clock, load.ended_ns)
        pairs.append((ordered, Moment(clock, load.begun_ns)))
        pairs += [(ended, reported), (ended, over)]
    for before, after in pairs:
        if before is not None and after is not None:
            yield before, after


def _moment(handover: Handover, kind: type[RequestEvent]) -> Moment | None:
    """When the event of a type was recorded; None if it was not."""
    for half in handover.halves:
        event = half.get(kind)
        if event is not None:
            return Moment(clock_of(half.process), event.at_ns)
    return None
