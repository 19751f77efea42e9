"""Which secret to connect with, and what follows when none is accepted. No I/O.

    secrets listed here      tried                                     then
    none                     plain                                     refused when the listener has one
    A, B                     A, then B; whichever it has first         refused when it has none, or others

The listener shows by CURVE that it has the secret, so whichever gets through is the right one. When none does, one more
connection in plain, over which nothing is ever said, tells a listener without a secret from one with another.
"""

from __future__ import annotations

import enum

from kvferry.protocol.side_channel.secrets import VARIABLE, Secret, Secrets
from kvferry.protocol.side_channel.sockets import ConnectionEvent

_CUTS_IN_PLAIN = 3
"""A listener that is about to restart cuts a connection once; one that has a secret does it every time."""


class NextStep(enum.Enum):
    """The next step after an event of a connection."""

    SPEAK = enum.auto()
    """The connection is the right one: send."""
    WAIT = enum.auto()
    """ZMQ connects again by itself."""
    AGAIN = enum.auto()
    """Connect anew, with what `secret` is now."""
    REFUSED = enum.auto()
    """There is no use in going on; `why` says why."""


class KeyTrials:
    """The attempts at one listener.

    Attributes:
        secret: what to connect with; None for a plain connection.
        why: once refused, the reason and what to do about it.
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
