"""CURVE authentication: ZMQ sends the listener a ZAP request (RFC 27) for every connection.

The requests come over a socket inside the process; the listener's thread answers them in its loop.
"""

from __future__ import annotations

import zmq

from kvferry.link.accepted_connections import AcceptedConnections
from kvferry.link.secrets import Secrets
from kvferry.link.sockets import ZAP_DOMAIN, client_keys

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
# ROUTER identity, an empty frame, version, request id, domain, address, identity, mechanism, CURVE public key.
_REQUEST_FRAMES = 9
_HEADER_FRAMES = 4
"""Those without which a request cannot be answered."""
_ADDRESS_AT = 5

_OK = (b"200", b"OK")
_REFUSED = (b"400", b"no such key")


class CurveAuth:
    """Admits connections whose key derives from one of the listed secrets.

    Args:
        context: of the listener's socket, which must be bound after this object is created.

    Attributes:
        socket: to be polled; when it is readable, call `answer`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secrets: Secrets,
        connections: AcceptedConnections,
    ) -> None:
        self._admitted = frozenset(client_keys(secret).public for secret in secrets)
        self._connections = connections
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Receive one request and answer it. A malformed one is dropped; its connection ends without an answer."""
        frames = self.socket.recv_multipart()
        if len(frames) < _HEADER_FRAMES:
            return
        identity, delimiter, version, request_id = frames[:_HEADER_FRAMES]
        if delimiter or version != _VERSION:
            return
        status = _OK
        if not self._admits(frames):
            status = _REFUSED
            address = b""
            if len(frames) > _ADDRESS_AT:
                address = frames[_ADDRESS_AT]
            self._connections.refused(
                "other_secret", address.decode("ascii", "replace")
            )
        self.socket.send_multipart(
            [identity, b"", _VERSION, request_id, *status, b"", b""]
        )

    def _admits(self, frames: list[bytes]) -> bool:
        if len(frames) != _REQUEST_FRAMES:
            return False
        _, _, _, _, domain, _, _, mechanism, key = frames
        return domain == ZAP_DOMAIN and mechanism == b"CURVE" and key in self._admitted
