"""Renewals and releases that wait for the next step.

An engine that rests takes none for minutes, while consumers renew with every heartbeat. So what waits is kept by lease:
a renewal takes the place of the one before it, and says when it was heard, because that is when it counts.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvferry.protocol.handshake import LeaseName, Release, Renew

LeaseMessage = Renew | Release

MAX_WAITING_LEASES = 1 << 16
"""Most leases that wait, of a few hundred bytes each; one message may name 4,096."""


class Heard(NamedTuple):
    """One lease of one message.

    Attributes:
        boot: whom it was said to.
        heard_s: when, by the engine's own `AwakeClock`; None where that is not known.
    """

    kind: type[LeaseMessage]
    boot: str
    name: LeaseName
    heard_s: float | None


class LeaseInbox:
    """Filled by the listener's thread, taken by the engine's."""

    def __init__(self) -> None:
        self._heard: dict[tuple[type[LeaseMessage], str, LeaseName], float | None] = {}
        self._lock = threading.Lock()

    def put(self, message: LeaseMessage, heard_s: float | None = None) -> bool:
        """Remember all that a message says. False, and nothing is remembered, when too much waits already."""
        kind = type(message)
        with self._lock:
            new = sum((kind, message.boot, name) not in self._heard for name in set(message.leases))
            if len(self._heard) + new > MAX_WAITING_LEASES:
                return False
            for name in message.leases:
                self._heard.pop((kind, message.boot, name), None)  # what was said last comes last
                self._heard[kind, message.boot, name] = heard_s
        return True

    def take(self) -> list[Heard]:
        """Everything, in the order in which it was said last."""
        if not self._heard:
            return []
        with self._lock:
            heard, self._heard = self._heard, {}
        return [Heard(*key, heard_s) for key, heard_s in heard.items()]

    def qsize(self) -> int:
        """Leases that wait; one that was renewed and released counts twice."""
        return len(self._heard)

    def empty(self) -> bool:
        return not self._heard
