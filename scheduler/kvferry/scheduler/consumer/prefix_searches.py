"""Open searches for prefixes: requests that wait to hear which engine has the first part of their prompts.

No I/O, no clock. What the side channel is to do is added to `QueryCommands`: `StartSearch`, `StopQuery`.

  start ──► open ──all have answered, one has everything, or the time is over──► settled ──► StopQuery
                 ──the request has ended, or does not want it any more─────────► (gone)  ──► StopQuery

A prompt can always be computed, so a search never costs more than its time. An engine that does not answer, or cannot
be reached, is not asked for a while. A ticket that nobody takes is given back (`take_unused`): a shorter one than
another engine's, or one that came too late.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvferry.link import limits
from kvferry.link.commands import (
    Producer,
    QueryCommands,
    StartSearch,
    StopQuery,
)
from kvferry.protocol.digests import GrowingChain
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.queries import PromptProgress
from kvferry.scheduler.requests import PrefixSearch, RequestRecord, RequestTable

MAX_SEARCHES = 1 << 10
"""Most searches at once. Each ends within a second or so; prompts of further requests are computed here meanwhile."""
MAX_PAUSED = 1 << 10
"""Most engines that are remembered for not having answered; the first is forgotten. Clients can name them."""
MAX_LATE = 1 << 12
"""Most settled searches that are remembered; a ticket for an older one ends with its time."""


class _Pauses:
    """Engines that have not answered, and until when they are not asked."""

    def __init__(self) -> None:
        self._paused: OrderedDict[Producer, tuple[int, float]] = OrderedDict()

    def is_paused(self, producer: Producer, now_s: float) -> bool:
        _, until_s = self._paused.get(producer, (0, 0.0))
        return now_s < until_s

    def failed(self, producer: Producer, now_s: float) -> None:
        failures, until_s = self._paused.get(producer, (0, 0.0))
        if now_s < until_s:
            # Several searches that were open together: one failure.
            return
        failures += 1
        delay_s = limits.AVOID.delay_s(failures)
        self._paused[producer] = (failures, now_s + delay_s)
        self._paused.move_to_end(producer)
        if len(self._paused) > MAX_PAUSED:
            self._paused.popitem(last=False)

    def answered(self, producer: Producer) -> None:
        self._paused.pop(producer, None)


@dataclass(frozen=True, slots=True)
class PrefixSearchesSnapshot:
    """The searches at one moment.

    Attributes:
        open: the requests that wait, by the number of their query.
        timers: entries in the order of their times, of settled searches too.
    """

    open: dict[int, str]
    timers: int


class PrefixSearches:
    """All open searches of one engine. `now_s` is from any monotonic clock.

    Args:
        requests: this engine's.
        commands: for the side channel; queries about prompts have the same.

    Attributes:
        open: by the number of their query; only to be read.
        unused: tickets that nobody takes, since the last `take_unused`; only to be read.
        commands: as given.
    """

    def __init__(self, requests: RequestTable, commands: QueryCommands) -> None:
        self._requests = requests
        self.commands = commands
        self.open: dict[int, PrefixSearch] = {}
        self._timers: list[tuple[float, int]] = []  # a heap
        self._pauses = _Pauses()
        # What settled searches covered, for tickets that are on their way.
        self._late: OrderedDict[int, int] = OrderedDict()
        self.unused: list[RemotePrefill] = []

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self.open)

    @property
    def is_full(self) -> bool:
        """True if no further search may begin."""
        return len(self.open) >= MAX_SEARCHES

    def is_paused(self, producer: Producer, now_s: float) -> bool:
        """True if an engine has not answered a moment ago, and is not asked."""
        return self._pauses.is_paused(producer, now_s)

    def most_tokens(self, number: int) -> int:
        """The tokens that a query covers, also a while after its search was settled; 0 if that is not known."""
        search = self.open.get(number)
        if search is not None:
            return search.most_tokens
        return self._late.get(number, 0)

    def start(
        self,
        request_id: str,
        producers: Iterable[Producer],
        chain: GrowingChain,
        *,
        most_tokens: int,
        min_tokens: int,
        now_s: float,
        until_s: float,
    ) -> None:
        """A request has arrived, of whose prompt these engines may have the first tokens. There is room for it."""
        record = self._requests.enter(request_id)
        if record.search is not None:
            # An earlier request of this id.
            self._settle(record.search)
        number = self.commands.next_number()
        asked = tuple(producers)
        search = PrefixSearch(
            request_id=request_id,
            number=number,
            chain=chain,
            most_tokens=most_tokens,
            min_tokens=min_tokens,
            begun_s=now_s,
            until_s=until_s,
            unanswered=set(asked),
            queued=set(),
        )
        self.open[number] = search
        record.search = search
        heapq.heappush(self._timers, (until_s, number))
        self.commands.add(StartSearch(number, asked, chain, most_tokens, min_tokens))

    def answered(
        self,
        producer: Producer,
        number: int,
        progress: PromptProgress,
        now_s: float,
        *,
        reason: str = "",
        ticket: RemotePrefill | None = None,
        wait_s: Callable[[int], float] = lambda tokens: 0.0,
    ) -> PrefixSearch | None:
        """An engine has answered, or cannot be reached (`UNKNOWN`).

        Args:
            reason: the answer's, if it has no ticket.
            ticket: what it offers.
            wait_s: how long a request may wait for so many tokens more.

        Returns:
            The search, if this settles it.
        """
        is_reached = progress is not PromptProgress.UNKNOWN
        if is_reached:
            self._pauses.answered(producer)
        else:
            self._pauses.failed(producer, now_s)
        search = self.open.get(number)
        if search is None or producer not in search.unanswered:
            self._leave_unused(ticket, search)
            return None
        if progress is PromptProgress.QUEUED:
            search.queued.add(producer)
            return None
        search.unanswered.discard(producer)
        search.queued.discard(producer)
        if ticket is not None:
            self._take_ticket(search, producer, ticket)
        elif reason:
            search.reason = reason
        if search.best is not None:
            # Others may have more of it, but not for longer than that would take to compute.
            num_missing = search.most_tokens - search.best.remote_num_tokens
            if num_missing <= 0:
                return self._settle(search)
            search.until_s = min(search.until_s, now_s + wait_s(num_missing))
            heapq.heappush(self._timers, (search.until_s, number))
        return None if search.unanswered else self._settle(search)

    def give_up(self, now_s: float) -> Iterator[PrefixSearch]:
        """Settle the searches whose time is over."""
        while self._timers and self._timers[0][0] <= now_s:
            _, number = heapq.heappop(self._timers)
            search = self.open.get(number)
            if search is None or search.until_s > now_s:
                continue
            for producer in search.unanswered - search.queued:
                self._pauses.failed(producer, now_s)
            if search.best is None and search.queued:
                search.reason = "too_late"
            yield self._settle(search)

    def next_s(self) -> float | None:
        """A time before which `give_up` has nothing to do; None if nothing is open."""
        while self._timers and self._timers[0][1] not in self.open:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def end(self, request_id: str) -> None:
        """The request has ended, or does not wait any more: what was found for it is given back."""
        record = self._requests.get(request_id)
        if record is not None and record.search is not None:
            search = self._settle(record.search)
            self._leave_unused(search.best, None)

    def take_unused(self) -> tuple[RemotePrefill, ...]:
        """Tickets since the last call that nobody takes."""
        unused = tuple(self.unused)
        self.unused.clear()
        return unused

    def snapshot(self) -> PrefixSearchesSnapshot:
        """What is open now."""
        by_number = self.open
        return PrefixSearchesSnapshot(
            {number: search.request_id for number, search in by_number.items()},
            len(self._timers),
        )

    def _take_ticket(
        self, search: PrefixSearch, producer: Producer, ticket: RemotePrefill
    ) -> None:
        best = search.best
        if best is not None and best.remote_num_tokens >= ticket.remote_num_tokens:
            self._leave_unused(ticket, search)
            return
        search.best = ticket
        search.best_from = producer
        self._leave_unused(best, search)

    def _leave_unused(
        self, ticket: RemotePrefill | None, search: PrefixSearch | None
    ) -> None:
        """Nobody takes this ticket, unless it is the search's best: then an engine has repeated it."""
        if ticket is None:
            return
        best = search.best if search is not None else None
        if best is None or best.kvferry.lease_epoch != ticket.kvferry.lease_epoch:
            self.unused.append(ticket)

    def _settle(self, search: PrefixSearch) -> PrefixSearch:
        del self.open[search.number]
        if search.unanswered:
            self._late[search.number] = search.most_tokens
            if len(self._late) > MAX_LATE:
                self._late.popitem(last=False)
        self.commands.add(StopQuery(search.number))
        record = self._requests.get(search.request_id)
        if record is not None and record.search is search:
            self._end_wait(record)
        return search

    def _end_wait(self, record: RequestRecord) -> None:
        record.search = None
        self._requests.drop_if_over(record)
