"""Backoff from peers that could not be connected, and the static peers.

Static peers are those that the configuration names: they are connected before a load needs them, and again when lost.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.side_channel.connection import backoff_s
from kvferry.worker.peers.peer import PeerKey

FIRST_S = 0.5
LONGEST_S = 30.0
_MOST = 4096
_FOR_WANT_OF_AN_ANSWER = (FailureReason.HANDSHAKE, FailureReason.TRANSFER)


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


class Backoff:
    """Pauses that double with every failure, with jitter so that a fleet does not retry in step; a success ends them.

    They are for one boot of a peer: one that has restarted is connected at once. The latest `_MOST` failures are
    remembered.
    """

    def __init__(self) -> None:
        self._failures: dict[PeerKey, _Failure] = {}  # the latest one last

    def __len__(self) -> int:
        """Number of peers with a remembered failure."""
        return len(self._failures)

    def why_not(self, key: PeerKey, now_s: float) -> Unavailable | None:
        """Why not to connect to a peer now; None when it may be tried."""
        failure = self._failures.get(key)
        return failure.why if failure is not None and now_s < failure.until_s else None

    def failed(self, key: PeerKey, why: Unavailable, now_s: float) -> float:
        """Record that a peer's first contact failed.

        Returns:
            The backoff in seconds.
        """
        former = self._failures.pop(key, None)
        failures = former.failures + 1 if former is not None else 1
        delay_s = backoff_s(failures, FIRST_S, LONGEST_S)
        self._failures[key] = _Failure(why, failures, now_s + delay_s)
        if len(self._failures) > _MOST:
            del self._failures[next(iter(self._failures))]
        return delay_s

    def answers(self, key: PeerKey) -> None:
        """End the pause of a peer that has just answered elsewhere, if its last failure was a missing answer."""
        failure = self._failures.get(key)
        if failure is not None and failure.why.reason in _FOR_WANT_OF_AN_ANSWER:
            del self._failures[key]

    def succeeded(self, key: PeerKey) -> None:
        """Forget the failures of a peer whose first contact succeeded."""
        self._failures.pop(key, None)


CHECK_S = 0.5
"""Interval of the checks for static peers to connect, while some are not connected."""


class StaticPeers:
    """The static peers: one key for each address. Backoff is separate, in `Backoff`."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, int], PeerKey] = {}
        self._check_s = 0.0

    def __contains__(self, key: PeerKey) -> bool:
        return self._keys.get((key.host, key.port)) == key

    def add(self, key: PeerKey) -> None:
        """Add a peer, in place of the former one at its address."""
        self._keys[key.host, key.port] = key
        self._check_s = 0.0

    def drop(self, key: PeerKey) -> None:
        """Remove a peer, because connecting to it is of no use."""
        if key in self:
            del self._keys[key.host, key.port]

    def next_s(self, known: Container[PeerKey]) -> float | None:
        """When the next check is due; None while all of them are in `known`."""
        return self._check_s if any(key not in known for key in self._keys.values()) else None

    def seek(self, now_s: float) -> tuple[PeerKey, ...]:
        """All static peers when a check is due, otherwise none."""
        if not self._keys or now_s < self._check_s:
            return ()
        self._check_s = now_s + CHECK_S
        return tuple(self._keys.values())
