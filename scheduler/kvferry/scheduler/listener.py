"""The side channel's listener: one ZMQ ROUTER socket, one thread, in the scheduler's process.

It answers `Hello` with this engine's description and puts renewals and releases into an inbox. Whatever arrives, it
lives on: what it cannot use is counted, answered with `Refused` where there is somebody to answer, and dropped. What
it keeps for somebody who does not take it is bounded: requests, answers, and lines in the log.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

import zmq

from kvferry.protocol.errors import InvalidConfig, InvalidMessage
from kvferry.protocol.handshake import (
    CHANNEL_VERSION,
    MAX_REQUEST_BYTES,
    EngineDescription,
    Hello,
    Refused,
    Release,
    Renew,
    channel_address,
    decode_request,
    encode,
)
from kvferry.scheduler.tally import Tally

logger = logging.getLogger(__name__)

LeaseMessage = Renew | Release

MAX_WAITING_MESSAGES = 1024
"""Most renewals and releases that wait for the next step; an idle engine takes none, so more are dropped."""

_STOP = b"stop"
_JOIN_S = 5.0
_SEND_QUEUE = 8
_RECEIVE_QUEUE = 64
_QUIET_S = 1.0


class SideChannelListener:
    """Serves one engine's side channel until `close`.

    Args:
        host, port: where to listen.
        tally: counts `handshakes_served`, `bad_frames` and `dropped_messages`.

    Raises:
        InvalidConfig: the address cannot be bound; the text says what to change.
    """

    def __init__(self, host: str, port: int, tally: Tally) -> None:
        self.inbox: queue.SimpleQueue[LeaseMessage] = queue.SimpleQueue()
        self._tally = tally
        self._published: tuple[EngineDescription, bytes] | None = None
        self._quiet_until_s = 0.0
        self._context = zmq.Context(io_threads=1)
        self._socket = self._bind(host, port)
        self._control, self._controlled = self._pair()
        self._thread = threading.Thread(target=self._serve, name="kvferry-listener", daemon=True)
        self._thread.start()
        logger.info("side channel listens on %s", channel_address(host, port))

    def publish(self, description: EngineDescription) -> None:
        """Answer with this description from now on. Until then askers are told to come back."""
        self._published = (description, encode(description))

    def close(self) -> None:
        """Stop the thread and free the port. Idempotent."""
        if not self._thread.is_alive():
            return
        self._control.send(_STOP)
        self._thread.join(_JOIN_S)
        self._control.close(linger=0)
        self._context.destroy(linger=0)

    def _bind(self, host: str, port: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        socket.setsockopt(zmq.LINGER, 0)
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
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._controlled, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._controlled in ready:
                break
            try:
                self._answer_one(self._socket.recv_multipart())
            except Exception:
                # Nothing that somebody sent may end this thread; what got here is a bug, and is shown as one.
                self._tally.add("bad_frames")
                logger.exception("side channel: a frame could not be served")
        self._socket.close()
        self._controlled.close()

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
        elif self.inbox.qsize() < MAX_WAITING_MESSAGES:
            self.inbox.put(request)
        else:
            self._tally.add("dropped_messages")

    def _answer_hello(self, hello: Hello) -> bytes:
        published = self._published
        if published is None:
            return encode(Refused(field="engine", value="starting", expected="an engine whose workers are ready"))
        description, answer = published
        if hello.version != CHANNEL_VERSION:
            return encode(Refused(field="version", value=str(hello.version), expected=str(CHANNEL_VERSION)))
        if hello.engine_id != description.engine_id:
            return encode(Refused(field="engine_id", value=hello.engine_id, expected=description.engine_id))
        self._tally.add("handshakes_served")
        logger.debug("side channel: described this engine to %s", hello.asker)
        return answer

    def _bad_frame(self, what: str) -> None:
        """Count it; say so at most once a second, or whoever can reach this port could fill the disk."""
        self._tally.add("bad_frames")
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            logger.warning("side channel: dropped %s (and what is like it within %g s)", what, _QUIET_S)

    def _send(self, asker: bytes, body: bytes) -> None:
        try:
            self._socket.send_multipart([asker, b"", body], flags=zmq.NOBLOCK)
        except zmq.ZMQError as refused:
            logger.debug("side channel: an answer could not be sent: %s", refused)
