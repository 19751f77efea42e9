"""The consumer's half of the side channel: renews and releases leases, on the thread of its client.

    the engine's thread                 the client's thread
    submit(commands) ── queue ──►  a turn: carry out commands, renew what is due, sleep until the next renewal

It decides when; how is the links' (`peer_link.py`). It never waits for an answer or a host name, so a dead producer
delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.link import limits
from kvferry.link.commands import (
    ForgetLease,
    LeaseCommand,
    LeaseKey,
    ReleaseLease,
    RemoteLease,
    RenewLease,
)
from kvferry.link.peer_link import Message, PeerLinks, PeerLinksSnapshot
from kvferry.protocol.errors import HandshakeFailed
from kvferry.protocol.handshake import MAX_RENEWALS, LeaseName, Release, Renew, encode
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


Endpoint = tuple[str, int, str]
"""Host, port and boot."""

_Submission = tuple[float, tuple[LeaseCommand, ...]]


@dataclass(slots=True)
class _RenewedLease:
    """A lease that is renewed, and the latest time of its next renewal."""

    lease: RemoteLease
    due_s: float


@dataclass(slots=True)
class _RenewedLeases:
    """The leases of one producer that are renewed.

    Attributes:
        first_due_s: none of them is due earlier.
    """

    leases: dict[LeaseKey, _RenewedLease] = field(default_factory=dict)
    # Not computed when it is needed: every abort makes a turn, and 16,000 leases of clients with many open requests
    # took milliseconds in each.
    first_due_s: float = math.inf

    def add(self, lease: RemoteLease, due_s: float) -> None:
        self.leases[lease.key] = _RenewedLease(lease, due_s)
        self.first_due_s = min(self.first_due_s, due_s)

    def take_due(self, now_s: float) -> list[LeaseName]:
        """The leases to renew now; they are due again after their intervals."""
        names = []
        for renewed in self.leases.values():
            interval_s = _interval_s(renewed.lease)
            joins_s = (1 - limits.JOINS_AT) * interval_s
            if renewed.due_s <= now_s + joins_s:
                renewed.due_s = now_s + interval_s
                names.append(renewed.lease.name)
        self.first_due_s = min(renewed.due_s for renewed in self.leases.values())
        return names


def _interval_s(lease: RemoteLease) -> float:
    lease_s = max(lease.lease_s, limits.SHORTEST_LEASE_S)
    return lease_s / limits.HEARTBEATS_PER_LEASE


def _needed_s(command: LeaseCommand, submitted_s: float) -> float:
    """The time at which a command must be carried out."""
    # Most leases are dropped before their first renewal, so commands that can wait do not wake the thread.
    if isinstance(command, ForgetLease):
        return math.inf
    if isinstance(command, ReleaseLease) or command.at_once:
        return submitted_s
    return submitted_s + _interval_s(command.lease)


@dataclass(frozen=True, slots=True)
class LeaseRenewerSnapshot:
    """The renewer at one moment.

    Attributes:
        submissions: those that the thread has not taken.
        sleeps_until_s: when the next renewal is due, on the monotonic clock; infinite if none is.
        links: to its peers.
    """

    submissions: int
    sleeps_until_s: float
    links: PeerLinksSnapshot

    @property
    def is_up_to_date(self) -> bool:
        """Whether everything submitted was taken, and some lease is to be renewed."""
        return not self.submissions and math.isfinite(self.sleeps_until_s)


class LeaseRenewer:
    """Carries out `RenewLease`, `ForgetLease` and `ReleaseLease` until `close`.

    A lease is renewed every sixth of its lifetime (the first time at once if the command says so), each at its own
    interval. Leases of the same producer whose interval is nearly over join the message.

    Args:
        links: to the producers; closed with this object. Their counters count `heartbeats`, `leases_given_back` and
            `side_channel_errors`.
    """

    def __init__(self, links: PeerLinks) -> None:
        self.links = links
        # Each with the time of its submission.
        self._submitted: queue.SimpleQueue[_Submission] = queue.SimpleQueue()
        # True from a wake-up until its turn begins, which takes all that was submitted until then.
        self._is_woken = False
        self._is_ending = False
        self._sleeps_until_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._renewed: dict[Endpoint, _RenewedLeases] = {}
        self._bugs = RateLimitedLog(logger)

    def snapshot(self) -> LeaseRenewerSnapshot:
        """What it has to do now. May be called on any thread."""
        return LeaseRenewerSnapshot(
            self._submitted.qsize(), self._sleeps_until_s, self.links.snapshot()
        )

    def submit(self, commands: Iterable[LeaseCommand]) -> None:
        """Hand over commands; returns at once."""
        submitted_s = time.monotonic()
        submitted = tuple(commands)
        if not submitted:
            return
        self._submitted.put((submitted_s, submitted))
        needed_s = math.inf
        for command in submitted:
            needed_s = min(needed_s, _needed_s(command, submitted_s))
        # Read after the put, without a lock. A turn clears `_is_woken` before it takes from the queue, and looks at the
        # queue again after it has set `_sleeps_until_s`: so no urgent command is left behind.
        sleeps_too_long = self._sleeps_until_s > needed_s
        is_urgent = sleeps_too_long or self._submitted.qsize() >= limits.MAX_SUBMISSIONS
        if is_urgent and not self._is_woken:
            self._is_woken = True
            self.links.client.call_soon(self._turn)

    def close(self) -> None:
        """Stop after everything submitted has been sent. Idempotent."""
        with contextlib.suppress(HandshakeFailed):  # it was closed already
            self.links.client.wait_for(self._end())
        self.links.close()

    def _turn(self) -> None:
        """Carry out what was submitted, renew what is due, and sleep until the next renewal."""
        if self._is_ending:
            return
        self._is_woken = False
        self._take_all()
        # Replaced by the renewal itself, unless a bug ends it.
        self._sleeps_until_s = time.monotonic() + limits.AFTER_BUG_S
        self._log_errors(lambda: self._renew_due(time.monotonic()))
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        if not self._submitted.empty():
            loop.call_soon(self._turn)
        elif math.isfinite(self._sleeps_until_s):
            self._timer = loop.call_later(
                self._sleeps_until_s - time.monotonic(), self._turn
            )

    async def _end(self) -> None:
        self._is_ending = True
        self._take_all()

    def _take_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                submitted_s, commands = self._submitted.get_nowait()
                for command in commands:
                    self._log_errors(lambda: self._carry_out(command, submitted_s))  # noqa: B023 - called here

    def _log_errors(self, part: Callable[[], None]) -> None:
        """Log and count an exception, which is a bug: the other leases must still be renewed."""
        try:
            part()
        except Exception:  # noqa: BLE001 - shown, with its traceback
            self.links.counters.add("side_channel_errors")
            self._bugs.exception("a lease command could not be carried out")

    def _carry_out(self, command: LeaseCommand, submitted_s: float) -> None:
        lease = command.lease
        endpoint = (lease.host, lease.port, lease.boot)
        if isinstance(command, RenewLease):
            of_producer = self._renewed.setdefault(endpoint, _RenewedLeases())
            of_producer.add(lease, _needed_s(command, submitted_s))
            return
        self._forget(endpoint, lease.key)
        if isinstance(command, ReleaseLease):
            release = Release(boot=lease.boot, leases=(lease.name,))
            message = Message(encode(release), lease.boot, "leases_given_back")
            self.links.to((lease.host, lease.port)).send(message)

    def _forget(self, endpoint: Endpoint, key: LeaseKey) -> None:
        of_producer = self._renewed.get(endpoint)
        if of_producer is None:
            return
        of_producer.leases.pop(key, None)
        if not of_producer.leases:
            del self._renewed[endpoint]

    def _renew_due(self, now_s: float) -> None:
        sleeps_until_s = math.inf
        for endpoint, of_producer in self._renewed.items():
            if of_producer.first_due_s <= now_s:
                self._renew(endpoint, of_producer.take_due(now_s))
            sleeps_until_s = min(sleeps_until_s, of_producer.first_due_s)
        self._sleeps_until_s = sleeps_until_s

    def _renew(self, endpoint: Endpoint, names: list[LeaseName]) -> None:
        host, port, boot = endpoint
        for start in range(0, len(names), MAX_RENEWALS):
            renewal = Renew(
                boot=boot, leases=tuple(names[start : start + MAX_RENEWALS])
            )
            message = Message(encode(renewal), boot, "heartbeats", len(renewal.leases))
            self.links.to((host, port)).send(message)
