"""Pauses before a peer is contacted again whose first contact failed."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.link.connection import backoff_s
from kvferry.protocol.orders import FailureReason
from kvferry.worker.peers.peer import PeerKey

FIRST_S = 0.5
LONGEST_S = 30.0

# Clients choose the peers that params name, so failures are forgotten by number, the oldest first.
_MAX_FAILURES = 4096


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
        delay_s = backoff_s(failures, FIRST_S, LONGEST_S)
        self._failures[key] = _Failure(why, failures, now_s + delay_s)
        if len(self._failures) > _MAX_FAILURES:
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
