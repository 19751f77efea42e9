"""Handshakes waiting and under way: the producers that are asked for their description, and the limits on threads.

Clients choose the hosts that params name, so a host may be one that never answers and keeps a thread until the
handshake's timeout. Limits for *unverified* hosts, which have never answered or did not the last time, bound the cost
to other hosts:

- 48 of 64 handshakes at once may be with unverified hosts, 4 with any one of them; 16 are reserved for the others.
- So with up to 48 handshakes to silent hosts under way a live host is asked at once. With more of them it waits for
  at most one handshake's timeout for every 48 that were named before it. A host that has answered before does not
  wait for unverified ones at all.
- At most 256 handshakes wait or are under way, 32 of them with any one unverified host. More are refused, not queued.

These limits are for peers that a load waits for. Peers to be prewarmed have a lane of their own, so that they take no
place from a load; a load that needs one of them takes over its handshake, waiting or under way.

Each thread makes one handshake and ends.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, InputError, PeerRefused
from kvferry.protocol.handshake import EngineDescription
from kvferry.worker.peers.peer import Handshake, PeerKey


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """Limits on the number of handshakes. An *unverified* host has never answered, or did not the last time.

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


@dataclass(slots=True)
class HandshakeLane:
    """Handshakes that share limits."""

    limits: HandshakeLimits
    waiting: dict[PeerKey, None] = field(default_factory=dict)
    asking: set[PeerKey] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.asking)

    def __contains__(self, key: PeerKey) -> bool:
        return key in self.waiting or key in self.asking

    def why_full(self, host: str, answered: Container[str]) -> str | None:
        """Why no engine of this host can be added; None when one can."""
        if len(self) >= self.limits.asked:
            return f"{len(self)} other engines have not answered yet"
        if host not in answered:
            of_host = sum(other.host == host for other in (*self.waiting, *self.asking))
            if of_host >= self.limits.asked_of_unverified_host:
                return f"{of_host} engines of this host have not answered yet"
        return None

    def begin(self, answered: Container[str]) -> list[PeerKey]:
        """The peers to ask now; their handshakes are under way from here on."""
        limits, begun = self.limits, []
        hosts = Counter(key.host for key in self.asking)
        unverified = sum(count for host, count in hosts.items() if host not in answered)
        for key in list(self.waiting):
            if len(self.asking) >= limits.at_once:
                break
            is_unverified = key.host not in answered
            if is_unverified and unverified >= limits.unverified_at_once:
                continue
            if hosts[key.host] >= (limits.per_unverified_host if is_unverified else limits.per_host):
                continue
            del self.waiting[key]
            self.asking.add(key)
            hosts[key.host] += 1
            unverified += is_unverified
            begun.append(key)
        return begun


FOR_LOADS = HandshakeLimits(
    at_once=64, unverified_at_once=48, per_host=16, per_unverified_host=4, asked=256, asked_of_unverified_host=32
)
AHEAD = HandshakeLimits(
    at_once=8, unverified_at_once=2, per_host=4, per_unverified_host=1, asked=64, asked_of_unverified_host=8
)
"""Two unverified hosts: four plans are made at a time, and such a host can describe an engine that takes seconds to
plan."""

_HOSTS_REMEMBERED = 4096

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
        self._for_loads = HandshakeLane(FOR_LOADS)
        self._ahead = HandshakeLane(AHEAD)
        self._answered: dict[str, None] = {}

    def __len__(self) -> int:
        """Handshakes that wait or are under way."""
        return len(self._for_loads) + len(self._ahead)

    def __contains__(self, key: PeerKey) -> bool:
        return key in self._for_loads or key in self._ahead

    def ask(self, key: PeerKey) -> str | None:
        """Request the handshake with a peer for a load; repeated requests change nothing.

        Returns:
            Why it was refused; None when it was accepted.
        """
        if key in self._for_loads:
            return None
        if key in self._ahead.asking:
            self._ahead.asking.remove(key)
            self._for_loads.asking.add(key)
            self._begin()
            return None
        full = self._for_loads.why_full(key.host, self._answered)
        if full is not None:
            return full
        self._ahead.waiting.pop(key, None)
        self._for_loads.waiting[key] = None
        self._begin()
        return None

    def ask_ahead(self, key: PeerKey) -> None:
        """Request the handshake with a peer that no load waits for yet, if the lane is not full."""
        if key not in self and self._ahead.why_full(key.host, self._answered) is None:
            self._ahead.waiting[key] = None
            self._begin()

    def arrivals(self) -> Iterator[tuple[PeerKey, Found]]:
        """Results of handshakes that have ended: all that loads wait for, and then at most one of the others."""
        while not self._arrived.empty():
            key, found = self._arrived.get()
            self._found[key] = found
        awaited = [key for key in self._found if key in self._for_loads.asking]
        others = [key for key in self._found if key in self._ahead.asking]
        for key in (*awaited, *others[:1]):
            found = self._found.pop(key)
            self._for_loads.asking.discard(key)
            self._ahead.asking.discard(key)
            self._remember(key.host, answered=_is_answer(found))
            self._begin()
            yield key, found

    def has_arrivals(self) -> bool:
        """Whether `arrivals` has more; `wake` is not called for them."""
        return bool(self._found)

    def close(self) -> None:
        """Begin no further handshake. Those under way end by themselves; their results are dropped."""
        self._for_loads.waiting.clear()
        self._ahead.waiting.clear()

    def _begin(self) -> None:
        for key in (*self._for_loads.begin(self._answered), *self._ahead.begin(self._answered)):
            try:
                threading.Thread(target=self._run, args=(key,), name="kvferry-handshake", daemon=True).start()
            except RuntimeError as error:  # the system gives no more threads
                self._arrived.put((key, HandshakeFailed(f"no thread for the handshake: {error}")))
                self._wake()

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


def _is_answer(found: Found) -> bool:
    """Whether the host answered, a refusal included."""
    return not isinstance(found, Exception) or isinstance(found, (PeerRefused, PlanRefused, InputError))
