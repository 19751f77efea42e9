"""The differences between the clocks of hosts, from pairs of events of which one must precede the other.

A handover's times are shown by the clock of its consumer's scheduler, the reference. The events of all handovers
between the reference and another clock bound how far that one is ahead. Its times are moved by the least that the
bounds allow:

    given at 10 ms by the producer, arrived at 4 ms by the consumer: the producer is ahead by at least 6 ms
    read until 9 ms by the consumer, lease over at 20 ms by the producer: it is ahead by at most 11 ms
    -> its times are put back by 6 ms
    lease over at 12 ms instead: it is ahead by at most 3 ms, a contradiction; its times stay

Each pair of clocks is judged by itself. Earlier all were solved for at once, by shortest paths over the bounds: that
shifted nothing at all as soon as one clock of any engine had been set.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
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

    @classmethod
    def of(cls, process: ProcessStarted) -> Clock:
        """The one that a process reads."""
        return cls(process.engine_id, process.host)

    def __str__(self) -> str:
        return f"{self.engine_id} on {self.host}"


class Moment(NamedTuple):
    """A time on a clock."""

    clock: Clock
    at_ns: int


def align(handovers: Sequence[Handover]) -> list[str]:
    """Shift each handover's times to its reference clock.

    Returns:
        a line for each difference, the largest first, and for each contradiction.
    """
    # By how much the first clock of a pair is ahead of the second, at least; by as much the second is behind.
    at_least: defaultdict[tuple[Clock, Clock], float] = defaultdict(lambda: -math.inf)
    pairs: dict[tuple[Clock, Clock], None] = {}  # of any clock and a reference
    for handover in handovers:
        reference = Clock.of(handover.reference)
        for before, after in ordered_moments(handover):
            clocks = (before.clock, after.clock)
            at_least[clocks] = max(at_least[clocks], before.at_ns - after.at_ns)
            pairs[before.clock, reference] = None
            pairs[after.clock, reference] = None
    ahead_ns: dict[tuple[Clock, Clock], int] = {}
    notes: list[tuple[float, str]] = []
    for clock, reference in pairs:
        least_ns = at_least[clock, reference]
        most_ns = -at_least[reference, clock]
        if clock == reference or least_ns <= 0 <= most_ns:
            continue
        names = f"clocks of {clock} and {reference}"
        if least_ns > most_ns:
            by_ns = least_ns - most_ns
            why = "one was set meanwhile, and nothing is shifted between them"
            note = f"{names} contradict themselves by {_ms(by_ns)}: {why}"
            notes.append((by_ns, note))
            continue
        # Only what the order of events forces is shifted: a difference within the bounds cannot be seen.
        nearest_ns = min(max(0, least_ns), most_ns)
        ahead_ns[clock, reference] = int(nearest_ns)
        farthest_ns = max(abs(least_ns), abs(most_ns))
        note = f"{names} differ by at least {_ms(abs(nearest_ns))}"
        if farthest_ns != math.inf:
            note += f" and at most {_ms(farthest_ns)}"
        notes.append((abs(nearest_ns), f"{note}: shifted"))
    if ahead_ns:
        for handover in handovers:
            reference = Clock.of(handover.reference)
            for process in handover.processes:
                pair = (Clock.of(process), reference)
                handover.shift_ns[process] = -ahead_ns.get(pair, 0)
    notes.sort(reverse=True)
    return [note for _, note in notes]


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def ordered_moments(handover: Handover) -> Iterator[tuple[Moment, Moment]]:
    """Pairs of moments of which the first must precede the second."""
    at: dict[type[RequestEvent], Moment] = {}
    for kind, (process, event) in (handover.prefill | handover.decode).items():
        at[kind] = Moment(Clock.of(process), event.at_ns)
    # The end of a lease follows its reads only if it was ended by them.
    over = handover.get(LeaseOver)
    if over is not None and over.how != READ_BY_ALL:
        del at[LeaseOver]
    # A bad report does not follow all loads: some were given up, and end later.
    reported = handover.get(LoadReported)
    if reported is not None and not reported.good:
        del at[LoadReported]
    arrived = handover.get(DecodeArrived)
    given: type[RequestEvent] = ParamsGiven
    if arrived is not None and arrived.is_early:
        # Its ticket came before the prompt was computed, and after it had a lease.
        given = PrefillScheduled
    pairs = [
        (at.get(given), at.get(DecodeArrived)),
        (at.get(LoadOrdered), at.get(LeaseOver)),
    ]
    for process, load in handover.loads.items():
        begun = Moment(Clock.of(process), load.begun_ns)
        ended = Moment(Clock.of(process), load.ended_ns)
        pairs += [
            (at.get(LoadOrdered), begun),
            (ended, at.get(LoadReported)),
            (ended, at.get(LeaseOver)),
        ]
    for before, after in pairs:
        if before is not None and after is not None:
            yield before, after
