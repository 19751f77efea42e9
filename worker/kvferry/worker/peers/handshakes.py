"""Handshakes waiting and under way, and the limits on their number. Each is a coroutine on the link's loop.

Clients choose the hosts that params name, so a host may be one that never answers and keeps a connection until the
handshake's timeout. Limits for *unverified* hosts, which have never answered or did not the last time, bound the cost
to other hosts (`HandshakeLimits`, with `FOR_LOADS`):

- With up to 48 handshakes to silent hosts under way a live host is asked at once. With more of them it waits for at
  most one handshake's timeout for every 48 that were named before it.
- A host that has answered before does not wait for unverified ones at all.
- More than may wait are refused, not queued.
"""

from __future__ import annotations

import functools
import queue
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from kvferry.link import limits
from kvferry.link.limits import AHEAD, FOR_LOADS, HandshakeLimits
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import InputError, PeerRefused
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.hosts import one_spelling
from kvferry.worker.peers.peer import PeerKey

HandshakeResult = tuple[EngineDescription, TransferPlan] | Exception
OnHandshakeEnd = Callable[[HandshakeResult], None]
BeginHandshake = Callable[[PeerKey, OnHandshakeEnd], None]
"""Begins to fetch a description and to plan it. Never waits; the result comes from any thread, once."""


@dataclass(slots=True)
class _WantedHandshake:
    """A handshake that waits or is under way.

    Attributes:
        limits: in which it has a place.
        is_awaited: a load waits for it.
    """

    limits: HandshakeLimits
    is_awaited: bool
    is_under_way: bool = False


class _UnderWay:
    """The handshakes under way that share these limits, counted by host.

    Args:
        answered: the verified hosts.
    """

    def __init__(self, limits: HandshakeLimits, answered: Container[str]) -> None:
        self._limits = limits
        self._answered = answered
        self._by_host: Counter[str] = Counter()
        self._all = 0
        self._unverified = 0

    def add(self, host: str) -> None:
        self._by_host[host] += 1
        self._all += 1
        if host not in self._answered:
            self._unverified += 1

    def is_full(self) -> bool:
        return self._all >= self._limits.at_once

    def has_place(self, host: str) -> bool:
        """True if one more handshake with this host may begin."""
        if self.is_full():
            return False
        if host in self._answered:
            return self._by_host[host] < self._limits.per_host
        if self._unverified >= self._limits.unverified_at_once:
            return False
        return self._by_host[host] < self._limits.per_unverified_host


def _counted_host(key: PeerKey) -> str:
    """A peer's host as it is counted.

    Clients choose how they write a host: a name of seven letters can be written in 128 ways, and each would have a
    share of its own.
    """
    return one_spelling(key.host)


@dataclass(frozen=True, slots=True)
class HandshakesSnapshot:
    """The handshakes at one moment.

    Attributes:
        waiting, under_way: peers whose handshake has not begun, and has begun.
        awaited: those of both that a load waits for.
        answered: hosts that have answered, and did the last time.
        arrived: results that were not taken.
    """

    waiting: frozenset[PeerKey]
    under_way: frozenset[PeerKey]
    awaited: frozenset[PeerKey]
    answered: frozenset[str]
    arrived: int

    def __len__(self) -> int:
        return len(self.waiting) + len(self.under_way)


class Handshakes:
    """See the module. All but the handshakes themselves belongs to one thread.

    Args:
        begin: begins one.
        wake: called from any thread when a handshake has ended.

    Attributes:
        wanted: those that wait or are under way, in the order in which they begin.
        results: those that the next `arrivals` have; `wake` is not called for them.
    """

    def __init__(self, begin: BeginHandshake, wake: Callable[[], None]) -> None:
        self._begin_one = begin
        self._wake = wake
        # Filled by other threads; everything else belongs to the one thread.
        self._arrived: queue.SimpleQueue[tuple[PeerKey, HandshakeResult]] = (
            queue.SimpleQueue()
        )
        self.results: dict[PeerKey, HandshakeResult] = {}
        self.wanted: dict[PeerKey, _WantedHandshake] = {}
        # The verified hosts, the one that answered last is last.
        self._answered: dict[str, None] = {}

    def snapshot(self) -> HandshakesSnapshot:
        """The handshakes now. May be called on any thread."""
        wanted = dict(self.wanted)
        under_way = frozenset(key for key, one in wanted.items() if one.is_under_way)
        return HandshakesSnapshot(
            waiting=frozenset(wanted) - under_way,
            under_way=under_way,
            awaited=frozenset(key for key, one in wanted.items() if one.is_awaited),
            answered=frozenset(self._answered),
            arrived=self._arrived.qsize(),
        )

    def request(self, key: PeerKey) -> str | None:
        """Request the handshake with a peer for a load; repeated requests change nothing.

        Returns:
            Why it was refused; None when it was accepted.
        """
        wanted = self.wanted.get(key)
        if wanted is not None and wanted.limits is FOR_LOADS:
            return None
        host = _counted_host(key)
        why_full = self._why_full(host, FOR_LOADS)
        if wanted is not None and wanted.is_under_way:
            # A prewarm is not repeated: the load waits for it, and it arrives before the others. It
            # gets a load's place only if there is one. (It always got one at first. Then each
            # takeover freed a place for the next prewarm, and 240 handshakes with one host were under way.)
            wanted.is_awaited = True
            if why_full is None and self._under_way(FOR_LOADS).has_place(host):
                wanted.limits = FOR_LOADS
        elif why_full is not None:
            return why_full
        else:
            # To the end of the queue, also if it waits to be prewarmed.
            self.wanted.pop(key, None)
            self.wanted[key] = _WantedHandshake(FOR_LOADS, is_awaited=True)
        self._begin()
        return None

    def withdraw(self, key: PeerKey) -> bool:
        """No load waits for this peer any more: its handshake is not begun.

        Otherwise aborted requests would keep their places, and have their turns, before requests that still wait: 32
        ports of a host that drops packets kept its other engines waiting for 40 s.

        Returns:
            True if it was waiting.
        """
        wanted = self.wanted.get(key)
        if wanted is None or wanted.is_under_way or not wanted.is_awaited:
            return False
        del self.wanted[key]
        return True

    def request_ahead(self, key: PeerKey) -> None:
        """Request the handshake with a peer that no load waits for yet, if there is a place."""
        if key in self.wanted or self._why_full(_counted_host(key), AHEAD) is not None:
            return
        self.wanted[key] = _WantedHandshake(AHEAD, is_awaited=False)
        self._begin()

    def arrivals(self) -> Iterator[tuple[PeerKey, HandshakeResult]]:
        """Results of handshakes that have ended: all that loads wait for, and then at most one of the others."""
        while not self._arrived.empty():
            key, result = self._arrived.get()
            self.results[key] = result
        awaited = [key for key in self.results if self.wanted[key].is_awaited]
        others = [key for key in self.results if not self.wanted[key].is_awaited]
        # The caller connects each, which takes milliseconds of the thread that advances loads.
        for key in (*awaited, *others[:1]):
            result = self.results.pop(key)
            del self.wanted[key]
            self._remember(_counted_host(key), answered=_is_answer(result))
            self._begin()
            yield key, result

    def drop_waiting(self) -> list[PeerKey]:
        """Begin none of those that wait; those under way end by themselves. Returns the dropped peers."""
        dropped = [
            key for key, wanted in self.wanted.items() if not wanted.is_under_way
        ]
        for key in dropped:
            del self.wanted[key]
        return dropped

    def _why_full(self, host: str, limits: HandshakeLimits) -> str | None:
        """Why no engine of this host can be added; None when one can."""
        hosts = [
            _counted_host(key)
            for key, wanted in self.wanted.items()
            if wanted.limits is limits
        ]
        if len(hosts) >= limits.wanted:
            return f"{len(hosts)} other engines have not answered yet"
        of_host = hosts.count(host)
        is_unverified = host not in self._answered
        exceeds_its_limit = (
            is_unverified and of_host >= limits.wanted_of_unverified_host
        )
        # No host gets more places than are free, verified or not. A host that has answered, of
        # which 256 ports were named, most of them closed, had all places; no other engine was
        # connected until they had failed.
        exceeds_the_free = of_host >= limits.wanted - len(hosts)
        if exceeds_its_limit or exceeds_the_free:
            return f"{of_host} engines of this host have not answered yet"
        return None

    def _begin(self) -> None:
        """Begin the handshakes for which there is a place."""
        for key in (*self._next(FOR_LOADS), *self._next(AHEAD)):
            self.wanted[key].is_under_way = True
            self._begin_one(key, functools.partial(self._ended, key))

    def _next(self, limits: HandshakeLimits) -> list[PeerKey]:
        """The peers whose handshakes may begin now."""
        under_way = self._under_way(limits)
        begun: list[PeerKey] = []
        for key, wanted in self.wanted.items():
            if under_way.is_full():
                break
            if wanted.limits is not limits or wanted.is_under_way:
                continue
            host = _counted_host(key)
            if under_way.has_place(host):
                under_way.add(host)
                begun.append(key)
        return begun

    def _under_way(self, limits: HandshakeLimits) -> _UnderWay:
        under_way = _UnderWay(limits, self._answered)
        for key, wanted in self.wanted.items():
            if wanted.limits is limits and wanted.is_under_way:
                under_way.add(_counted_host(key))
        return under_way

    def _ended(self, key: PeerKey, result: HandshakeResult) -> None:
        self._arrived.put((key, result))
        self._wake()

    def _remember(self, host: str, *, answered: bool) -> None:
        self._answered.pop(host, None)
        if not answered:
            return
        self._answered[host] = None
        if len(self._answered) > limits.MAX_REMEMBERED:
            longest_ago = next(iter(self._answered))
            del self._answered[longest_ago]


def _is_answer(result: HandshakeResult) -> bool:
    """True if the host has answered; a refusal is an answer too."""
    if isinstance(result, Exception):
        return isinstance(result, (PeerRefused, PlanRefused, InputError))
    return True
