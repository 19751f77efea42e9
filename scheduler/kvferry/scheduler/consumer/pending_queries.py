"""Queries of this engine about prompts that are prefilled at this moment, until each has a ticket or is given up.

No I/O, no clock. Commands for the side channel are returned in order: `StartQuery`, `StopQuery`.

A request that ends before its query is settled leaves the query open for a while: the producer may still prefill
the prompt, and its blocks would be held, unread, until their lease runs out.

Clients choose how many requests there are, whose producers they name, and when they leave. So

- no call looks at all open queries: what runs out next is first in a table of its own (`_Timers`);
- queries of ended requests are few, and end soon, whatever their producer answers;
- at `MAX_OPEN` open queries the host with the most of them loses its newest one to a host that has fewer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from kvferry.protocol.prompt_queries import PromptProgress, PromptQuery
from kvferry.protocol.side_channel.hosts import one_spelling
from kvferry.scheduler.consumer.pending_query import (
    PendingQuery,
    Producer,
    QueryCommand,
    StartQuery,
    StopQuery,
)
from kvferry.scheduler.requests import RequestRecord, RequestTable

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

SETTLING = (PromptProgress.TICKET, PromptProgress.OVER)
"""Answers that settle a query."""


class _Timers:
    """Since when each of some queries is in a state, the one that is in it for longest first.

    An `OrderedDict`: to find the first entry of a `dict`, Python skips all places of those that were removed before it.
    """

    def __init__(self) -> None:
        self._since_s: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since_s)

    def start(self, number: int, now_s: float) -> None:
        self._since_s[number] = now_s
        self._since_s.move_to_end(number)

    def stop(self, number: int) -> None:
        self._since_s.pop(number, None)

    def first(self) -> int:
        """There is one."""
        return next(iter(self._since_s))

    def next_s(self, after_s: float) -> float | None:
        """When the first of them has been in its state for `after_s`; None if there is none."""
        return self._since_s[self.first()] + after_s if self._since_s else None


class _ByHost:
    """The numbers of the open queries of each host, and the host with the most of them without looking at all."""

    def __init__(self) -> None:
        self._numbers: dict[str, OrderedDict[int, None]] = {}  # the newest one is last
        self._hosts: dict[int, OrderedDict[str, None]] = {}  # by how many they have
        self._most = 0

    def count(self, host: str) -> int:
        return len(self._numbers.get(host, ()))

    def add(self, host: str, number: int) -> None:
        before = self.count(host)
        self._numbers.setdefault(host, OrderedDict())[number] = None
        self._moved(host, before, before + 1)
        self._most = max(self._most, before + 1)

    def remove(self, host: str, number: int) -> None:
        before = self.count(host)
        del self._numbers[host][number]
        if before == 1:
            del self._numbers[host]
        self._moved(host, before, before - 1)
        if before == self._most and before not in self._hosts:
            self._most -= 1  # this host has as many

    def newest_of_largest(self) -> tuple[int, int]:
        """How many queries the host with the most has, and the newest of them. There is an open one."""
        host = next(iter(self._hosts[self._most]))
        return self._most, next(reversed(self._numbers[host]))

    def _moved(self, host: str, before: int, after: int) -> None:
        if before:
            del self._hosts[before][host]
            if not self._hosts[before]:
                del self._hosts[before]
        if after:
            self._hosts.setdefault(after, OrderedDict())[host] = None


class PendingQueries:
    """All open queries of one engine. `now_s` is from any monotonic clock.

    Args:
        spans: of this engine's blocks, if it reads prompts while they are computed (`PromptQuery`).
        requests: this engine's; the ledger's too.
    """

    def __init__(self, spans: tuple[int, ...] = (), requests: RequestTable | None = None) -> None:
        self._spans = spans
        self._requests = RequestTable() if requests is None else requests
        self._num_waiting = 0
        self._next = 0
        self._by_number: dict[int, PendingQuery] = {}
        self._by_host = _ByHost()
        self._unknown = _Timers()
        self._ended = _Timers()
        self._ended_unknown = _Timers()
        self._leaving: deque[PendingQuery] = (
            deque()
        )  # whose requests have ended since the last `give_up`
        self._crowded_out: deque[PendingQuery] = deque()
        self._commands: list[QueryCommand] = []

    def __len__(self) -> int:
        """The number of requests that wait for an answer."""
        return self._num_waiting

    def __contains__(self, request_id: str) -> bool:
        """Whether this request waits for an answer."""
        record = self._requests.find(request_id)
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
        if len(self._by_number) >= MAX_OPEN and not self._make_room(host):
            return False
        query = PromptQuery(
            number=self._next, key=key, num_tokens=num_tokens, digest=digest, spans=self._spans
        )
        self._next += 1
        opened = PendingQuery(request_id, host, query)
        self.finished(request_id)  # an earlier request of this id
        self._by_number[query.number] = opened
        self._requests.enter(request_id).query = opened
        self._num_waiting += 1
        self._by_host.add(host, query.number)
        self._unknown.start(query.number, now_s)
        self._commands.append(StartQuery(producer, query))
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
            The query, if this settles it: with a ticket, or because the prompt is over. None if it stays open, or
            was settled before.
        """
        opened = self._by_number.get(number)
        if opened is None:
            return None
        if progress in SETTLING:
            self._settle(opened)
            return opened
        opened.unknown_why = reason or opened.unknown_why
        if progress is PromptProgress.QUEUED:
            opened.known_by = {producer}
            self._unknown.stop(number)
            self._ended_unknown.stop(number)
        elif producer in opened.known_by:
            opened.known_by.clear()
            self._unknown.start(number, now_s)
            if not opened.waits:
                self._ended_unknown.start(number, now_s)
        return None

    def give_up(self, now_s: float) -> Iterator[PendingQuery]:
        """Settle the queries about prompts that no producer has known for `UNKNOWN_S`, those of requests that have
        ended a while ago, and those that others have crowded out. Who takes the first few only gets the others from the
        next call."""
        for opened in self._leaving:
            number = opened.query.number
            if number in self._by_number:
                self._ended.start(number, now_s)
                if not opened.known_by:
                    self._ended_unknown.start(number, now_s)
        self._leaving.clear()
        while self._crowded_out:
            yield self._crowded_out.popleft()
        for timers, after_s in self._timers():
            while (next_s := timers.next_s(after_s)) is not None and now_s >= next_s:
                yield self._give_up_first(timers)

    def next_s(self) -> float | None:
        """When `give_up` has something to do next, at the earliest; None if nothing runs out."""
        if self._crowded_out or self._leaving:
            return 0.0
        times_s = [timers.next_s(after_s) for timers, after_s in self._timers()]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def finished(self, request_id: str) -> None:
        """The request has ended without an answer. Its query stays open for a while, so that a ticket can be given
        back."""
        record = self._requests.find(request_id)
        if record is None or record.query is None:
            return
        opened = record.query
        self._end_wait(record)
        opened.waits = False
        self._leaving.append(opened)
        if len(self._leaving) + len(self._ended) > MAX_ENDED:
            self._give_up_ended()

    def take_commands(self) -> tuple[QueryCommand, ...]:
        """Commands for the side channel since the last call, in order."""
        commands, self._commands = self._commands, []
        return tuple(commands)

    def _timers(self) -> tuple[tuple[_Timers, float], ...]:
        return (
            (self._unknown, UNKNOWN_S),
            (self._ended, ENDED_S),
            (self._ended_unknown, ENDED_UNKNOWN_S),
        )

    def _make_room(self, host: str) -> bool:
        """Give up one query for one of this host. False if no other has less right to its place."""
        if self._give_up_ended():
            return True
        most, newest = self._by_host.newest_of_largest()
        if most <= self._by_host.count(host) + 1:
            return False
        opened = self._by_number[newest]
        opened.is_crowded_out = True
        self._settle(opened)
        self._crowded_out.append(opened)
        return True

    def _give_up_ended(self) -> bool:
        """Settle the query whose request was the first to end. Nobody waits for it. False if there is none."""
        if len(self._ended):
            self._give_up_first(self._ended)
            return True
        while self._leaving:
            opened = self._leaving.popleft()
            if opened.query.number in self._by_number:
                self._settle(opened)
                return True
        return False

    def _give_up_first(self, timers: _Timers) -> PendingQuery:
        opened = self._by_number[timers.first()]
        self._settle(opened)
        return opened

    def _settle(self, opened: PendingQuery) -> None:
        number = opened.query.number
        del self._by_number[number]
        self._by_host.remove(opened.host, number)
        for timers, _ in self._timers():
            timers.stop(number)
        opened.known_by.clear()
        # If it does not wait any more, the record may be a later request's, with a query of its own.
        record = self._requests.find(opened.request_id) if opened.waits else None
        if record is not None:
            self._end_wait(record)
        self._commands.append(StopQuery(number))

    def _end_wait(self, record: RequestRecord) -> None:
        record.query = None
        self._num_waiting -= 1
        self._requests.drop_if_over(record)
