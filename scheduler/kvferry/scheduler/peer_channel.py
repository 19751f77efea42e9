"""The way to one other engine's side channel: one socket, and what waits until its connection stands."""

from __future__ import annotations

import zmq

from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import channel_address
from kvferry.protocol.side_channel.key_trials import SecretTrials, Verdict
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import heard, keep_alive, protect_asker, watch_greetings

QUEUED_MESSAGES = 64
_MOST_ANSWER_BYTES = 4096
"""Answers are not expected, and never read: what an engine sends all the same must not fill this one's memory."""

_LONGEST_PAUSE_MS = 2000


class PeerChannel:
    """Nothing is sent before the other end has shown that it has the same secret; that it has none is shown likewise.

    Args:
        secrets: tried in their order.

    Attributes:
        used_s: when something was last to be sent.
        is_connecting: whether there is an address already.
        monitor: to be polled; when it is readable, call `hear`. None when nothing is to be heard.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, secrets: Secrets) -> None:
        self.used_s = 0.0
        self.is_connecting = False
        self.monitor: zmq.Socket[bytes] | None = None
        self._context = context
        self._port = port
        self._address = ""
        self._trials = SecretTrials(secrets)
        self._socket: zmq.Socket[bytes] | None = None
        self._waiting: list[bytes] = []

    @property
    def has_waiting(self) -> bool:
        """Whether something is still to be handed to ZMQ."""
        return bool(self._waiting)

    def connect(self, address: str) -> None:
        """The host's address is known: begin. Raises `zmq.ZMQError`."""
        self._address, self.is_connecting = address, True
        self._open()

    def send(self, frame: bytes) -> None:
        """Send it, or keep it until the connection stands.

        Raises:
            HandshakeFailed: too much is kept already.
            zmq.ZMQError: the connection has stood, and takes no more.
        """
        if self._socket is not None and self.monitor is None:
            self._socket.send_multipart([b"", frame], flags=zmq.NOBLOCK)
        elif len(self._waiting) < QUEUED_MESSAGES:
            self._waiting.append(frame)
        else:
            raise HandshakeFailed("too much waits for its connection")

    def hear(self) -> None:
        """Bring the connection on, by one event.

        Raises:
            PeerRefused: the secrets of both ends do not go together; nothing was sent.
            zmq.ZMQError: what waited could not be sent.
        """
        greeting = heard(self.monitor) if self.monitor is not None else None
        if greeting is None:
            return
        verdict = self._trials.heard(greeting)
        if verdict is Verdict.SPEAK:
            self._stop_listening()
            waiting, self._waiting = self._waiting, []
            for frame in waiting:
                self.send(frame)
        elif verdict is Verdict.AGAIN:
            self.close(linger_ms=0)
            self._open()
        elif verdict is Verdict.REFUSED:
            raise PeerRefused(self._trials.why)

    def close(self, linger_ms: int) -> None:
        """Close the socket, and give what ZMQ has this long to be sent. Idempotent."""
        self._stop_listening()
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None

    def _open(self) -> None:
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, int(":" in self._address))
        socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_ANSWER_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_PAUSE_MS)
        socket.setsockopt(zmq.LINGER, 0)
        keep_alive(socket)
        protect_asker(socket, self._trials.secret)
        self.monitor = watch_greetings(socket)
        socket.connect(channel_address(self._address, self._port))

    def _stop_listening(self) -> None:
        if self.monitor is not None:
            if self._socket is not None:
                self._socket.disable_monitor()
            self.monitor.close()
            self.monitor = None
