"""Sockets to the side channels of other engines: opened when needed, closed when idle, never blocking.

Each peer has one socket, and a queue of messages until its connection is established.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable

import zmq

from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import channel_address
from kvferry.protocol.side_channel.key_trials import KeyTrials, NextStep
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import keep_alive, protect_asker, read_event, watch_handshakes
from kvferry.scheduler.side_channel.addresses import Found, HostNames, address_of
from kvferry.scheduler.state.counters import Counters

QUEUED_MESSAGES = 64
_MOST_ANSWER_BYTES = 4096
"""Answers are neither expected nor read: those that a peer sends all the same must not fill the memory."""

_MAX_RECONNECT_BACKOFF_MS = 2000


class PeerChannel:
    """A connection to one peer. Nothing is sent before the ZMQ handshake has shown that both ends have the same secret,
    or both none.

    Args:
        secrets: tried in their order.

    Attributes:
        used_s: time of the last `send`.
        is_connecting: whether the address is known.
        monitor: to be polled; when it is readable, call `on_event`. None when no events are expected.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, secrets: Secrets) -> None:
        self.used_s = 0.0
        self.is_connecting = False
        self.monitor: zmq.Socket[bytes] | None = None
        self._context = context
        self._port = port
        self._address = ""
        self._trials = KeyTrials(secrets)
        self._socket: zmq.Socket[bytes] | None = None
        self._waiting: list[bytes] = []

    @property
    def has_waiting(self) -> bool:
        """Whether messages wait for the connection."""
        return bool(self._waiting)

    def connect(self, address: str) -> None:
        """Connect to this address. Raises `zmq.ZMQError`."""
        self._address, self.is_connecting = address, True
        self._open()

    def send(self, frame: bytes) -> None:
        """Send it, or queue it until the connection is established.

        Raises:
            HandshakeFailed: too many messages are queued already.
            zmq.ZMQError: the queue of the established connection is full.
        """
        if self._socket is not None and self.monitor is None:
            self._socket.send_multipart([b"", frame], flags=zmq.NOBLOCK)
        elif len(self._waiting) < QUEUED_MESSAGES:
            self._waiting.append(frame)
        else:
            raise HandshakeFailed("too many messages wait for its connection")

    def on_event(self) -> None:
        """Process one event of the connection.

        Raises:
            PeerRefused: the secrets of both ends do not match; nothing was sent.
            zmq.ZMQError: the queued messages could not be sent.
        """
        event = read_event(self.monitor) if self.monitor is not None else None
        if event is None:
            return
        next_step = self._trials.on_event(event)
        if next_step is NextStep.SPEAK:
            self._stop_listening()
            waiting, self._waiting = self._waiting, []
            for frame in waiting:
                self.send(frame)
        elif next_step is NextStep.AGAIN:
            self.close(linger_ms=0)
            self._open()
        elif next_step is NextStep.REFUSED:
            raise PeerRefused(self._trials.why)

    def close(self, linger_ms: int) -> None:
        """Close the socket; messages in ZMQ's queue have `linger_ms` to be sent. Idempotent."""
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
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_BACKOFF_MS)
        socket.setsockopt(zmq.LINGER, 0)
        keep_alive(socket)
        protect_asker(socket, self._trials.secret)
        self.monitor = watch_handshakes(socket)
        socket.connect(channel_address(self._address, self._port))

    def _stop_listening(self) -> None:
        if self.monitor is not None:
            if self._socket is not None:
                self._socket.disable_monitor()
            self.monitor.close()
            self.monitor = None


logger = logging.getLogger(__name__)

MAX_SOCKETS = 256
"""Most open sockets; beyond it the least recently used is closed. Clients choose hosts and ports; files are limited."""

IDLE_S = 60.0
REFUSED_S = 2.0
"""Time without a new attempt after the secrets did not match; messages for that engine are dropped meanwhile."""

_QUIET_S = 1.0

Endpoint = tuple[str, int, str]
"""Host, port and boot: a restarted engine is a new endpoint, whose name is looked up again and whose secret may
differ."""


class PeerSockets:
    """The connections to all peers. Used by one thread.

    Args:
        tell: called from any thread with the result of a look-up, which must be passed to `found` on this thread.
        counters: counts `side_channel_errors`.
        secrets: of the side channel; tried in order when an endpoint is connected.
    """

    def __init__(
        self,
        tell: Callable[[Found], None],
        counters: Counters,
        names: HostNames | None = None,
        secrets: Secrets = (),
    ) -> None:
        self._names = names or HostNames(tell)
        self._counters = counters
        self._secrets = secrets
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._channels: OrderedDict[Endpoint, PeerChannel] = OrderedDict()
        self._refused: dict[Endpoint, float] = {}
        self._quiet_until_s = 0.0

    def __len__(self) -> int:
        return len(self._channels)

    def send(self, endpoint: Endpoint, frame: bytes, now_s: float) -> None:
        """Send, or queue until the connection is established. A message that cannot be sent is counted and dropped."""
        if self._refused.get(endpoint, 0.0) > now_s:
            self._counters.add("side_channel_errors")
            return
        channel = self._channels.get(endpoint) or self._open(endpoint)
        if channel is None:
            return
        channel.used_s = now_s
        self._channels.move_to_end(endpoint)
        try:
            channel.send(frame)
        except (zmq.ZMQError, HandshakeFailed) as refused:
            self._failed(endpoint, str(refused))

    def found(self, found: Found) -> None:
        """A look-up has ended: connect the endpoints that wait for it."""
        for endpoint, channel in list(self._channels.items()):
            if endpoint[0] != found.host or channel.is_connecting:
                continue
            if found.address is None:
                self._give_up(endpoint, "its name cannot be looked up")
                continue
            try:
                channel.connect(found.address)
            except zmq.ZMQError as refused:
                self._give_up(endpoint, str(refused))

    def poll(self, wake: int, timeout_s: float | None) -> None:
        """Wait until the file `wake` is readable or the timeout (None: no limit), and process connection events."""
        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        opening = {x.monitor: endpoint for endpoint, x in self._channels.items() if x.monitor is not None}
        for monitor in opening:
            poller.register(monitor, zmq.POLLIN)
        # Rounded up: a timeout below a millisecond would be 0, and the loop would spin.
        for ready, _ in poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)):
            endpoint = opening.get(ready)
            if endpoint is None:
                continue
            try:
                self._channels[endpoint].on_event()
            except zmq.ZMQError as refused:
                self._give_up(endpoint, str(refused))
            except PeerRefused as refused:
                self._give_up(endpoint, str(refused))
                self._leave_alone(endpoint, time.monotonic())

    def has_waiting(self) -> bool:
        """Whether messages wait for a connection."""
        return any(channel.has_waiting for channel in self._channels.values())

    def next_idle_s(self) -> float | None:
        """The time at which the next idle socket is to be closed; None without sockets."""
        first = next(iter(self._channels.values()), None)
        return None if first is None else first.used_s + IDLE_S

    def close_idle(self, now_s: float) -> None:
        """Close the sockets that were not used for `IDLE_S`."""
        for endpoint in [x for x, channel in self._channels.items() if channel.used_s + IDLE_S <= now_s]:
            self._close(endpoint)

    def close(self, linger_ms: int) -> None:
        """Close all sockets; messages in ZMQ's queues have `linger_ms` to be sent."""
        for channel in self._channels.values():
            channel.close(linger_ms)
        self._channels.clear()
        self._context.term()

    def _open(self, endpoint: Endpoint) -> PeerChannel | None:
        """A channel to an endpoint; None, and counted as an error, if it cannot connect."""
        channel = PeerChannel(self._context, endpoint[1], self._secrets)
        address = address_of(endpoint[0])
        if address is not None:
            try:
                channel.connect(address)
            except zmq.ZMQError as refused:
                channel.close(linger_ms=0)
                self._failed(endpoint, str(refused))
                return None
        if len(self._channels) >= MAX_SOCKETS:
            self._close(next(iter(self._channels)))
        self._channels[endpoint] = channel
        if address is None:
            self._names.find(endpoint[0])
        return channel

    def _give_up(self, endpoint: Endpoint, why: str) -> None:
        """Close the channel and drop its queue; the next message opens a new one."""
        self._failed(endpoint, why)
        self._close(endpoint)

    def _leave_alone(self, endpoint: Endpoint, now_s: float) -> None:
        self._refused = {x: until_s for x, until_s in self._refused.items() if until_s > now_s}
        if len(self._refused) < MAX_SOCKETS:
            self._refused[endpoint] = now_s + REFUSED_S

    def _close(self, endpoint: Endpoint) -> None:
        self._channels.pop(endpoint).close(linger_ms=0)

    def _failed(self, endpoint: Endpoint, why: str) -> None:
        """Count it, and log it at most once a second: clients choose the addresses."""
        self._counters.add("side_channel_errors")
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            logger.warning(
                "side channel of %s:%d (similar lines omitted for %g s): %s", endpoint[0], endpoint[1], _QUIET_S, why
            )
