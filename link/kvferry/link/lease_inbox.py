"""Renewals and releases that wait for the scheduler's next step."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvferry.link import limits
from kvferry.protocol.handshake import LeaseName, Release, Renew

LeaseMessage = Renew | Release


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
    """Renewals and releases that wait for the next step. Filled by the listener's thread, emptied by the engine's.

    An idle engine takes no steps for minutes, while consumers renew with every heartbeat. So one entry is kept for each
    lease and kind: a renewal replaces the one before it. The time of its arrival is kept, since it counts from there.
    """

    def __init__(self) -> None:
        self._received: dict[
            tuple[type[LeaseMessage], str, LeaseName], float | None
        ] = {}
        self._lock = threading.Lock()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        """Add all leases of a message. False if too many wait already; then none is added."""
        keys = [
            (type(message), message.boot, name)
            for name in dict.fromkeys(message.leases)
        ]
        # Without the lock: the engine's thread only ever takes all of it, and then there are fewer.
        received = self._received
        num_new = sum(key not in received for key in keys)
        if len(received) + num_new > limits.MAX_WAITING_LEASES:
            return False
        # A few at a time: a message may have 4,096, which take milliseconds, and the engine would wait as long.
        for start in range(0, len(keys), limits.LEASES_AT_ONCE):
            with self._lock:
                for key in keys[start : start + limits.LEASES_AT_ONCE]:
                    # Popped, so that the latest is last: a renewal and a release are applied in the order they came in.
                    self._received.pop(key, None)
                    self._received[key] = received_s
        return True

    def take(self) -> list[ReceivedLease]:
        """Remove and return all entries, in the order of their latest arrival."""
        if not self._received:
            return []
        with self._lock:
            received = self._received
            self._received = {}
        return [ReceivedLease(*key, received_s) for key, received_s in received.items()]

    def qsize(self) -> int:
        """The number of waiting entries; a lease that was renewed and released counts twice."""
        return len(self._received)

    def empty(self) -> bool:
        return not self._received
