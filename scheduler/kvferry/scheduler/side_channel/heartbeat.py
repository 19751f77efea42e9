"""The consumer's half of the side channel: one thread that renews and releases leases.

It never waits for an answer or a host name, so a dead producer delays no other: ZMQ connects in the background and
drops messages that it cannot deliver.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec

from kvferry.protocol.handshake import MAX_RENEWALS, Release, Renew, encode
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import derive_keys
from kvferry.scheduler.consumer.ended_leases import LeaseKey
from kvferry.scheduler.consumer.ledger import ForgetLease, LeaseCommand, ReleaseLease, RemoteLease, RenewLease
from kvferry.scheduler.side_channel.addresses import Found
from kvferry.scheduler.side_channel.inbox import WakingQueue
from kvferry.scheduler.side_channel.sender import Endpoint, PeerSockets
from kvferry.scheduler.state.clock import HEARTBEATS_PER_LEASE
from kvferry.scheduler.state.counters import Counters

logger = logging.getLogger(__name__)

_LINGER_MS = 500
_LAST_WAIT_S = 1.0
_JOIN_S = 5.0
_MOST_WAITING = 4096
"""Most submissions that wait for the thread's next wake-up."""
_SHORTEST_PACE_S = 1.0
"""A shorter lease is renewed as if it had this lifetime: clients choose `lease_s` of unsigned params."""
_JOINS_AT = 0.75
"""Fraction of its interval after which a lease joins a renewal that is sent for another lease of its producer."""

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class _Submitted:
    submitted_s: float
    commands: tuple[LeaseCommand, ...]

    @property
    def needed_s(self) -> float:
        """The earliest time at which one of the commands must be executed."""
        return min((_needed_s(command, self.submitted_s) for command in self.commands), default=math.inf)


@dataclass(slots=True)
class _Kept:
    """A lease that is renewed, and the latest time of its next renewal."""

    lease: RemoteLease
    due_s: float


def _interval_s(lease: RemoteLease) -> float:
    return max(lease.lease_s, _SHORTEST_PACE_S) / HEARTBEATS_PER_LEASE


def _needed_s(command: LeaseCommand, submitted_s: float) -> float:
    if isinstance(command, ForgetLease):
        return math.inf
    if isinstance(command, ReleaseLease) or command.at_once:
        return submitted_s
    return submitted_s + _interval_s(command.lease)


class LeaseRenewer:
    """Executes `RenewLease`, `ForgetLease` and `ReleaseLease` until `close`.

    Commands that are not urgent do not wake the thread: most leases are dropped before their first renewal.

    A kept lease is renewed every sixth of its lifetime (at once if the command says so), each at its own interval.
    Leases of the same producer whose interval is nearly over join the message.

    Args:
        counters: counts `heartbeats`, `leases_given_back` and `side_channel_errors`.
        secrets: of the side channel; with each producer the one that it has is used.

    Raises:
        InvalidConfig: there are secrets, but ZMQ has no CURVE.
    """

    def __init__(self, counters: Counters, secrets: Secrets = ()) -> None:
        derive_keys(secrets)
        self._counters = counters
        self._inbox: WakingQueue[_Submitted | Found | None] = WakingQueue()
        self._sleeps_until_s = 0.0
        self._kept: dict[Endpoint, dict[LeaseKey, _Kept]] = {}
        self._due: dict[Endpoint, float] = {}
        self._sockets = PeerSockets(self._inbox.put, counters, secrets=secrets)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvferry-renewer", daemon=True)
        self._thread.start()

    def submit(self, commands: Iterable[LeaseCommand]) -> None:
        """Hand over commands; returns at once."""
        submitted = _Submitted(time.monotonic(), tuple(commands))
        if not submitted.commands:
            return
        self._inbox.put_quietly(submitted)
        # After the put: the thread sets `_sleeps_until_s` and then checks the inbox.
        if self._sleeps_until_s > submitted.needed_s or len(self._inbox) >= _MOST_WAITING:
            self._inbox.wake()

    def close(self) -> None:
        """Stop the thread after everything submitted has been sent. Idempotent."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stopping:
            self._survive(self._turn)
        try:
            self._send_the_rest()
        finally:
            self._sockets.close(_LINGER_MS)
            self._inbox.close()

    def _survive(self, part: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Log and count an exception, which is a bug: the other leases must still be renewed."""
        try:
            part(*args, **kwargs)
        except Exception:
            self._counters.add("side_channel_errors")
            logger.exception("a lease command could not be carried out")

    def _turn(self) -> None:
        self._sleep()
        with contextlib.suppress(queue.Empty):
            while not self._stopping:
                self._take(self._inbox.get())
        if not self._stopping:
            self._renew_due(time.monotonic())

    def _sleep(self) -> None:
        """Wait until the next renewal is due, an idle socket is to be closed, or `wake` is called."""
        idle_s = self._sockets.next_idle_s()
        self._sleeps_until_s = min((*self._due.values(), math.inf if idle_s is None else idle_s))
        wait_s = 0.0 if not self._inbox.empty() else max(0.0, self._sleeps_until_s - time.monotonic())
        self._sockets.poll(self._inbox.fileno(), wait_s if math.isfinite(wait_s) else None)

    def _take(self, item: _Submitted | Found | None) -> None:
        if item is None:
            self._stopping = True
        elif isinstance(item, Found):
            self._sockets.found(item)
        else:
            for command in item.commands:
                self._survive(self._carry_out, command, item.submitted_s)

    def _carry_out(self, command: LeaseCommand, submitted_s: float) -> None:
        lease = command.lease
        endpoint = (lease.host, lease.port, lease.boot)
        if isinstance(command, RenewLease):
            first_s = _needed_s(command, submitted_s)
            self._kept.setdefault(endpoint, {})[lease.key] = _Kept(lease, first_s)
            self._due[endpoint] = min(self._due.get(endpoint, first_s), first_s)
            return
        self._forget(endpoint, lease.key)
        if isinstance(command, ReleaseLease):
            self._sockets.send(endpoint, encode(Release(boot=lease.boot, leases=(lease.name,))), time.monotonic())
            self._counters.add("leases_given_back")

    def _forget(self, endpoint: Endpoint, key: LeaseKey) -> None:
        leases = self._kept.get(endpoint, {})
        leases.pop(key, None)
        if not leases:
            self._kept.pop(endpoint, None)
            self._due.pop(endpoint, None)

    def _renew_due(self, now_s: float) -> None:
        for endpoint in [endpoint for endpoint, due_s in self._due.items() if due_s <= now_s]:
            names = []
            for kept in self._kept[endpoint].values():
                interval_s = _interval_s(kept.lease)
                if kept.due_s <= now_s + (1 - _JOINS_AT) * interval_s:
                    kept.due_s = now_s + interval_s
                    names.append(kept.lease.name)
            self._due[endpoint] = min(kept.due_s for kept in self._kept[endpoint].values())
            for start in range(0, len(names), MAX_RENEWALS):
                renewal = Renew(boot=endpoint[2], leases=tuple(names[start : start + MAX_RENEWALS]))
                self._sockets.send(endpoint, encode(renewal), now_s)
            self._counters.add("heartbeats", amount=len(names))
        self._sockets.close_idle(now_s)

    def _send_the_rest(self) -> None:
        """Before the end, give pending look-ups and connections `_LAST_WAIT_S`, so that waiting messages are sent."""
        deadline_s = time.monotonic() + _LAST_WAIT_S
        while self._sockets.has_waiting() and (left_s := deadline_s - time.monotonic()) > 0:
            self._sockets.poll(self._inbox.fileno(), left_s)
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._inbox.get()
                    if isinstance(item, Found):
                        self._sockets.found(item)
