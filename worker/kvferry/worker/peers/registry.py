"""The producers that this worker is connected to, is connecting to, or backs off from.

Handshakes run on the link's loop; everything that uses the fabric runs on the transfer thread, which calls
`step`. A peer is forgotten, and everything that belongs to it given back,

- when it is lost;
- when another boot or engine at its address is connected, or its own boot at another address;
- when another boot of its engine is connected at another address, unless it was used a short time ago;
- when nothing was read from it for `ttl_s`;
- when there are more than `max_peers`, the one that has been unused longest first.

One that is being read from is kept until the reads end.

A *static* peer is one that the configuration names: it does not expire, and is connected again after it was lost or
a first contact with it failed, until it has restarted or refuses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from kvferry.link import limits
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.errors import InputError, KvferryError, PeerRefused
from kvferry.protocol.hosts import ChannelAddress
from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.peers.first_contact import FirstRead, FirstReads
from kvferry.worker.peers.handshakes import (
    BeginHandshake,
    HandshakeResult,
    Handshakes,
    HandshakesSnapshot,
)
from kvferry.worker.peers.peer import Peer, PeerKey, disconnect

logger = logging.getLogger(__name__)


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


class FailedPeers:
    """Peers whose first contact failed, and how long each is left alone, by the table of the link (`AVOID`). A success
    ends the pause.

    They are for one boot of a peer: one that has restarted is connected at once.
    """

    def __init__(self) -> None:
        # The latest failure is last.
        self._failures: dict[PeerKey, _Failure] = {}

    def __len__(self) -> int:
        """Number of peers with a remembered failure."""
        return len(self._failures)

    def why_not(self, key: PeerKey, now_s: float) -> Unavailable | None:
        """Why not to connect to a peer now; None when it may be tried."""
        failure = self._failures.get(key)
        if failure is None or now_s >= failure.until_s:
            return None
        return failure.why

    def failed(self, key: PeerKey, why: Unavailable, now_s: float) -> float:
        """Record that a peer's first contact failed.

        Returns:
            The pause in seconds.
        """
        failures = 1
        former = self._failures.pop(key, None)
        if former is not None:
            failures = former.failures + 1
        delay_s = limits.AVOID.delay_s(failures)
        self._failures[key] = _Failure(why, failures, now_s + delay_s)
        if len(self._failures) > limits.MAX_REMEMBERED:
            oldest = next(iter(self._failures))
            del self._failures[oldest]
        return delay_s

    def answers(self, key: PeerKey) -> None:
        """End the pause of a peer that has just answered elsewhere, if its last failure was a missing answer.

        A refusal stays: the peer would refuse again.
        """
        failure = self._failures.get(key)
        if failure is None:
            return
        if failure.why.reason in (FailureReason.HANDSHAKE, FailureReason.TRANSFER):
            del self._failures[key]

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a peer whose first contact succeeded."""
        self._failures.pop(key, None)


_STATIC_CHECK_S = 0.5
"""Interval of the checks for static peers to connect, while some are not connected."""

CHECK_S = 0.25
"""Interval of the checks whether the processes of mapped peers have ended, and of those for peers to forget. With the
turns of an idle thread, which are as far apart, an end is noticed within half a second."""

# Another boot of an engine at another address may be the same engine, restarted elsewhere, or a
# second one that was given the same id: then both are read from in turn, and must not evict each
# other. An engine that was used this recently has hardly been restarted: vLLM starts more slowly.
_NAMESAKE_S = 60.0
"""An engine that was used within this time is kept when another boot of its id is connected elsewhere."""


@dataclass(slots=True)
class _Ready:
    peer: Peer
    used_s: float


@dataclass(frozen=True, slots=True)
class PeerRegistrySnapshot:
    """The registry at one moment.

    Attributes:
        ready: peers that can be read from at once, the one used last is last.
        retired: peers that were forgotten and are still read from.
        static: peers that the configuration names.
        handshakes: with further peers.
    """

    ready: tuple[PeerKey, ...]
    retired: int
    static: frozenset[PeerKey]
    handshakes: HandshakesSnapshot


class PeerRegistry:
    """Peers by key.

    Args:
        begin_handshake: fetches a description and plans it.
        wake: called from any thread when there is something for `step`.
        ttl_s: after which an unused peer is forgotten; 0 or less for never.
        max_peers: peers that are known at once, not counting those that are being read from.

    Attributes:
        ready: peers that can be read from at once; the one used last is last.
        handshake_s: durations of the first contacts that have succeeded since they were last taken, each from the first
            request.
    """

    def __init__(
        self,
        first_reads: FirstReads,
        begin_handshake: BeginHandshake,
        wake: Callable[[], None],
        *,
        ttl_s: float = 3600.0,
        max_peers: int = 1024,
    ) -> None:
        self.first_reads = first_reads
        self._reader = first_reads.reader
        self._ttl_s = ttl_s
        self._max_peers = max_peers
        self._handshakes = Handshakes(begin_handshake, wake)
        self._failed_peers = FailedPeers()
        self.ready: dict[PeerKey, _Ready] = {}
        # Forgotten, and kept until the reads from them have ended.
        self._retired: list[Peer] = []
        # When the handshake was first requested.
        self._asked_s: dict[PeerKey, float] = {}
        self.handshake_s: list[float] = []
        # By address.
        self._static: dict[ChannelAddress, PeerKey] = {}
        self._static_check_s = 0.0
        self._checked_s = -math.inf
        self._is_paused = False

    def busy(self) -> bool:
        """True if `step` must be called again soon without being woken."""
        return bool(self.first_reads.under_way or self._handshakes.results)

    @property
    def static(self) -> tuple[PeerKey, ...]:
        """The peers that the configuration names."""
        return tuple(self._static.values())

    def snapshot(self) -> PeerRegistrySnapshot:
        """The peers now. May be called on any thread."""
        return PeerRegistrySnapshot(
            ready=tuple(self.ready),
            retired=len(self._retired),
            static=frozenset(self._static.values()),
            handshakes=self._handshakes.snapshot(),
        )

    def next_s(self) -> float | None:
        """The latest time for the next `step` if nothing else happens.

        Then an unused peer expires, or a static one is to be connected.
        """
        due_s: list[float] = []
        for key in self._static.values():
            if key not in self.ready:
                due_s.append(self._static_check_s)
                break
        if self._ttl_s > 0 and self.ready:
            unused_longest = next(iter(self.ready.values()))
            expires_s = unused_longest.used_s + self._ttl_s
            due_s.append(max(expires_s, self._checked_s + CHECK_S))
        return min(due_s, default=None)

    def peers(self) -> Iterator[Peer]:
        """All peers that hold resources of the fabric."""
        for known in self.ready.values():
            yield known.peer
        for first_read in self.first_reads.all():
            yield first_read.peer
        yield from self._retired

    def get(self, key: PeerKey, now_s: float) -> Peer | Unavailable | None:
        """The peer, or why there is none, or None during its handshake."""
        if key in self.ready:
            return self._used(key, now_s)
        why_not = self._failed_peers.why_not(key, now_s)
        if why_not is not None:
            return why_not
        if key in self.first_reads.under_way:
            return None
        why_refused = self._handshakes.request(key)
        if why_refused is not None:
            return Unavailable(FailureReason.HANDSHAKE, why_refused)
        self._asked_s.setdefault(key, now_s)
        return None

    def withdraw(self, keys: Iterable[PeerKey]) -> None:
        """No load waits for these peers any more. Handshakes with them that are under way go on."""
        for key in keys:
            if self._handshakes.withdraw(key):
                self._asked_s.pop(key, None)

    def prewarm_static(self, key: PeerKey, now_s: float) -> None:
        """Prewarm a peer that the configuration names and that has just answered.

        It becomes static, in place of the former one at its address.
        """
        self._static[key.address] = key
        self._static_check_s = 0.0
        self._failed_peers.answers(key)
        self.prewarm(key, now_s)

    def prewarm(self, key: PeerKey, now_s: float) -> None:
        """Connect to this peer before a load needs it, unless the registry is full or half of the entries are taken."""
        if key in self.ready or key in self.first_reads.under_way:
            return
        if self._failed_peers.why_not(key, now_s) is not None:
            return
        # With as many known already it would evict another peer. And loads need the entries more.
        connecting = len(self.first_reads.under_way) + len(self._handshakes.wanted)
        known = len(self.ready) + connecting
        if known >= self._max_peers or not self.first_reads.has_room():
            return
        self._handshakes.request_ahead(key)
        if key in self._handshakes.wanted:
            self._asked_s.setdefault(key, now_s)

    def step(self, now_s: float, in_use: Collection[PeerKey]) -> bool:
        """Advance handshakes and first reads.

        Args:
            in_use: peers that reads are in flight from; they and their handles are kept.

        Returns:
            True if anything changed.
        """
        has_changed = False
        if self._is_paused:
            self.first_reads.step(now_s)
            return False
        for key in in_use:
            if key in self.ready:
                self._used(key, now_s)
        # The thread turns thousands of times for each contact: without one nothing is asked.
        if self._handshakes.wanted:
            for key, result in self._handshakes.arrivals():
                self._arrived(key, result, now_s, in_use)
                has_changed = True
        if self.first_reads.under_way or self.first_reads.given_up:
            for first_read, error in self.first_reads.step(now_s):
                if error is None:
                    self._connected(first_read, now_s)
                else:
                    self._failed(first_read.peer.key, error, now_s)
                has_changed = True
        if self._static and now_s >= self._static_check_s:
            self._static_check_s = now_s + _STATIC_CHECK_S
            for key in self._static.values():
                self.prewarm(key, now_s)
        if has_changed or now_s >= self._checked_s + CHECK_S:
            self._checked_s = now_s
            has_changed |= self._lose_exited(now_s)
            self._retire_unused(now_s, in_use)
        if self._retired:
            self._disconnect_retired(in_use)
        return has_changed

    def pause(self) -> None:
        """Connect to nobody until `resume`. First reads are given up, and end as `FirstReads.given_up` tells."""
        self._is_paused = True
        # Who asks for one of them after `resume` begins anew, and so does its time.
        for key in self._handshakes.drop_waiting():
            self._asked_s.pop(key, None)
        self.first_reads.give_up_all()

    def resume(self) -> None:
        """Connect again."""
        self._is_paused = False

    def lost(self, peer: Peer, why: str, now_s: float) -> None:
        """Forget a peer that is gone; the next load connects again."""
        known = self.ready.get(peer.key)
        # Several loads notice the same death: a peer that was connected again already is kept.
        if known is None or known.peer is not peer:
            return
        logger.warning("peer=%s is lost: %s", peer.key, why)
        del self.ready[peer.key]
        disconnect(self._reader, peer)
        self._give_up(peer.key, Unavailable(FailureReason.TRANSFER, why), now_s)

    def _lose_exited(self, now_s: float) -> bool:
        """Forget the mapped peers whose process has ended. Returns whether there were any.

        Their memory stays taken until it is unmapped, and without reads over the fabric nothing else would tell.
        """
        exited = [
            known.peer for known in self.ready.values() if known.peer.has_exited()
        ]
        for peer in exited:
            self.lost(peer, "its process has ended", now_s)
        return bool(exited)

    def close(self) -> None:
        """Forget all peers."""
        self._handshakes.drop_waiting()
        for known in self.ready.values():
            disconnect(self._reader, known.peer)
        for peer in self._retired:
            disconnect(self._reader, peer)
        self.ready.clear()
        self._retired.clear()

    def _is_static(self, key: PeerKey) -> bool:
        return self._static.get(key.address) == key

    def _used(self, key: PeerKey, now_s: float) -> Peer:
        """The peer, which is now the one used last."""
        known = self.ready.pop(key)
        known.used_s = now_s
        self.ready[key] = known
        return known.peer

    def _arrived(
        self,
        key: PeerKey,
        result: HandshakeResult,
        now_s: float,
        in_use: Collection[PeerKey],
    ) -> None:
        """Begin the first read from a peer that was planned."""
        if isinstance(result, Exception):
            self._failed(key, result, now_s)
            return
        description, plan = result
        self._retire_former_lives(key, now_s)
        # Before the first read: an engine at a new address has the agent names of its retired peer,
        # and the fabric refuses agents that it knows.
        self._disconnect_retired(in_use)
        asked_s = self._asked_s.pop(key, now_s)
        try:
            self.first_reads.begin(key, description, plan, asked_s, now_s)
        except Exception as error:  # noqa: BLE001 - handled in _failed
            self._failed(key, error, now_s)

    def _connected(self, first_read: FirstRead, now_s: float) -> None:
        """A first read is complete: the peer can be read from."""
        peer = first_read.peer
        self._failed_peers.succeeded(peer.key)
        self.ready[peer.key] = _Ready(peer, now_s)
        described_s = first_read.arrived_s - first_read.asked_s
        # The peer may have been prepared within this step, which began at `now_s`.
        took_s = max(now_s - first_read.asked_s, described_s + first_read.prepared_s)
        self.handshake_s.append(took_s)
        line, *more_lines = peer.plan.describe_all()
        way = ""
        if peer.why_not_mapped is not None:
            way = f"; over the fabric, not mapped: {peer.why_not_mapped}"
        logger.info(
            "peer=%s connected in %.1f ms, of which described and planned %.1f, prepared %.1f: %s%s",
            peer.key,
            took_s * 1e3,
            described_s * 1e3,
            first_read.prepared_s * 1e3,
            line,
            way,
        )
        if peer.why_slow is not None:
            logger.warning("peer=%s %s", peer.key, peer.why_slow)
        for more in more_lines:
            logger.debug("peer=%s %s", peer.key, more)

    def _failed(self, key: PeerKey, error: Exception, now_s: float) -> None:
        """Back off from a peer whose first contact failed."""
        reason = _reason(error)
        # A static peer that has restarted or refuses is not asked again. Its new life becomes static
        # when it answers (`prewarm_static`).
        if reason is not FailureReason.HANDSHAKE and self._is_static(key):
            del self._static[key.address]
        self._give_up(key, Unavailable(reason, str(error) or repr(error)), now_s)
        if not isinstance(error, KvferryError):
            internal_errors.exception(
                "peer=%s: the handshake failed with an internal error", key, error=error
            )

    def _give_up(self, key: PeerKey, why: Unavailable, now_s: float) -> None:
        self._asked_s.pop(key, None)
        backoff_s = self._failed_peers.failed(key, why, now_s)
        logger.warning(
            "peer=%s cannot be read from (%s), again in %.1f s: %s",
            key,
            why.reason.value,
            backoff_s,
            why.text,
        )

    def _retire_former_lives(self, key: PeerKey, now_s: float) -> None:
        """Retire what was known at this address, this boot elsewhere, and this engine elsewhere if it seems over."""
        for other, known in list(self.ready.items()):
            is_same_address = other.address == key.address
            is_same_engine = other.engine_id == key.engine_id
            if other == key or not (is_same_address or is_same_engine):
                continue
            unused_s = now_s - known.used_s
            is_replaced = is_same_address or other.boot == key.boot
            if is_replaced or unused_s > _NAMESAKE_S:
                logger.info("peer=%s is forgotten: it is %s now", other, key)
                del self.ready[other]
                self._retired.append(known.peer)
            else:
                logger.warning(
                    "peer=%s has the engine id of peer=%s, which was used %.0f s ago and is kept: if both run, give "
                    "each an engine_id of its own in its kv_transfer_config",
                    key,
                    other,
                    unused_s,
                )

    def _retire_unused(self, now_s: float, in_use: Collection[PeerKey]) -> None:
        """Retire expired peers."""
        # Peers are ordered by last use, and `step` has just updated those in use: the first one
        # that stays ends the search.
        while self.ready:
            key, known = next(iter(self.ready.items()))
            is_expired = 0 < self._ttl_s <= now_s - known.used_s
            if is_expired and self._is_static(key):
                self._used(key, now_s)
                continue
            are_too_many = len(self.ready) > self._max_peers
            if key in in_use or not (is_expired or are_too_many):
                return
            logger.info(
                "peer=%s is forgotten: unused for %.0f s", key, now_s - known.used_s
            )
            del self.ready[key]
            self._retired.append(known.peer)

    def _disconnect_retired(self, in_use: Collection[PeerKey]) -> None:
        for peer in list(self._retired):
            if peer.key not in in_use:
                self._retired.remove(peer)
                disconnect(self._reader, peer)


def _reason(error: Exception) -> FailureReason:
    if isinstance(error, PlanRefused):
        return FailureReason.PLAN
    if isinstance(error, (PeerRefused, InputError)):
        return FailureReason.REFUSED
    return FailureReason.HANDSHAKE
