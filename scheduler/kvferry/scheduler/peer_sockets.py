"""Sockets to the side channels of other engines: made when needed, closed when idle, never waited for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvferry.protocol.handshake import channel_address
from kvferry.scheduler.host_names import Found, HostNames, address_of
from kvferry.scheduler.tally import Tally

logger = logging.getLogger(__name__)

MAX_SOCKETS = 256
"""Clients choose hosts and ports, and a process has only so many files: beyond this the longest unused is closed."""

IDLE_S = 60.0
_QUEUED_MESSAGES = 64

Endpoint = tuple[str, int, str]
"""Host, port and boot: an engine that comes back is a new endpoint, whose name is looked up anew."""


@dataclass(slots=True)
class _Channel:
    """A way to one endpoint.

    Attributes:
        used_s: when something was last sent.
        socket: None until the host's address is known.
        waiting: frames that wait for it.
    """

    used_s: float = 0.0
    socket: zmq.Socket[bytes] | None = None
    waiting: list[bytes] = field(default_factory=list)


class PeerSockets:
    """Belongs to one thread.

    Args:
        tell: takes what look-ups find, from any thread; to be handed to `found` on this one.
        tally: counts `side_channel_errors`.
    """

    def __init__(self, tell: Callable[[Found], None], tally: Tally, names: HostNames | None = None) -> None:
        self._names = names or HostNames(tell)
        self._tally = tally
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._channels: OrderedDict[Endpoint, _Channel] = OrderedDict()

    def __len__(self) -> int:
        return len(self._channels)

    def send(self, endpoint: Endpoint, frame: bytes, now_s: float) -> None:
        """Send, or queue until the host's name is known. What cannot be sent is counted and dropped."""
        channel = self._channels.get(endpoint) or self._open(endpoint)
        if channel is None:
            return
        channel.used_s = now_s
        self._channels.move_to_end(endpoint)
        if channel.socket is not None:
            self._send(endpoint, channel.socket, frame)
        elif len(channel.waiting) < _QUEUED_MESSAGES:
            channel.waiting.append(frame)
        else:
            self._failed(endpoint, "too much waits for its name")

    def found(self, found: Found) -> None:
        """A look-up has ended: send what waited for it."""
        for endpoint, channel in list(self._channels.items()):
            if endpoint[0] != found.host or channel.socket is not None:
                continue
            if found.address is None:
                self._failed(endpoint, "its name cannot be looked up")
            else:
                channel.socket = self._connect(endpoint, found.address)
            if channel.socket is None:
                del self._channels[endpoint]
                continue
            waiting, channel.waiting = channel.waiting, []
            for frame in waiting:
                self._send(endpoint, channel.socket, frame)

    def waits_for_names(self) -> bool:
        """Whether something cannot be sent yet."""
        return any(channel.waiting for channel in self._channels.values())

    def next_idle_s(self) -> float | None:
        """When the first socket will have been idle for too long; None without sockets."""
        first = next(iter(self._channels.values()), None)
        return None if first is None else first.used_s + IDLE_S

    def close_idle(self, now_s: float) -> None:
        """Close the sockets that nobody has used for a minute."""
        for endpoint in [x for x, channel in self._channels.items() if channel.used_s + IDLE_S <= now_s]:
            self._close(endpoint)

    def close(self, linger_ms: int) -> None:
        """Close all, and give what is queued this long to be sent."""
        for channel in self._channels.values():
            if channel.socket is not None:
                channel.socket.close(linger=linger_ms)
        self._channels.clear()
        self._context.term()

    def _open(self, endpoint: Endpoint) -> _Channel | None:
        channel = _Channel()
        address = address_of(endpoint[0])
        if address is not None:
            channel.socket = self._connect(endpoint, address)
            if channel.socket is None:
                return None
        if len(self._channels) >= MAX_SOCKETS:
            self._close(next(iter(self._channels)))
        self._channels[endpoint] = channel
        if address is None:
            self._names.find(endpoint[0])
        return channel

    def _connect(self, endpoint: Endpoint, address: str) -> zmq.Socket[bytes] | None:
        """A socket, or None when there cannot be one, which is counted."""
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IPV6, int(":" in address))
            socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(channel_address(address, endpoint[1]))
        except zmq.ZMQError as refused:
            if socket is not None:
                socket.close()
            self._failed(endpoint, str(refused))
            return None
        return socket

    def _send(self, endpoint: Endpoint, socket: zmq.Socket[bytes], frame: bytes) -> None:
        try:
            socket.send_multipart([b"", frame], flags=zmq.NOBLOCK)
        except zmq.ZMQError as refused:
            self._failed(endpoint, str(refused))

    def _close(self, endpoint: Endpoint) -> None:
        channel = self._channels.pop(endpoint)
        if channel.socket is not None:
            channel.socket.close(linger=0)

    def _failed(self, endpoint: Endpoint, why: str) -> None:
        self._tally.add("side_channel_errors")
        logger.warning("side channel of %s:%d: %s", endpoint[0], endpoint[1], why)
