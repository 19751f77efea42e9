"""The consumer's half of the side channel: renews and releases leases, on the thread of its client.

It never waits for an answer or a host name, so a dead producer delays no other.
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

from kvferry.protocol.errors import HandshakeFailed
from kvferry.protocol.handshake import MAX_RENEWALS, LeaseName, Release, Renew, encode
from kvferry.protocol.side_channel.allowed_hosts import AllowedHosts
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.scheduler.consumer.remote_prompt import (
    ForgetLease,
    LeaseCommand,
    LeaseKey,
    ReleaseLease,
    RemoteLease,
    RenewLease,
)
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.heartbeats import heartbeat_s
from kvferry.scheduler.side_channel.connection_slots import ProvenAddresses
from kvferry.scheduler.side_channel.sender import Endpoint, Message, PeerSender

logger = logging.getLogger(__name__)

_LAST_WAIT_S = 1.0
"""Time for pending look-ups and connections before the end, so that waiting messages are sent."""
_MOST_WAITING = 4096
"""Most submissions that wait for the thread's next wake-up."""
_SHORTEST_PACE_S = 1.0
"""A shorter lease is renewed as if it had this lifetime: clients choose `lease_s` of unsigned params."""
_JOINS_AT = 0.75
"""Fraction of its interval after which a lease joins a renewal that is sent for another lease of its producer."""
_AFTER_BUG_S = 1.0
"""Sleep after a turn that could not renew."""


@dataclass(slots=True)
class _Kept:
    """A lease that is renewed, and the latest time of its next renewal."""

    lease: RemoteLease
    due_s: float


@dataclass(slots=True)
class _Producer:
    """The kept leases of one producer.

    Attributes:
        first_due_s: none of them is due earlier. It is kept: every abort makes a turn, and to look at all leases in it
            took milliseconds where clients had many requests open.
    """

    leases: dict[LeaseKey, _Kept] = field(default_factory=dict)
    first_due_s: float = math.inf

    def keep(self, lease: RemoteLease, due_s: float) -> None:
        self.leases[lease.key] = _Kept(lease, due_s)
        self.first_due_s = min(self.first_due_s, due_s)

    def take_due(self, now_s: float) -> list[LeaseName]:
        """The leases to renew now; they are due again after their intervals."""
        names = []
        for kept in self.leases.values():
            interval_s = _interval_s(kept.lease)
            if kept.due_s <= now_s + (1 - _JOINS_AT) * interval_s:
                kept.due_s = now_s + interval_s
                names.append(kept.lease.name)
        self.first_due_s = min(kept.due_s for kept in self.leases.values())
        return names


def _interval_s(lease: RemoteLease) -> float:
    return heartbeat_s(max(lease.lease_s, _SHORTEST_PACE_S))


def _needed_s(command: LeaseCommand, submitted_s: float) -> float:
    """The time at which a command must be executed."""
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
        allowed: as for `SideChannelClient`.

    Attributes:
        client: until `close`, for the prewarmer too.
        proven: addresses that were connected, for and by the other users of the client, on its loop.

    Raises:
        InvalidSecretFile: there are secrets, but ZMQ has no CURVE.
    """

    def __init__(
        self, counters: Counters, secrets: Secrets = (), allowed: AllowedHosts | None = None
    ) -> None:
        self._counters = counters
        self._submitted: queue.SimpleQueue[tuple[float, tuple[LeaseCommand, ...]]] = (
            queue.SimpleQueue()
        )
        """With the time of each submission."""
        self._is_woken = False
        """Whether a turn is to come that has not looked at the queue yet."""
        self._is_ending = False
        self._sleeps_until_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._kept: dict[Endpoint, _Producer] = {}
        self.client = SideChannelClient(secrets, allowed)
        self.proven = ProvenAddresses()
        self._sender = PeerSender(self.client, counters, self.proven)

    def submit(self, commands: Iterable[LeaseCommand]) -> None:
        """Hand over commands; returns at once."""
        submitted_s, submitted = time.monotonic(), tuple(commands)
        if not submitted:
            return
        self._submitted.put((submitted_s, submitted))
        needed_s = min(_needed_s(command, submitted_s) for command in submitted)
        # After the put: a turn sets `_is_woken` and then takes, sets `_sleeps_until_s` and then looks again.
        is_urgent = self._sleeps_until_s > needed_s or self._submitted.qsize() >= _MOST_WAITING
        if is_urgent and not self._is_woken:
            self._is_woken = True
            self.client.call_soon(self._turn)

    def close(self) -> None:
        """Stop after everything submitted has been sent. Idempotent."""
        with contextlib.suppress(HandshakeFailed):  # it was closed already
            self.client.wait_for(self._send_the_rest())
        self.client.close()

    def _turn(self) -> None:
        """Carry out what was submitted, renew what is due, and sleep until the next renewal."""
        if self._is_ending:
            return
        self._is_woken = False
        self._take_all()
        self._sleeps_until_s = time.monotonic() + _AFTER_BUG_S
        self._log_errors(lambda: self._renew_due(time.monotonic()))
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        if not self._submitted.empty():
            loop.call_soon(self._turn)
        elif math.isfinite(self._sleeps_until_s):
            self._timer = loop.call_later(self._sleeps_until_s - time.monotonic(), self._turn)

    async def _send_the_rest(self) -> None:
        self._is_ending = True
        self._take_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._sender.sent(), _LAST_WAIT_S)

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
        except Exception:
            self._counters.add("side_channel_errors")
            logger.exception("a lease command could not be carried out")

    def _carry_out(self, command: LeaseCommand, submitted_s: float) -> None:
        lease = command.lease
        endpoint = (lease.host, lease.port, lease.boot)
        if isinstance(command, RenewLease):
            self._kept.setdefault(endpoint, _Producer()).keep(
                lease, _needed_s(command, submitted_s)
            )
            return
        self._forget(endpoint, lease.key)
        if isinstance(command, ReleaseLease):
            release = Release(boot=lease.boot, leases=(lease.name,))
            self._sender.send(endpoint, Message(encode(release), "leases_given_back"))

    def _forget(self, endpoint: Endpoint, key: LeaseKey) -> None:
        producer = self._kept.get(endpoint, _Producer())
        producer.leases.pop(key, None)
        if not producer.leases:
            self._kept.pop(endpoint, None)

    def _renew_due(self, now_s: float) -> None:
        for endpoint, producer in self._kept.items():
            if producer.first_due_s > now_s:
                continue
            names = producer.take_due(now_s)
            for start in range(0, len(names), MAX_RENEWALS):
                renewal = Renew(boot=endpoint[2], leases=tuple(names[start : start + MAX_RENEWALS]))
                self._sender.send(
                    endpoint, Message(encode(renewal), "heartbeats", len(renewal.leases))
                )
        self._sleeps_until_s = min(
            (producer.first_due_s for producer in self._kept.values()), default=math.inf
        )
