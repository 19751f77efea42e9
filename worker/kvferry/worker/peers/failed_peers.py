"""Peers whose first contact failed, and how long each is left alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.link import limits
from kvferry.protocol.orders import FailureReason
from kvferry.worker.peers.peer import PeerKey


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


class FailedPeers:
    """Pauses as in the table of the link (`AVOID`); a success ends them.

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
        delay_s = limits.AVOID.delay_s(failures)
        self._failures[key] = _Failure(why, failures, now_s + delay_s)
        if len(self._failures) > limits.MAX_REMEMBERED:
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
