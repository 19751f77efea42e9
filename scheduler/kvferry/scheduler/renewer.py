"""The consumer's half of the side channel: one thread that renews leases and gives them back.

Nothing here waits for an answer or for a name, so a dead producer delays nobody: ZMQ connects in the background and
drops what it cannot deliver.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable

from kvferry.protocol.handshake import MAX_RENEWALS, Release, Renew, encode
from kvferry.scheduler.consumer.ledger import GiveBack, Keep, LeaseCommand, LeaseKey, RemoteLease
from kvferry.scheduler.host_names import Found
from kvferry.scheduler.peer_sockets import Endpoint, PeerSockets
from kvferry.scheduler.producer.ledger import HEARTBEATS_PER_LEASE
from kvferry.scheduler.tally import Tally

logger = logging.getLogger(__name__)

_LINGER_MS = 500
_NAMES_S = 1.0
_JOIN_S = 5.0


class LeaseRenewer:
    """Carries out `Keep`, `Drop` and `GiveBack` until `close`.

    A kept lease is renewed when a sixth of its time is over, or at once if so told, together with all others of its
    producer.

    Args:
        tally: counts `heartbeats`, `leases_given_back` and `side_channel_errors`.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._inbox: queue.SimpleQueue[LeaseCommand | Found | None] = queue.SimpleQueue()
        self._kept: dict[Endpoint, dict[LeaseKey, RemoteLease]] = {}
        self._due: dict[Endpoint, float] = {}
        self._sockets = PeerSockets(self._inbox.put, tally)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvferry-renewer", daemon=True)
        self._thread.start()

    def submit(self, commands: Iterable[LeaseCommand]) -> None:
        """Hand over commands; returns at once."""
        for command in commands:
            self._inbox.put(command)

    def close(self) -> None:
        """Stop the thread after everything submitted has been sent. Idempotent."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:
                # A bug; whatever it was about, all other leases are still to be renewed.
                self._tally.add("side_channel_errors")
                logger.exception("a lease command could not be carried out")
        self._hear_of_names()
        self._sockets.close(_LINGER_MS)

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=self._wait_s())
            if item is None:
                self._stopping = True
                return
            self._take(item)
        self._renew_due(time.monotonic())

    def _wait_s(self) -> float | None:
        """Until the next renewal or the next socket to close; None (for ever) when there is neither."""
        idle_s = self._sockets.next_idle_s()
        times = [*self._due.values(), *(() if idle_s is None else (idle_s,))]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _take(self, item: LeaseCommand | Found) -> None:
        if isinstance(item, Found):
            self._sockets.found(item)
            return
        lease, now_s = item.lease, time.monotonic()
        endpoint = (lease.host, lease.port, lease.boot)
        if isinstance(item, Keep):
            self._kept.setdefault(endpoint, {})[lease.key] = lease
            first_s = now_s if item.at_once else now_s + lease.lease_s / HEARTBEATS_PER_LEASE
            self._due[endpoint] = min(self._due.get(endpoint, first_s), first_s)
            return
        self._forget(endpoint, lease.key)
        if isinstance(item, GiveBack):
            self._sockets.send(endpoint, encode(Release(boot=lease.boot, leases=(lease.name,))), now_s)
            self._tally.add("leases_given_back")

    def _forget(self, endpoint: Endpoint, key: LeaseKey) -> None:
        leases = self._kept.get(endpoint, {})
        leases.pop(key, None)
        if not leases:
            self._kept.pop(endpoint, None)
            self._due.pop(endpoint, None)

    def _renew_due(self, now_s: float) -> None:
        for endpoint in [endpoint for endpoint, due_s in self._due.items() if due_s <= now_s]:
            leases = list(self._kept[endpoint].values())
            self._due[endpoint] = now_s + min(lease.lease_s for lease in leases) / HEARTBEATS_PER_LEASE
            names = [lease.name for lease in leases]
            for start in range(0, len(names), MAX_RENEWALS):
                renewal = Renew(boot=endpoint[2], leases=tuple(names[start : start + MAX_RENEWALS]))
                self._sockets.send(endpoint, encode(renewal), now_s)
            self._tally.add("heartbeats", amount=len(names))
        self._sockets.close_idle(now_s)

    def _hear_of_names(self) -> None:
        """Before the end: give look-ups that are under way a moment, so that what waits for them is sent."""
        deadline_s = time.monotonic() + _NAMES_S
        while self._sockets.waits_for_names():
            try:
                item = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(item, Found):
                self._sockets.found(item)
