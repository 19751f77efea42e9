"""The producers that this worker is connected to, is connecting to, or backs off from.

Handshakes run on threads of their own; everything that uses the fabric runs on the transfer thread, which calls
`step`. A peer is forgotten, and everything that belongs to it given back, when it is lost, when another boot or engine
at its address is connected, or its own boot at another address, when nothing was read from it for `ttl_s`, or when
there are more than `most_peers`, the one that has been unused longest first. One that is being read from is kept until
the reads end.

Another boot of an engine at another address may be the same engine, restarted elsewhere, or a second one that was given
the same id: then both are read from in turn. So the one that is known is kept if it was used within `_NAMESAKE_S`.

A *static* peer is one that the configuration names: it does not expire, and is connected again after it was lost or
a first contact with it failed, until it has restarted or refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.errors import InputError, KvferryError, PeerRefused
from kvferry.protocol.orders import FailureReason
from kvferry.worker.peers.first_reads import FirstRead, FirstReads
from kvferry.worker.peers.handshakes import Backoff, Found, Handshakes, Unavailable
from kvferry.worker.peers.peer import Handshake, Peer, PeerKey, disconnect

logger = logging.getLogger(__name__)

_STATIC_CHECK_S = 0.5
"""Interval of the checks for static peers to connect, while some are not connected."""

_NAMESAKE_S = 60.0
"""An engine that was used this recently has hardly been restarted at another address: vLLM starts more slowly."""

__all__ = ["PeerRegistry", "Unavailable"]


@dataclass(slots=True)
class _Ready:
    peer: Peer
    used_s: float


class PeerRegistry:
    """Peers by key.

    Args:
        handshake: fetches a description and plans it.
        wake: called from any thread when there is something for `step`.
        ttl_s: after which an unused peer is forgotten; 0 or less for never.
        most_peers: peers that are known at once, not counting those that are being read from.

    Attributes:
        handshake_s: durations of the first contacts that have succeeded since they were last taken, each from the first
            request.
    """

    def __init__(
        self,
        first_reads: FirstReads,
        handshake: Handshake,
        wake: Callable[[], None],
        *,
        ttl_s: float = 3600.0,
        most_peers: int = 1024,
    ) -> None:
        self.first_reads = first_reads
        self._reader = first_reads.reader
        self._ttl_s = ttl_s
        self._most_peers = most_peers
        self._handshakes = Handshakes(handshake, wake)
        self._backoff = Backoff()
        self._ready: dict[PeerKey, _Ready] = {}  # the one used last is last
        self._retired: list[Peer] = []
        self._asked_s: dict[PeerKey, float] = {}
        self.handshake_s: list[float] = []
        self._static: dict[tuple[str, int], PeerKey] = {}  # by address
        self._static_check_s = 0.0

    def busy(self) -> bool:
        """Whether `step` must be called again soon without being woken."""
        return bool(self.first_reads) or self._handshakes.has_arrivals()

    def closing(self) -> bool:
        """Whether `step` must be called again, not urgently: first reads were given up and have not ended."""
        return self.first_reads.given_up() > 0

    @property
    def num_ready(self) -> int:
        """Peers that can be read from at once."""
        return len(self._ready)

    def next_s(self) -> float | None:
        """The latest time for the next `step` if nothing else happens: an unused peer expires, or a static one is to be
        connected."""
        due_s = (
            [self._static_check_s]
            if any(key not in self._ready for key in self._static.values())
            else []
        )
        if self._ttl_s > 0 and self._ready:
            due_s.append(next(iter(self._ready.values())).used_s + self._ttl_s)
        return min(due_s, default=None)

    def peers(self) -> Iterator[Peer]:
        """All peers that hold resources of the fabric."""
        yield from (known.peer for known in self._ready.values())
        yield from (first.peer for first in self.first_reads.all())
        yield from self._retired

    def describe(self) -> str:
        """Number of peers in each state, for an error text."""
        return (
            f"{len(self._ready)} ready, {len(self.first_reads)} warming, {self.first_reads.given_up()} retiring, "
            f"{len(self._retired)} retired, {len(self._handshakes)} asked, {len(self._backoff)} given up"
        )

    def get(self, key: PeerKey, now_s: float) -> Peer | Unavailable | None:
        """The peer, or why there is none, or None during its handshake."""
        if key in self._ready:
            return self._used(key, now_s)
        why = self._backoff.why_not(key, now_s)
        if why is not None:
            return why
        if key not in self.first_reads:
            full = self._handshakes.ask(key)
            if full is not None:
                return Unavailable(FailureReason.HANDSHAKE, full)
            self._asked_s.setdefault(key, now_s)
        return None

    def withdraw(self, keys: Iterable[PeerKey]) -> None:
        """No load waits for these peers any more. Handshakes with them that are under way go on."""
        for key in keys:
            if self._handshakes.withdraw(key):
                self._asked_s.pop(key, None)

    def prewarm_static(self, key: PeerKey, now_s: float) -> None:
        """Prewarm a peer that the configuration names and that has just answered: it becomes static, in place of the
        former one at its address."""
        self._static[key[:2]] = key
        self._static_check_s = 0.0
        self._backoff.answers(key)
        self.prewarm(key, now_s)

    def prewarm(self, key: PeerKey, now_s: float) -> None:
        """Connect to this peer before a load needs it, unless the registry is full or half of the entries are taken."""
        known = len(self._ready) + len(self.first_reads) + len(self._handshakes)
        if (
            key in self._ready
            or key in self.first_reads
            or self._backoff.why_not(key, now_s) is not None
            or known >= self._most_peers  # it would evict another peer
            or not self.first_reads.has_room()
        ):
            return
        self._handshakes.ask_ahead(key)
        if key in self._handshakes:
            self._asked_s.setdefault(key, now_s)

    def step(self, now_s: float, in_use: Collection[PeerKey]) -> bool:
        """Advance handshakes and first reads. Returns whether anything changed.

        Args:
            in_use: peers that reads are in flight from; they and their handles are kept.
        """
        changed = False
        for key in in_use:
            if key in self._ready:
                self._used(key, now_s)
        for key, found in self._handshakes.arrivals():
            self._arrived(key, found, now_s, in_use)
            changed = True
        for first, error in self.first_reads.step(now_s):
            if error is None:
                self._connected(first, now_s)
            else:
                self._failed(first.peer.key, error, now_s)
            changed = True
        if self._static and now_s >= self._static_check_s:
            self._static_check_s = now_s + _STATIC_CHECK_S
            for key in self._static.values():
                self.prewarm(key, now_s)
        self._retire_unused(now_s, in_use)
        self._disconnect_retired(in_use)
        return changed

    def lost(self, peer: Peer, why: str, now_s: float) -> None:
        """Forget a peer that is gone; the next load connects again. A peer that was reconnected already is kept."""
        known = self._ready.get(peer.key)
        if known is not None and known.peer is peer:
            logger.warning("peer=%s is lost: %s", peer.key, why)
            del self._ready[peer.key]
            disconnect(self._reader, peer)
            self._give_up(peer.key, Unavailable(FailureReason.TRANSFER, why), now_s)

    def close(self) -> None:
        """Forget all peers."""
        self._handshakes.close()
        for peer in (*(known.peer for known in self._ready.values()), *self._retired):
            disconnect(self._reader, peer)
        self._ready.clear()
        self._retired.clear()

    def _is_static(self, key: PeerKey) -> bool:
        return self._static.get(key[:2]) == key

    def _used(self, key: PeerKey, now_s: float) -> Peer:
        known = self._ready.pop(key)
        known.used_s = now_s
        self._ready[key] = known
        return known.peer

    def _arrived(
        self, key: PeerKey, found: Found, now_s: float, in_use: Collection[PeerKey]
    ) -> None:
        if isinstance(found, Exception):
            self._failed(key, found, now_s)
            return
        description, plan = found
        self._retire_former_lives(key, now_s)
        self._disconnect_retired(
            in_use
        )  # now: an engine at a new address has the agent names of its retired peer
        try:
            self.first_reads.begin(key, description, plan, self._asked_s.pop(key, now_s), now_s)
        except Exception as error:  # noqa: BLE001 - handled in _failed
            self._failed(key, error, now_s)

    def _connected(self, first: FirstRead, now_s: float) -> None:
        key, described_s = first.peer.key, first.arrived_s - first.asked_s
        self._backoff.succeeded(key)
        self._ready[key] = _Ready(first.peer, now_s)
        # The peer may have been prepared within this step, which began at `now_s`.
        self.handshake_s.append(max(now_s - first.asked_s, described_s + first.prepared_s))
        line, *more = first.peer.plan.describe_all()
        logger.info(
            "peer=%s connected in %.1f ms, of which described and planned %.1f, prepared %.1f: %s",
            key,
            self.handshake_s[-1] * 1e3,
            described_s * 1e3,
            first.prepared_s * 1e3,
            line,
        )
        for one in more:
            logger.debug("peer=%s %s", key, one)

    def _failed(self, key: PeerKey, error: Exception, now_s: float) -> None:
        """Back off from a peer whose first contact failed."""
        reason = _reason(error)
        if reason is not FailureReason.HANDSHAKE and self._is_static(key):
            del self._static[key[:2]]
        self._give_up(key, Unavailable(reason, str(error) or repr(error)), now_s)
        if not isinstance(error, KvferryError):
            logger.error(
                "peer=%s: the handshake failed with an internal error", key, exc_info=error
            )

    def _give_up(self, key: PeerKey, why: Unavailable, now_s: float) -> None:
        self._asked_s.pop(key, None)
        backoff_s = self._backoff.failed(key, why, now_s)
        logger.warning(
            "peer=%s cannot be read from (%s), again in %.1f s: %s",
            key,
            why.reason.value,
            backoff_s,
            why.text,
        )

    def _retire_former_lives(self, key: PeerKey, now_s: float) -> None:
        """Retire what was known at this address, this boot elsewhere, and this engine elsewhere if it seems over."""
        for other, known in list(self._ready.items()):
            if other == key or (other.engine_id != key.engine_id and other[:2] != key[:2]):
                continue
            unused_s = now_s - known.used_s
            is_replaced = other[:2] == key[:2] or other.boot == key.boot
            if is_replaced or unused_s > _NAMESAKE_S:
                logger.info("peer=%s is forgotten: it is %s now", other, key)
                self._retired.append(self._ready.pop(other).peer)
            else:
                logger.warning(
                    "peer=%s has the engine id of peer=%s, which was used %.0f s ago and is kept: if both run, give "
                    "each an engine_id of its own in its kv_transfer_config",
                    key,
                    other,
                    unused_s,
                )

    def _retire_unused(self, now_s: float, in_use: Collection[PeerKey]) -> None:
        """Retire expired peers. `_ready` is ordered by last use, and `step` has just updated the peers in use."""
        while self._ready:
            key, known = next(iter(self._ready.items()))
            is_old = 0 < self._ttl_s <= now_s - known.used_s
            if is_old and self._is_static(key):
                self._used(key, now_s)
                continue
            if key in in_use or not (is_old or len(self._ready) > self._most_peers):
                return
            logger.info("peer=%s is forgotten: unused for %.0f s", key, now_s - known.used_s)
            self._retired.append(self._ready.pop(key).peer)

    def _disconnect_retired(self, in_use: Collection[PeerKey]) -> None:
        for peer in [peer for peer in self._retired if peer.key not in in_use]:
            self._retired.remove(peer)
            disconnect(self._reader, peer)


def _reason(error: Exception) -> FailureReason:
    if isinstance(error, PlanRefused):
        return FailureReason.PLAN
    if isinstance(error, (PeerRefused, InputError)):
        return FailureReason.REFUSED
    return FailureReason.HANDSHAKE
