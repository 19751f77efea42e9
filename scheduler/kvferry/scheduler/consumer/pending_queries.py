"""Open queries about prompts that are prefilled elsewhere at this moment: until each has a ticket or is given up.

No I/O, no clock. What the side channel is to do is added to `QueryCommands`: `StartQuery`, `StopQuery`.

  start ──► open ──answered: ticket, over──► settled ──► StopQuery
             │  ▲
             │  └── answered: queued, unknown
             └── give_up: no producer knows the prompt · the request has ended a while ago · crowded out ──► settled

Clients choose how many requests there are, whose producers they name, and when they leave. So no call looks at all open
queries, those of ended requests are few, and a host with many gives way to one with few.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.link.commands import (
    SETTLING,
    Producer,
    QueryCommands,
    StartQuery,
    StopQuery,
)
from kvferry.protocol.hosts import one_spelling
from kvferry.protocol.queries import PromptProgress, PromptQuery
from kvferry.scheduler.requests import PendingQuery, RequestRecord, RequestTable

UNKNOWN_S = 10.0
"""How long a producer may not know of a prompt: its leg may still be on the way, or is lost."""
ENDED_S = 10.0
"""How long the query of an ended request stays open while a producer has the prompt in its queue. Its leg is aborted
too, as a rule; if not, the blocks are held until the lease runs out."""
ENDED_UNKNOWN_S = 1.0
"""The same while no producer has said that it knows the prompt: time for one answer to arrive."""
MAX_OPEN = 1 << 14
"""Most open queries; the prompts of further requests are computed here."""
MAX_ENDED = 1 << 10
"""Most of them whose requests have ended; of more the first that ended is given up."""


class _Timers:
    """Since when each of some queries is in a state, the one that is in it for longest first."""

    def __init__(self) -> None:
        # An `OrderedDict`: to find the first entry of a `dict`, Python skips all places of those that were removed
        # before it, and here the first ones are removed.
        self._since_s: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since_s)

    def start(self, number: int, now_s: float) -> None:
        self._since_s[number] = now_s
        self._since_s.move_to_end(number)

    def stop(self, number: int) -> None:
        self._since_s.pop(number, None)

    def first(self) -> int:
        """The query that is in its state for longest. There is one."""
        return next(iter(self._since_s))

    def next_s(self, after_s: float) -> float | None:
        """When the first of them has been in its state for `after_s`; None if there is none."""
        if not self._since_s:
            return None
        return self._since_s[self.first()] + after_s


class _QueriesByHost:
    """The numbers of the open queries of each host, and the host with the most of them without looking at all."""

    def __init__(self) -> None:
        self._numbers: dict[str, OrderedDict[int, None]] = {}  # the newest one is last
        self._hosts_by_count: dict[int, OrderedDict[str, None]] = {}
        self._largest_count = 0

    def count(self, host: str) -> int:
        """The number of open queries of a host."""
        return len(self._numbers.get(host, ()))

    def add(self, host: str, number: int) -> None:
        before = self.count(host)
        numbers = self._numbers.setdefault(host, OrderedDict())
        numbers[number] = None
        self._count_changed(host, before, before + 1)
        self._largest_count = max(self._largest_count, before + 1)

    def remove(self, host: str, number: int) -> None:
        before = self.count(host)
        del self._numbers[host][number]
        if before == 1:
            del self._numbers[host]
        self._count_changed(host, before, before - 1)
        if before == self._largest_count and before not in self._hosts_by_count:
            # By one: this host itself has as many now.
            self._largest_count -= 1

    def newest_of_largest(self) -> tuple[int, int]:
        """How many queries the host with the most has, and the newest of them. There is an open one."""
        host = next(iter(self._hosts_by_count[self._largest_count]))
        return self._largest_count, next(reversed(self._numbers[host]))

    def _count_changed(self, host: str, before: int, after: int) -> None:
        if before:
            hosts = self._hosts_by_count[before]
            del hosts[host]
            if not hosts:
                del self._hosts_by_count[before]
        if after:
            self._hosts_by_count.setdefault(after, OrderedDict())[host] = None


@dataclass(frozen=True, slots=True)
class PendingQueriesSnapshot:
    """The queries at one moment.

    Attributes:
        open: numbers of the open queries, the oldest first.
        known: those of them whose prompt a producer has in its queue.
        ended: those of them whose requests have ended.
        unknown: those of them that a producer has answered with a reason why it does not know the prompt.
    """

    open: tuple[int, ...]
    known: frozenset[int]
    ended: frozenset[int]
    unknown: frozenset[int]


class PendingQueries:
    """All open queries of one engine. `now_s` is from any monotonic clock.

    Args:
        spans: of this engine's blocks, if it reads prompts while they are computed (`PromptQuery`).
        requests: this engine's; the ledgers have the same.
        commands: for the side channel; searches for prefixes have the same.

    Attributes:
        commands: as given.
        open: the open queries, by number.
        leaving: those whose requests have ended since the last `give_up`, which has a clock and starts their timers.
        crowded_out: settled ones that the next `give_up` returns.
    """

    def __init__(
        self,
        spans: tuple[int, ...] = (),
        requests: RequestTable | None = None,
        commands: QueryCommands | None = None,
    ) -> None:
        self._spans = spans
        self._requests = RequestTable() if requests is None else requests
        self._num_waiting = 0
        self.commands = QueryCommands() if commands is None else commands
        self.open: dict[int, PendingQuery] = {}
        self._by_host = _QueriesByHost()
        # A query is in all timers whose state it is in.
        self._unknown = _Timers()
        self._ended = _Timers()
        self._ended_unknown = _Timers()
        self.leaving: deque[PendingQuery] = deque()
        self.crowded_out: deque[PendingQuery] = deque()

    def __len__(self) -> int:
        """The number of requests that wait for an answer."""
        return self._num_waiting

    def __contains__(self, request_id: str) -> bool:
        """True if this request waits for an answer."""
        record = self._requests.get(request_id)
        return record is not None and record.query is not None

    def start(
        self,
        request_id: str,
        producer: Producer,
        key: str,
        num_tokens: int,
        digest: str,
        now_s: float,
    ) -> bool:
        """A request has arrived whose prompt this producer prefills. False if too many queries are open."""
        host = one_spelling(producer[0])
        is_full = len(self.open) >= MAX_OPEN
        if is_full and not self._make_room(host):
            return False
        query = PromptQuery(
            number=self.commands.next_number(),
            key=key,
            num_tokens=num_tokens,
            digest=digest,
            spans=self._spans,
        )
        # An earlier request of this id.
        self.finished(request_id)
        opened = PendingQuery(request_id, host, query)
        self.open[query.number] = opened
        self._requests.enter(request_id).query = opened
        self._num_waiting += 1
        self._by_host.add(host, query.number)
        self._unknown.start(query.number, now_s)
        self.commands.add(StartQuery(producer, query))
        return True

    def answered(
        self,
        producer: Producer,
        number: int,
        progress: PromptProgress,
        now_s: float,
        reason: str = "",
    ) -> PendingQuery | None:
        """A producer has answered, or is not reachable (`UNKNOWN`).

        Args:
            reason: the answer's.

        Returns:
            The query, if this settles it: with a ticket, or because the prompt is over. None if it stays open, or was
            settled before.
        """
        opened = self.open.get(number)
        if opened is None:
            return None
        if progress in SETTLING:
            self._settle(opened)
            return opened
        if reason:
            opened.unknown_why = reason
        if progress is PromptProgress.QUEUED:
            opened.known_by = producer
            self._unknown.stop(number)
            self._ended_unknown.stop(number)
        elif producer == opened.known_by:
            # Only of the one that knew it: the other data-parallel ranks of an engine never do.
            opened.known_by = None
            self._unknown.start(number, now_s)
            if not opened.waits:
                self._ended_unknown.start(number, now_s)
        return None

    def give_up(self, now_s: float) -> Iterator[PendingQuery]:
        """Settle the queries whose time is over, and those that others have crowded out.

        A caller that stops early gets the others from its next call.
        """
        self._start_timers_of_ended(now_s)
        while self.crowded_out:
            yield self.crowded_out.popleft()
        for timers, after_s in self._timers():
            while True:
                next_s = timers.next_s(after_s)
                if next_s is None or now_s < next_s:
                    break
                yield self._give_up_first(timers)

    def next_s(self) -> float | None:
        """A time before which `give_up` has nothing to do; None if nothing runs out."""
        if self.crowded_out or self.leaving:
            return 0.0
        times_s = [timers.next_s(after_s) for timers, after_s in self._timers()]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def finished(self, request_id: str) -> None:
        """The request has ended without an answer, or waits no more."""
        record = self._requests.get(request_id)
        if record is None or record.query is None:
            return
        # The query stays open for a while. The producer may still prefill the prompt, and its blocks would be held,
        # unread, until their lease runs out: so its ticket must be given back.
        opened = record.query
        self._end_wait(record)
        opened.waits = False
        self.leaving.append(opened)
        if len(self.leaving) + len(self._ended) > MAX_ENDED:
            self._give_up_ended()

    def snapshot(self) -> PendingQueriesSnapshot:
        """What is open now."""
        opened = self.open
        return PendingQueriesSnapshot(
            open=tuple(opened),
            known=frozenset(
                number for number, query in opened.items() if query.known_by
            ),
            ended=frozenset(
                number for number, query in opened.items() if not query.waits
            ),
            unknown=frozenset(
                number for number, query in opened.items() if query.unknown_why
            ),
        )

    def _timers(self) -> tuple[tuple[_Timers, float], ...]:
        return (
            (self._unknown, UNKNOWN_S),
            (self._ended, ENDED_S),
            (self._ended_unknown, ENDED_UNKNOWN_S),
        )

    def _start_timers_of_ended(self, now_s: float) -> None:
        for opened in self.leaving:
            number = opened.query.number
            if number not in self.open:
                continue
            self._ended.start(number, now_s)
            if opened.known_by is None:
                self._ended_unknown.start(number, now_s)
        self.leaving.clear()

    # Who gives way.

    def _make_room(self, host: str) -> bool:
        """Give up one query for one of this host. False if every other has at least as much right to its place."""
        if self._give_up_ended():
            return True
        # The host with the most loses its newest one, if it still has as many as this host then: so no host can keep
        # the others out.
        largest_count, newest = self._by_host.newest_of_largest()
        if largest_count <= self._by_host.count(host) + 1:
            return False
        opened = self.open[newest]
        opened.is_crowded_out = True
        self._settle(opened)
        self.crowded_out.append(opened)
        return True

    def _give_up_ended(self) -> bool:
        """Settle the query whose request was the first to end. Nobody waits for it. False if there is none."""
        if len(self._ended):
            self._give_up_first(self._ended)
            return True
        while self.leaving:
            opened = self.leaving.popleft()
            if opened.query.number in self.open:
                self._settle(opened)
                return True
        return False

    def _give_up_first(self, timers: _Timers) -> PendingQuery:
        opened = self.open[timers.first()]
        self._settle(opened)
        return opened

    def _settle(self, opened: PendingQuery) -> None:
        number = opened.query.number
        del self.open[number]
        self._by_host.remove(opened.host, number)
        for timers, _ in self._timers():
            timers.stop(number)
        opened.known_by = None
        if opened.waits:
            # Otherwise the record may be a later request's, with a query of its own.
            record = self._requests.get(opened.request_id)
            if record is not None:
                self._end_wait(record)
        self.commands.add(StopQuery(number))

    def _end_wait(self, record: RequestRecord) -> None:
        record.query = None
        self._num_waiting -= 1
        self._requests.drop_if_over(record)
