"""Selects the secret to connect with, and the result when none is accepted. No I/O.

    secrets listed here      tried                                     refused
    none                     plain                                     when the listener has a secret
    A, B                     A, then B, until one is accepted          when the listener has none, or others

The listener proves by CURVE that it has the secret, so the secret that is accepted is the right one. When none is, one
more connection in plain, over which no message is sent, shows whether the listener has no secret or another one.
"""

from __future__ import annotations

import enum

from kvferry.protocol.side_channel.secrets import VARIABLE, Secret, Secrets
from kvferry.protocol.side_channel.sockets import ConnectionEvent

_CUTS_IN_PLAIN = 3
"""A restarting listener cuts a connection once; one that has a secret cuts it every time."""


class NextStep(enum.Enum):
    """The next step after an event of a connection."""

    SPEAK = enum.auto()
    """The connection is right: send messages."""
    WAIT = enum.auto()
    """Wait: ZMQ connects again by itself."""
    AGAIN = enum.auto()
    """Connect again, with the new value of `secret`."""
    REFUSED = enum.auto()
    """Give up; the reason is in `why`."""


class KeyTrials:
    """The attempts to connect to one listener.

    Attributes:
        secret: the secret to connect with; None for a plain connection.
        why: once refused, the reason and the remedy.
    """

    def __init__(self, secrets: Secrets) -> None:
        self.why = ""
        self._secrets = secrets
        self._left = list(secrets[1:])
        self.secret: Secret | None = secrets[0] if secrets else None
        self._cuts = 0

    @property
    def may_speak(self) -> bool:
        """Whether messages may be sent over a connection with `secret`, once it is established."""
        return self.secret is not None or not self._secrets

    def on_event(self, event: ConnectionEvent) -> NextStep:
        """The next step after this event of a connection with `secret`."""
        if not self._secrets:
            return self._next_without_secret(event)
        if self.secret is None:
            return self._refused(
                self._listener_has_none() if event is ConnectionEvent.THROUGH else self._listener_differs()
            )
        if event is ConnectionEvent.THROUGH:
            return NextStep.SPEAK
        if event is ConnectionEvent.ONE_SIDED:
            return self._refused(self._listener_has_none())
        self.secret = self._left.pop(0) if self._left else None
        return NextStep.AGAIN

    def _next_without_secret(self, event: ConnectionEvent) -> NextStep:
        if event is ConnectionEvent.THROUGH:
            return NextStep.SPEAK
        self._cuts += 1
        if event is ConnectionEvent.CUT and self._cuts < _CUTS_IN_PLAIN:
            return NextStep.WAIT
        sure = (
            "has a secret"
            if event is ConnectionEvent.ONE_SIDED
            else "cuts every connection, most likely because it has a secret"
        )
        return self._refused(f"it {sure}, and there is none here: set {VARIABLE} here to a file with the same secret")

    def _listener_has_none(self) -> str:
        return f"it has no secret, and there is one here: set {VARIABLE} there to a file with the same secret"

    def _listener_differs(self) -> str:
        listed = ", ".join(secret.fingerprint for secret in self._secrets)
        return f"it has none of the secrets listed here ({listed}): let the files that {VARIABLE} names share one"

    def _refused(self, why: str) -> NextStep:
        self.why = why
        return NextStep.REFUSED
