"""All producers that this worker knows, is getting to know, or has given up on for a while.

Introductions run on threads of their own, so a dead producer delays no other; everything that touches the fabric runs
on the transfer thread, which calls `step`.
"""

from __future__ import annotations

import logging
import queue
import random
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvferry.plan.refusal import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, InputError, KvferryError, PeerRefused
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.orders import FailureReason
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric import Fabric, Transfer, TransferState
from kvferry.worker.landing import Landing
from kvferry.worker.peer import Introduce, Peer, PeerKey, connect, disconnect
from kvferry.worker.staging import Staging
from kvferry.worker.unforeseen import give_back, has_ended

logger = logging.getLogger(__name__)

_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
_INTRODUCERS = 16
_MOST_ASKED = 256
_FORGET_FAILURES_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a peer cannot be read from at present."""

    reason: FailureReason
    text: str


@dataclass(slots=True)
class _Warming:
    peer: Peer
    reads: list[Transfer]
    cells: tuple[int, ...]
    deadline_s: float


@dataclass(slots=True)
class _GivenUp:
    why: Unavailable
    failures: int
    until_s: float


_Arrival = tuple[PeerKey, "tuple[EngineDescription, TransferPlan] | Exception"]


class PeerBook:
    """Peers by key.

    Args:
        introduce: fetches a description and plans it.
        wake: called from any thread when there is something for `step`.
        timeout_s: for the first read.
    """

    def __init__(
        self,
        fabric: Fabric,
        caches: KvCaches,
        staging: Staging | None,
        landing: Landing,
        introduce: Introduce,
        wake: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._fabric = fabric
        self._caches = caches
        self._staging = staging
        self._landing = landing
        self._introduce = introduce
        self._wake = wake
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_INTRODUCERS, thread_name_prefix="kvferry-handshake")
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._asked: set[PeerKey] = set()
        self._warming: dict[PeerKey, _Warming] = {}
        self._ready: dict[PeerKey, Peer] = {}
        self._given_up: dict[PeerKey, _GivenUp] = {}
        self._dying: list[_Warming] = []
        self._retired: list[Peer] = []

    def busy(self) -> bool:
        """Whether `step` must be called again soon without being woken."""
        return bool(self._warming)

    def burying(self) -> bool:
        """Whether `step` must be called again, at leisure: first reads were given up and have not ended."""
        return bool(self._dying)

    def get(self, key: PeerKey, now_s: float) -> Peer | Unavailable | None:
        """The peer, or why there is none, or None while it is being introduced."""
        if key in self._ready:
            return self._ready[key]
        given_up = self._given_up.get(key)
        if given_up is not None and now_s < given_up.until_s:
            return given_up.why
        if key not in self._asked and key not in self._warming:
            if len(self._asked) >= _MOST_ASKED:
                return Unavailable(FailureReason.HANDSHAKE, f"{_MOST_ASKED} other engines have not answered yet")
            self._asked.add(key)
            self._pool.submit(self._introduce_one, key)
        return None

    def step(self, now_s: float, in_use: Collection[PeerKey]) -> bool:
        """Bring introductions on. Returns whether anything changed.

        Args:
            in_use: peers that reads are in flight from; what belongs to them is kept.
        """
        changed = False
        while not self._arrivals.empty():
            key, found = self._arrivals.get()
            self._asked.discard(key)
            self._arrived(key, found, now_s)
            changed = True
        for key, warming in list(self._warming.items()):
            changed |= self._warm(key, warming, now_s)
        self._dying = [warming for warming in self._dying if not self._bury(warming)]
        for peer in [peer for peer in self._retired if peer.key not in in_use]:
            self._retired.remove(peer)
            disconnect(self._fabric, peer)
        return changed

    def lost(self, peer: Peer, why: str, now_s: float) -> None:
        """The peer is gone: forget it, so that the next load meets it anew. One that has been met anew is not."""
        if self._ready.get(peer.key) is peer:
            logger.warning("peer=%s is lost: %s", peer.key, why)
            del self._ready[peer.key]
            disconnect(self._fabric, peer)
            self._give_up(peer.key, Unavailable(FailureReason.TRANSFER, why), now_s)

    def close(self) -> None:
        """Forget everybody."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for peer in (*self._ready.values(), *self._retired):
            disconnect(self._fabric, peer)
        self._ready.clear()
        self._retired.clear()

    def _introduce_one(self, key: PeerKey) -> None:
        try:
            found: tuple[EngineDescription, TransferPlan] | Exception = self._introduce(key)
        except Exception as error:  # noqa: BLE001 - it crosses the thread and is judged in _arrived
            found = error
        self._arrivals.put((key, found))
        self._wake()

    def _arrived(self, key: PeerKey, found: tuple[EngineDescription, TransferPlan] | Exception, now_s: float) -> None:
        if isinstance(found, Exception):
            self._failed(key, found, now_s)
            return
        description, plan = found
        self._forget_former_lives(key)
        cells = self._landing.try_take(len(plan.routes))
        if cells is None:
            self._give_up(key, Unavailable(FailureReason.HANDSHAKE, "too many reads in flight"), now_s)
            return
        try:
            peer = connect(self._fabric, self._caches, self._staging, key, description, plan)
        except Exception as error:  # noqa: BLE001 - judged in _failed
            self._landing.give_back(cells)
            self._failed(key, error, now_s)
            return
        warming = self._warming[key] = _Warming(peer, [], cells, now_s + self._timeout_s)
        try:
            for cell, route in zip(cells, peer.routes, strict=True):
                where = np.array([cell], dtype=np.int32)
                first = np.zeros(1, dtype=np.int32)
                warming.reads.append(self._fabric.post_read(self._landing.descriptors, where, route.slots, first))
        except Exception as error:  # noqa: BLE001 - judged in _failed
            self._abandon(key, warming, error, now_s)

    def _warm(self, key: PeerKey, warming: _Warming, now_s: float) -> bool:
        """A real small read connects for certain, which nothing else in NIXL does."""
        try:
            states = [self._fabric.poll(read) for read in warming.reads]
        except Exception as error:  # noqa: BLE001 - judged in _failed
            self._abandon(key, warming, error, now_s)
            return True
        if any(state is TransferState.IN_FLIGHT for state in states):
            if now_s < warming.deadline_s:
                return False
            late = HandshakeFailed(f"the first read took longer than {self._timeout_s:g} s")
            self._abandon(key, warming, late, now_s)
            return True
        for read in warming.reads:
            give_back(self._fabric, read)
        self._landing.give_back(warming.cells)
        del self._warming[key]
        self._given_up.pop(key, None)
        self._ready[key] = warming.peer
        logger.info("peer=%s %s", key, warming.peer.plan.describe())
        return True

    def _abandon(self, key: PeerKey, warming: _Warming, error: Exception, now_s: float) -> None:
        del self._warming[key]
        self._failed(key, error, now_s)
        if not self._bury(warming):
            self._dying.append(warming)

    def _bury(self, warming: _Warming) -> bool:
        """Give everything back once no read can land any more; a read that was not aborted still may."""
        if not all(has_ended(self._fabric, read) for read in warming.reads):
            return False
        for read in warming.reads:
            give_back(self._fabric, read)
        self._landing.give_back(warming.cells)
        disconnect(self._fabric, warming.peer)
        return True

    def _failed(self, key: PeerKey, error: Exception, now_s: float) -> None:
        """It could not be met."""
        self._give_up(key, Unavailable(_reason(error), str(error) or repr(error)), now_s)
        if not isinstance(error, KvferryError):
            logger.error("peer=%s: the handshake failed in an unforeseen way", key, exc_info=error)

    def _give_up(self, key: PeerKey, why: Unavailable, now_s: float) -> None:
        """Back off: twice as long after every failure, jittered, so that a fleet does not knock in step."""
        for other in [k for k, v in self._given_up.items() if v.until_s + _FORGET_FAILURES_AFTER_S < now_s]:
            del self._given_up[other]
        failures = self._given_up[key].failures + 1 if key in self._given_up else 1
        pause = min(_LONGEST_BACK_OFF_S, _FIRST_BACK_OFF_S * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.5)  # noqa: S311
        self._given_up[key] = _GivenUp(why, failures, now_s + pause)
        logger.warning("peer=%s cannot be read from (%s), again in %.1f s: %s", key, why.reason.value, pause, why.text)

    def _forget_former_lives(self, key: PeerKey) -> None:
        """An engine that has restarted does not come back under its former boot."""
        for other in [other for other in self._ready if other[:3] == key[:3] and other.boot != key.boot]:
            self._retired.append(self._ready.pop(other))


def _reason(error: Exception) -> FailureReason:
    if isinstance(error, PlanRefused):
        return FailureReason.PLAN
    if isinstance(error, (PeerRefused, InputError)):
        return FailureReason.REFUSED
    return FailureReason.HANDSHAKE
