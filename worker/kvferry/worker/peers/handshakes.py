"""Handshakes waiting and under way, the limits on their threads, and backoff from peers that failed.

Clients choose the hosts that params name, so a host may be one that never answers and keeps a thread until the
handshake's timeout. Limits for *unverified* hosts, which have never answered or did not the last time, bound the cost
to other hosts:

- 48 of 64 handshakes at once may be with unverified hosts, 4 with any one of them; 16 are reserved for the others.
- So with up to 48 handshakes to silent hosts under way a live host is asked at once. With more of them it waits for
  at most one handshake's timeout for every 48 that were named before it. A host that has answered before does not
  wait for unverified ones at all.
- At most 256 handshakes wait or are under way, 32 of them with any one unverified host, and with any host no more than
  there are places free. More are refused, not queued.

The last rule is for hosts that have answered: one of which 256 ports were named, most of them closed, would otherwise
have all places, and no other engine would be connected until they have failed.

These limits are for peers that a load waits for. Peers to be prewarmed have limits of their own, so that they take no
place from a load. A load that needs one of them does not ask again; the handshake gets a load's place if there is one,
and keeps its own otherwise. (It always got one at first. Then each takeover freed a place for the next prewarm, and 240
threads waited for one host.)

Each thread makes one handshake and ends.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, InputError, PeerRefused
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.side_channel.connection import backoff_s
from kvferry.protocol.side_channel.hosts import one_spelling
from kvferry.worker.peers.peer import Handshake, PeerKey


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """Limits on the number of handshakes; see the module.

    Attributes:
        at_once, unverified_at_once: under way, with all hosts and with all unverified ones.
        per_host, per_unverified_host: under way with one of them.
        asked, asked_of_unverified_host: waiting or under way.
    """

    at_once: int
    unverified_at_once: int
    per_host: int
    per_unverified_host: int
    asked: int
    asked_of_unverified_host: int


FOR_LOADS = HandshakeLimits(
    at_once=64,
    unverified_at_once=48,
    per_host=16,
    per_unverified_host=4,
    asked=256,
    asked_of_unverified_host=32,
)
AHEAD = HandshakeLimits(
    at_once=8,
    unverified_at_once=2,
    per_host=4,
    per_unverified_host=1,
    asked=64,
    asked_of_unverified_host=8,
)
"""Two unverified hosts: four plans are made at a time, and such a host can describe an engine that takes seconds to
plan."""

_HOSTS_REMEMBERED = 4096


@dataclass(slots=True)
class _WantedHandshake:
    """A handshake that waits or is under way.

    Attributes:
        limits: in which it has a place.
        is_awaited: whether a load waits for it.
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
        self._of_host: Counter[str] = Counter()
        self._all = 0
        self._unverified = 0

    def add(self, host: str) -> None:
        self._of_host[host] += 1
        self._all += 1
        self._unverified += host not in self._answered

    def is_full(self) -> bool:
        return self._all >= self._limits.at_once

    def has_place(self, host: str) -> bool:
        """Whether one more handshake with this host may begin."""
        if self.is_full():
            return False
        if host in self._answered:
            return self._of_host[host] < self._limits.per_host
        is_crowded = self._unverified >= self._limits.unverified_at_once
        return not is_crowded and self._of_host[host] < self._limits.per_unverified_host


def _host(key: PeerKey) -> str:
    """A peer's host as it is counted."""
    return one_spelling(key.host)


Found = tuple[EngineDescription, TransferPlan] | Exception


class Handshakes:
    """See the module. `ask` and `arrivals` belong to one thread.

    Args:
        handshake: fetches a description and plans it; waits.
        wake: called from any thread when a handshake has ended.
    """

    def __init__(self, handshake: Handshake, wake: Callable[[], None]) -> None:
        self._handshake = handshake
        self._wake = wake
        self._arrived: queue.SimpleQueue[tuple[PeerKey, Found]] = queue.SimpleQueue()
        self._found: dict[PeerKey, Found] = {}
        self._asked: dict[PeerKey, _WantedHandshake] = {}  # in the order in which they begin
        self._answered: dict[str, None] = {}

    def __len__(self) -> int:
        """Handshakes that wait or are under way."""
        return len(self._asked)

    def __contains__(self, key: PeerKey) -> bool:
        return key in self._asked

    def ask(self, key: PeerKey) -> str | None:
        """Request the handshake with a peer for a load; repeated requests change nothing.

        Returns:
            Why it was refused; None when it was accepted.
        """
        asked = self._asked.get(key)
        if asked is not None and asked.limits is FOR_LOADS:
            return None
        full = self._why_full(_host(key), FOR_LOADS)
        if asked is not None and asked.is_under_way:
            asked.is_awaited = True
            if full is None and self._under_way(FOR_LOADS).has_place(_host(key)):
                asked.limits = FOR_LOADS
        elif full is not None:
            return full
        else:
            self._asked.pop(key, None)
            self._asked[key] = _WantedHandshake(FOR_LOADS, is_awaited=True)
        self._begin()
        return None

    def withdraw(self, key: PeerKey) -> bool:
        """No load waits for this peer any more: its handshake is not begun. Returns whether it was waiting.

        Otherwise aborted requests would keep their places, and have their turns, before requests that still wait.
        """
        asked = self._asked.get(key)
        if asked is None or asked.is_under_way or not asked.is_awaited:
            return False
        del self._asked[key]
        return True

    def ask_ahead(self, key: PeerKey) -> None:
        """Request the handshake with a peer that no load waits for yet, if there is a place."""
        if key not in self._asked and self._why_full(_host(key), AHEAD) is None:
            self._asked[key] = _WantedHandshake(AHEAD, is_awaited=False)
            self._begin()

    def arrivals(self) -> Iterator[tuple[PeerKey, Found]]:
        """Results of handshakes that have ended: all that loads wait for, and then at most one of the others."""
        while not self._arrived.empty():
            key, found = self._arrived.get()
            self._found[key] = found
        awaited = [key for key in self._found if self._asked[key].is_awaited]
        others = [key for key in self._found if not self._asked[key].is_awaited]
        for key in (*awaited, *others[:1]):
            found = self._found.pop(key)
            del self._asked[key]
            # A refusal is an answer too.
            is_answer = not isinstance(found, Exception) or isinstance(
                found, (PeerRefused, PlanRefused, InputError)
            )
            self._remember(_host(key), answered=is_answer)
            self._begin()
            yield key, found

    def has_arrivals(self) -> bool:
        """Whether `arrivals` has more; `wake` is not called for them."""
        return bool(self._found)

    def close(self) -> None:
        """Begin no further handshake. Those under way end by themselves; their results are dropped."""
        self._asked = {key: asked for key, asked in self._asked.items() if asked.is_under_way}

    def _why_full(self, host: str, limits: HandshakeLimits) -> str | None:
        """Why no engine of this host can be added; None when one can."""
        hosts = [_host(key) for key, asked in self._asked.items() if asked.limits is limits]
        if len(hosts) >= limits.asked:
            return f"{len(hosts)} other engines have not answered yet"
        of_host = hosts.count(host)
        is_over = host not in self._answered and of_host >= limits.asked_of_unverified_host
        if is_over or of_host >= limits.asked - len(hosts):
            return f"{of_host} engines of this host have not answered yet"
        return None

    def _begin(self) -> None:
        for key in (*self._next(FOR_LOADS), *self._next(AHEAD)):
            self._asked[key].is_under_way = True
            try:
                threading.Thread(
                    target=self._run, args=(key,), name="kvferry-handshake", daemon=True
                ).start()
            except RuntimeError as error:  # the system gives no more threads
                self._arrived.put((key, HandshakeFailed(f"no thread for the handshake: {error}")))
                self._wake()

    def _next(self, limits: HandshakeLimits) -> list[PeerKey]:
        """The peers to ask now."""
        under_way = self._under_way(limits)
        begun: list[PeerKey] = []
        for key, asked in self._asked.items():
            if under_way.is_full():
                break
            if (
                asked.limits is limits
                and not asked.is_under_way
                and under_way.has_place(_host(key))
            ):
                under_way.add(_host(key))
                begun.append(key)
        return begun

    def _under_way(self, limits: HandshakeLimits) -> _UnderWay:
        counted = _UnderWay(limits, self._answered)
        for key, asked in self._asked.items():
            if asked.limits is limits and asked.is_under_way:
                counted.add(_host(key))
        return counted

    def _run(self, key: PeerKey) -> None:
        try:
            found: Found = self._handshake(key)
        except Exception as error:  # noqa: BLE001 - passed to the thread that takes `arrivals`
            found = error
        self._arrived.put((key, found))
        self._wake()

    def _remember(self, host: str, *, answered: bool) -> None:
        self._answered.pop(host, None)
        if answered:
            self._answered[host] = None
            if len(self._answered) > _HOSTS_REMEMBERED:
                del self._answered[next(iter(self._answered))]


FIRST_S = 0.5
LONGEST_S = 30.0
_MOST_FAILURES = 4096


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a peer cannot be read from at present."""

    reason: FailureReason
    text: str


@dataclass(frozen=True, slots=True)
class _Failure:
    why: Unavailable
    failures: int
    until_s: float


class Backoff:
    """Pauses that double with every failure, with jitter so that a fleet does not retry in step; a success ends them.

    They are for one boot of a peer: one that has restarted is connected at once.
    """

    def __init__(self) -> None:
        self._failures: dict[PeerKey, _Failure] = {}  # the latest one last

    def __len__(self) -> int:
        """Number of peers with a remembered failure."""
        return len(self._failures)

    def why_not(self, key: PeerKey, now_s: float) -> Unavailable | None:
        """Why not to connect to a peer now; None when it may be tried."""
        failure = self._failures.get(key)
        return failure.why if failure is not None and now_s < failure.until_s else None

    def failed(self, key: PeerKey, why: Unavailable, now_s: float) -> float:
        """Record that a peer's first contact failed.

        Returns:
            The backoff in seconds.
        """
        former = self._failures.pop(key, None)
        failures = former.failures + 1 if former is not None else 1
        delay_s = backoff_s(failures, FIRST_S, LONGEST_S)
        self._failures[key] = _Failure(why, failures, now_s + delay_s)
        if len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]
        return delay_s

    def answers(self, key: PeerKey) -> None:
        """End the pause of a peer that has just answered elsewhere, if its last failure was a missing answer."""
        failure = self._failures.get(key)
        if failure is not None and failure.why.reason in (
            FailureReason.HANDSHAKE,
            FailureReason.TRANSFER,
        ):
            del self._failures[key]

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a peer whose first contact succeeded."""
        self._failures.pop(key, None)
