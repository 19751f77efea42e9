"""The side channel's listener: one ZMQ ROUTER socket, one thread, in the scheduler's process.

It answers `Hello` with this engine's description and puts renewals and releases into an inbox. It also winds the clock
of leases, since an idle engine takes no steps. With secrets it serves only peers that have one of them. No input ends
the thread: an invalid message is counted, answered with `Refused` where an answer is possible, and dropped. All that
waits is bounded: leases, answers and log lines.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from kvferry.protocol.errors import InvalidConfig, InvalidMessage
from kvferry.protocol.handshake import (
    CHANNEL_VERSION,
    MAX_REQUEST_BYTES,
    EngineDescription,
    Hello,
    LeaseName,
    Refused,
    Renew,
    channel_address,
    decode_request,
    encode,
)
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import derive_keys, listening_socket
from kvferry.scheduler.side_channel.connections import LOOK_MS, Refusals, UnfinishedMessages
from kvferry.scheduler.side_channel.curve_auth import CurveAuth
from kvferry.scheduler.side_channel.inbox import LeaseInbox, LeaseMessage
from kvferry.scheduler.state.clock import AwakeClock
from kvferry.scheduler.state.counters import Counters

logger = logging.getLogger(__name__)

_STOP = b"stop"
_JOIN_S = 5.0
_QUIET_S = 1.0


class SideChannelListener:
    """Serves one engine's side channel until `close`.

    Args:
        host, port: where to listen.
        counters: counts `handshakes_served`, `bad_frames`, `dropped_messages`, `side_channel_refusals`, and messages
            about unknown leases as `renewals_unknown` and `releases_unknown`.
        secrets: the first is this listener's own; peers may have any of them. Without secrets every peer is served.
        clock: wound here every `period_s`; gives the times of arrival of renewals.
        tick: called on the listener's thread after every winding; it must not wait.
        knows: called on the listener's thread with boot and name: whether there is such a lease. Messages about other
            leases are counted and dropped here, so that a flood cannot make a step longer than the leases require.

    Raises:
        InvalidConfig: the address cannot be bound, or ZMQ has no CURVE; the text names the setting to change.
    """

    def __init__(
        self,
        host: str,
        port: int,
        counters: Counters,
        secrets: Secrets = (),
        clock: AwakeClock | None = None,
        tick: Callable[[], None] = lambda: None,
        knows: Callable[[str, LeaseName], bool] = lambda boot, name: True,
    ) -> None:
        derive_keys(secrets)
        self.inbox = LeaseInbox()
        self._clock = clock
        self._tick = tick
        self._knows = knows
        self._counters = counters
        self._published: tuple[EngineDescription, bytes] | None = None
        self._quiet_until_s = self._look_again_s = 0.0
        self._context = zmq.Context(io_threads=1)
        self._unfinished = UnfinishedMessages()
        self._refusals = Refusals(counters, self._unfinished)
        self._curve_auth = CurveAuth(self._context, secrets, self._refusals) if secrets else None
        self._socket = self._bind(host, port, secrets)
        self._control, self._controlled = self._pair()
        self._thread = threading.Thread(target=self._serve, name="kvferry-listener", daemon=True)
        self._thread.start()
        secured = f"with secret {secrets[0].fingerprint}" if secrets else "without a secret"
        logger.info("side channel listens on %s %s", channel_address(host, port), secured)

    def publish(self, description: EngineDescription) -> None:
        """Answer with this description from now on. Before that, `Hello` is refused with "starting"."""
        self._published = (description, encode(description))

    def close(self) -> None:
        """Stop the thread and free the port. Idempotent."""
        if not self._thread.is_alive():
            return
        self._control.send(_STOP)
        self._thread.join(_JOIN_S)
        self._control.close(linger=0)
        self._context.destroy(linger=0)

    def _bind(self, host: str, port: int, secrets: Secrets) -> zmq.Socket[bytes]:
        socket = listening_socket(self._context, host, MAX_REQUEST_BYTES, secrets)
        self._refusals.watch(socket)
        try:
            socket.bind(channel_address(host, port))
        except zmq.ZMQError as refused:
            self._context.destroy(linger=0)
            raise InvalidConfig(
                "VLLM_NIXL_SIDE_CHANNEL_HOST:VLLM_NIXL_SIDE_CHANNEL_PORT",
                f"{host}:{port}",
                f"an address of this machine with a free port ({refused}); every engine of a host needs its own",
            ) from None
        return socket

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        ours: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        theirs: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        ours.bind("inproc://control")
        theirs.connect("inproc://control")
        return ours, theirs

    def _serve(self) -> None:
        served: dict[zmq.Socket[bytes], Callable[[], None]] = {self._socket: self._take_one}
        if self._refusals.monitor is not None:
            served[self._refusals.monitor] = self._refusals.on_event
        if self._curve_auth is not None:
            served[self._curve_auth.socket] = self._curve_auth.answer
        poller = zmq.Poller()
        for socket in (self._controlled, *served):
            poller.register(socket, zmq.POLLIN)
        while self._controlled not in (ready := dict(poller.poll(self._next_poll_ms()))):
            self._wind()
            self._guarded(self._tick)
            for socket, serve in served.items():
                if socket in ready:
                    self._guarded(serve)
            self._guarded(self._end_endless)
        self._refusals.close(self._socket)
        for socket in (self._controlled, *served):
            socket.close()

    def _next_poll_ms(self) -> int | None:
        """Timeout of the next poll; None: until something arrives."""
        clock_ms = [math.ceil(self._clock.period_s * 1000)] if self._clock is not None else []
        return min([LOOK_MS, *clock_ms] if self._unfinished else clock_ms, default=None)

    def _wind(self) -> float | None:
        return self._clock.wind(time.monotonic()) if self._clock is not None else None

    def _guarded(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Exception:
            # No message may end this thread; an exception here is a bug, so its traceback is logged.
            self._counters.add("bad_frames")
            logger.exception("side channel: a frame could not be served")

    def _take_one(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        with contextlib.suppress(zmq.ZMQError):  # ZMQ does not know the connection of every message
            self._unfinished.delivered(int(frames[0].get(zmq.SRCFD)))
        self._answer_one([frame.bytes for frame in frames])

    def _end_endless(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._look_again_s:
            self._look_again_s = now_s + LOOK_MS / 1000
            for _ in range(self._unfinished.end_endless()):
                self._bad_frame("an endless message and its connection")

    def _answer_one(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1]:
            self._bad_frame(f"a message of {len(frames)} frames")
            return
        asker, _, body = frames
        try:
            request = decode_request(body)
        except InvalidMessage as invalid:
            self._bad_frame(str(invalid))
            refusal = Refused(
                field=invalid.field[:512], value=invalid.shown_value[:512], expected=invalid.expected[:512]
            )
            self._send(asker, encode(refusal))
            return
        if isinstance(request, Hello):
            self._send(asker, self._answer_hello(request))
        else:
            self._keep(request)

    def _keep(self, message: LeaseMessage) -> None:
        known = tuple(name for name in message.leases if self._knows(message.boot, name))
        if len(known) < len(message.leases):
            unknown = len(message.leases) - len(known)
            self._counters.add("renewals_unknown" if isinstance(message, Renew) else "releases_unknown", amount=unknown)
            message = msgspec.structs.replace(message, leases=known)
        if known and not self.inbox.put(message, self._wind()):
            self._counters.add("dropped_messages")

    def _answer_hello(self, hello: Hello) -> bytes:
        published = self._published
        if published is None:
            return encode(Refused(field="engine", value="starting", expected="an engine whose workers are ready"))
        description, answer = published
        if hello.version != CHANNEL_VERSION:
            return encode(Refused(field="version", value=str(hello.version), expected=str(CHANNEL_VERSION)))
        if hello.engine_id != description.engine_id:
            return encode(Refused(field="engine_id", value=hello.engine_id, expected=description.engine_id))
        self._counters.add("handshakes_served")
        logger.debug("side channel: described this engine to %s", hello.asker)
        return answer

    def _bad_frame(self, what: str) -> None:
        """Count it, and log it at most once a second: any host that reaches the port could fill the disk."""
        self._counters.add("bad_frames")
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            logger.warning("side channel: dropped %s (similar lines omitted for %g s)", what, _QUIET_S)

    def _send(self, asker: bytes, body: bytes) -> None:
        try:
            self._socket.send_multipart([asker, b"", body], flags=zmq.NOBLOCK)
        except zmq.ZMQError as refused:
            logger.debug("side channel: an answer could not be sent: %s", refused)
