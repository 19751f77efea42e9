"""CURVE authentication: ZMQ asks the listener about every connection (ZAP, ZMQ's RFC 27).

The question comes over a socket inside the process, so the listener's own thread answers it in its own loop.
"""

from __future__ import annotations

import zmq

from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import ZAP_DOMAIN, asker_keys
from kvferry.scheduler.side_channel.connections import Refusals

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_QUESTION_FRAMES = 9
"""Who asks, an empty frame, version, number, domain, address, identity, mechanism, and CURVE's one credential."""


class CurveAuth:
    """Admits connections whose key derives from one of the listed secrets.

    Args:
        context: of the listener's socket; make this before that is bound.

    Attributes:
        socket: to be polled; when it is readable, call `answer`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secrets: Secrets, refusals: Refusals) -> None:
        self._admitted = frozenset(asker_keys(secret).public for secret in secrets)
        self._refusals = refusals
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Take one question and answer it. One that is none is dropped: its connection stays unanswered, and ends."""
        frames = self.socket.recv_multipart()
        if len(frames) < 4 or frames[1] or frames[2] != _VERSION:
            return
        admitted = self._admits(frames)
        if not admitted:
            address = frames[5].decode("ascii", "replace") if len(frames) > 5 else ""
            self._refusals.refused("other_secret", address)
        status = (b"200", b"OK") if admitted else (b"400", b"no such key")
        self.socket.send_multipart([frames[0], b"", _VERSION, frames[3], *status, b"", b""])

    def _admits(self, frames: list[bytes]) -> bool:
        if len(frames) != _QUESTION_FRAMES:
            return False
        domain, mechanism, key = frames[4], frames[7], frames[8]
        return domain == ZAP_DOMAIN and mechanism == b"CURVE" and key in self._admitted
