"""Renewals and releases that wait for the next step.

An idle engine takes no steps for minutes, while consumers renew with every heartbeat. So the inbox keeps one entry per
lease and kind: a renewal replaces the one before it. Its time of arrival is kept too, since the renewal counts from it.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvferry.protocol.handshake import LeaseName, Release, Renew

LeaseMessage = Renew | Release

MAX_WAITING_LEASES = 1 << 16
"""Most waiting entries, of a few hundred bytes each; one message may name 4,096 leases."""


class ReceivedLease(NamedTuple):
    """One lease of one message.

    Attributes:
        boot: the boot that the message was addressed to.
        received_s: time of arrival on the engine's `AwakeClock`; None without a clock.
    """

    kind: type[LeaseMessage]
    boot: str
    name: LeaseName
    received_s: float | None


class LeaseInbox:
    """Filled by the listener's thread, emptied by the engine's."""

    def __init__(self) -> None:
        self._received: dict[tuple[type[LeaseMessage], str, LeaseName], float | None] = {}
        self._lock = threading.Lock()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        """Add all leases of a message. False if too many wait already; then none is added."""
        kind = type(message)
        with self._lock:
            new = sum((kind, message.boot, name) not in self._received for name in set(message.leases))
            if len(self._received) + new > MAX_WAITING_LEASES:
                return False
            for name in message.leases:
                self._received.pop((kind, message.boot, name), None)  # the latest is last
                self._received[kind, message.boot, name] = received_s
        return True

    def take(self) -> list[ReceivedLease]:
        """Remove and return all entries, in the order of their latest arrival."""
        if not self._received:
            return []
        with self._lock:
            received, self._received = self._received, {}
        return [ReceivedLease(*key, received_s) for key, received_s in received.items()]

    def qsize(self) -> int:
        """The number of waiting entries; a lease that was renewed and released counts twice."""
        return len(self._received)

    def empty(self) -> bool:
        return not self._received
