"""One static peer: find out which engine answers at its address.

    backing off ──► looking up ──► asking ──► known
         ▲               │            │          │
         └───────────────┴────────────┴──────────┘   no answer, not ready, or connection ended

A listener answers a wrong engine id with its own, and the right one with its boot, so it is asked twice. The connection
then stays open and idle; its end shows a restart.
"""

from __future__ import annotations

import contextlib
import enum
import math

import zmq

from kvferry.protocol.errors import InputError
from kvferry.protocol.handshake import (
    MAX_REPLY_BYTES,
    UNKNOWN_ENGINE,
    Answerer,
    Hello,
    Refused,
    channel_address,
    decode_answerer,
    encode,
)
from kvferry.protocol.orders import Prewarm
from kvferry.protocol.side_channel.backoff import backoff_s
from kvferry.protocol.side_channel.key_trials import KeyTrials, NextStep
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import (
    CURVE_OVERHEAD_BYTES,
    ConnectionEvent,
    keep_alive,
    protect_asker,
    read_event,
    watch_connection,
)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
"""Shorter than after a failed handshake: this address comes from the configuration, not from a client."""

Context = zmq.Context[zmq.Socket[bytes]]


class _State(enum.Enum):
    BACKING_OFF = enum.auto()
    LOOKING_UP = enum.auto()
    ASKING = enum.auto()
    KNOWN = enum.auto()


class PrewarmTarget:
    """State machine of one static peer. Used by one thread; never waits.

    Args:
        host, port: its side channel, as requests will name it.
        asker: the id of this engine.
        timeout_s: for connecting and both answers together.
        secrets: of the side channel, tried in their order.

    Attributes:
        due_s: latest time for the next call of `turn`.
        sockets: when one of them is readable, call `on_event`.
        trouble: the last error; empty if there is none.
    """

    def __init__(self, host: str, port: int, asker: str, timeout_s: float, secrets: Secrets, context: Context) -> None:
        self.host, self.port = host, port
        self.due_s = 0.0
        self.sockets: tuple[zmq.Socket[bytes], ...] = ()
        self.trouble = ""
        self._asker = asker
        self._timeout_s = timeout_s
        self._secrets = secrets
        self._context = context
        self._trials = KeyTrials(secrets)
        self._address = ""
        self._state = _State.BACKING_OFF
        self._failures = 0

    def turn(self, now_s: float) -> bool:
        """`due_s` has passed. Returns whether to look up the host now and call `found` with the result."""
        if self._state is _State.ASKING:
            self.back_off(f"no answer within {self._timeout_s:g} s", now_s)
            return False
        self._state, self.due_s = _State.LOOKING_UP, math.inf
        return True

    def found(self, address: str | None, now_s: float) -> None:
        """The look-up has ended; `address` is None if there is none. Connect."""
        if self._state is not _State.LOOKING_UP:
            return
        if address is None:
            self.back_off("its name cannot be looked up", now_s)
            return
        self._state, self._address, self.due_s = _State.ASKING, address, now_s + self._timeout_s
        self._trials = KeyTrials(self._secrets)
        self._open(now_s)

    def on_event(self, now_s: float) -> Prewarm | None:
        """Read one answer and one connection event. Returns the producer that has answered, once per connection."""
        try:
            producer = self._read_answer(now_s)
            if self.sockets:
                self._read_event(now_s)
        except (zmq.ZMQError, InputError) as bad:
            self.back_off(str(bad), now_s)
            return None
        return producer

    def back_off(self, why: str, now_s: float) -> None:
        """Close the connection after a failed attempt and try again later, after a longer delay each time."""
        with contextlib.suppress(zmq.ZMQError):
            self.close()
        self._failures += 1
        self._state, self.trouble = _State.BACKING_OFF, why
        self.due_s = now_s + backoff_s(self._failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)

    def close(self) -> None:
        """Close its sockets. Idempotent."""
        sockets, self.sockets = self.sockets, ()
        if sockets:
            socket, monitor = sockets
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _read_answer(self, now_s: float) -> Prewarm | None:
        try:
            frames = self.sockets[0].recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if self._state is not _State.ASKING or not self._trials.may_speak:
            return None  # not asked yet; answers of a peer without the secret are ignored
        answer = decode_answerer(frames[-1])
        if isinstance(answer, Answerer):
            self._state, self.due_s, self.trouble, self._failures = _State.KNOWN, math.inf, "", 0
            return Prewarm(host=self.host, port=self.port, engine_id=answer.engine_id, boot=answer.boot, is_static=True)
        if answer.field == "engine_id" and answer.value == UNKNOWN_ENGINE:
            self._ask(answer.expected)
        else:
            self.back_off(_refusal(answer), now_s)
        return None

    def _read_event(self, now_s: float) -> None:
        event = read_event(self.sockets[1])
        if event is None:
            return
        if self._state is _State.KNOWN:
            if event is ConnectionEvent.ENDED:
                self.back_off("its connection has ended", now_s)
            return
        if event is ConnectionEvent.ENDED:
            return  # of an attempt; its result comes as another event
        next_step = self._trials.on_event(event)
        if next_step is NextStep.AGAIN:
            self.close()
            self._open(now_s)
        elif next_step is NextStep.REFUSED:
            self.back_off(self._trials.why, now_s)

    def _open(self, now_s: float) -> None:
        try:
            self.sockets = self._prepared()
            self.sockets[0].connect(channel_address(self._address, self.port))
            if self._trials.may_speak:
                self._ask(UNKNOWN_ENGINE)
        except zmq.ZMQError as refused:  # no such address, or no more sockets
            self.back_off(str(refused), now_s)

    def _prepared(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A socket and its monitor."""
        socket = self._context.socket(zmq.DEALER)
        secret = self._trials.secret
        try:
            socket.setsockopt(zmq.IPV6, int(":" in self._address))
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES + (CURVE_OVERHEAD_BYTES if secret is not None else 0))
            socket.setsockopt(zmq.RCVHWM, 1)
            keep_alive(socket)
            protect_asker(socket, secret)
            return socket, watch_connection(socket)
        except BaseException:
            socket.close(linger=0)
            raise

    def _ask(self, engine_id: str) -> None:
        question = encode(Hello(engine_id=engine_id, asker=self._asker))
        self.sockets[0].send_multipart([b"", question], flags=zmq.NOBLOCK)


def _refusal(refused: Refused) -> str:
    return f"refused: {refused.field!r} is {refused.value!r}; expected {refused.expected!r}"
