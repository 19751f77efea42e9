"""`kvferry bench --listen`: serves memory of known content, to one client at a time.

It gives access to the benchmark's memory only, and no input ends it. Queues and connections are bounded as on an
engine's side channel, by the same classes.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Sequence

import zmq

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.bench.child import OWNER, Child
from kvferry.cli.bench.messages import (
    MAX_FRAME_BYTES,
    VERSION,
    Alive,
    BenchFailed,
    Connected,
    Failed,
    Join,
    Leave,
    Noted,
    Offer,
    Reply,
    Task,
    decode_request,
    encode,
)
from kvferry.protocol.errors import InvalidMessage, cut
from kvferry.protocol.handshake import Refused, channel_address
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import derive_keys, listening_socket
from kvferry.scheduler.side_channel.connections import Refusals, UnfinishedMessages
from kvferry.scheduler.side_channel.curve_auth import CurveAuth
from kvferry.scheduler.state.counters import Counters

SILENT_S = 20.0
"""A client that is silent for so long is gone; it sends a message every 2 s."""
START_S = 120.0
"""Timeout of loading NIXL, also on a busy machine."""
CONNECT_S = 10.0
_LOOK_MS = 50
_MOST_FAILURES = 3


class _Stage(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    CONNECTING = "connecting to a client"
    SERVING = "busy with another client; it serves one after the other"


class BenchListener:
    """Serves until it is closed; used by one thread.

    Args:
        task: for the owners: which memory, and how much.
        secrets: the first is its own; clients may have any. Without secrets any client may join.
        say: called with one line per event.
        command: the arguments of Python that run an owner.

    Raises `InvalidArgument` if the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        task: Task,
        secrets: Secrets,
        say: Callable[[str], None],
        command: Sequence[str] = OWNER,
    ) -> None:
        derive_keys(secrets)
        self.counters = Counters()
        self._task, self._print, self._command = task, say, command
        secured = f"with secret {secrets[0].fingerprint}" if secrets else "without a secret"
        self._where = f"{channel_address(host, port).removeprefix('tcp://')} {secured}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._unfinished = UnfinishedMessages()
        self._refusals = Refusals(self.counters, self._unfinished)
        self._curve_auth = CurveAuth(self._context, secrets, self._refusals) if secrets else None
        self._socket = self._bind(host, port, secrets)
        self._owner: Child | None = None
        self._failures = 0
        self._reported_ready = self._bug_said = self._stopped = False
        self._left: Leave | None = None
        self._begin()

    def serve(self, once: bool) -> int:
        """Serve until `stop`, or until one client has left; returns the exit status: of `--once`, otherwise 0.

        Raises `BenchFailed` if no memory can be registered.
        """
        while not self._stopped:
            self.step()
            if once and self._left is not None:
                left = self._left
                return 2 if not left.complete else int(left.wrong > 0)
        return 0

    def stop(self) -> None:
        """End `serve` soon. For signal handlers: an exception of theirs is lost where Python ignores exceptions."""
        self._stopped = True

    def step(self) -> None:
        """Wait a short time for messages, and process them."""
        sockets = [self._socket]
        if self._refusals.monitor is not None:
            sockets.append(self._refusals.monitor)
        if self._curve_auth is not None:
            sockets.append(self._curve_auth.socket)
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(_LOOK_MS))
        if self._socket in ready:
            self._guarded(self._take_one)
        if self._refusals.monitor in ready:
            self._guarded(self._refusals.on_event)
        if self._curve_auth is not None and self._curve_auth.socket in ready:
            self._guarded(self._curve_auth.answer)
        self._unfinished.end_endless()
        self._read_owner()
        self._check_clock()

    def close(self) -> None:
        """Free the port and end the owner."""
        if self._owner is not None:
            self._owner.close()
        self._refusals.close(self._socket)
        self._context.destroy(linger=0)

    def _guarded(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Exception as bug:  # noqa: BLE001 - no message may end the listener; a bug is logged once
            self.counters.add("bad_frames")
            if not self._bug_said:
                self._bug_said = True
                self._print(f"a frame could not be served: {type(bug).__name__}: {bug}; this is a bug")

    def _bind(self, host: str, port: int, secrets: Secrets) -> zmq.Socket[bytes]:
        socket = listening_socket(self._context, host, MAX_FRAME_BYTES, secrets)
        self._refusals.watch(socket)
        try:
            socket.bind(channel_address(host, port))
        except zmq.ZMQError as refused:
            self._refusals.close(socket)
            self._context.destroy(linger=0)
            raise InvalidArgument("--listen", f"{host}:{port}", f"an address here, its port free ({refused})") from None
        return socket

    def _begin(self) -> None:
        """A new owner with new memory, for the next client."""
        if self._owner is not None:
            self._owner.close()
        self._stage = _Stage.STARTING
        self._offer: Offer | None = None
        self._session, self._asker, self._client = "", b"", ""
        self._until_s = time.monotonic() + START_S
        self._owner = Child(self._command)
        self._owner.tell(self._task)

    # Messages of the owner.

    def _read_owner(self) -> None:
        reported = self._owner.take() if self._owner is not None else None
        if isinstance(reported, Offer):
            self._offer, self._stage, self._failures = reported, _Stage.READY, 0
            if not self._reported_ready:
                self._reported_ready = True
                kinds = " and ".join(memory.kind for memory in reported.memories)
                self._print(
                    f"listening on {self._where}, with {kinds}{f' ({reported.no_cuda})' if reported.no_cuda else ''}"
                )
        elif isinstance(reported, Connected) and self._offer is not None:
            self._stage, self._until_s = _Stage.SERVING, time.monotonic() + SILENT_S
            self._print(f"{self._client} reads")
            self._answer(self._asker, self._offer)
        elif isinstance(reported, Failed):
            self._owner_failed(reported.reason)

    def _owner_failed(self, reason: str) -> None:
        if self._stage is _Stage.CONNECTING:
            self._print(f"{self._client} was refused: {cut(reason)}")
            self._answer(self._asker, Refused(field="agent_metadata", value="unusable", expected=cut(reason)))
        elif self._stage is _Stage.SERVING:
            self._end_session(Leave(session=self._session, wrong=0, complete=False), f"{cut(reason)}")
            return
        else:
            self._failures += 1
            if not self._reported_ready or self._failures >= _MOST_FAILURES:
                raise BenchFailed(f"there is no memory to read: {reason}; see `kvferry doctor`")
        self._begin()

    def _check_clock(self) -> None:
        if self._stage is _Stage.READY or time.monotonic() < self._until_s:
            return
        if self._stage is _Stage.SERVING:
            self._end_session(Leave(session=self._session, wrong=0, complete=False), f"no message for {SILENT_S:g} s")
        else:
            self._owner_failed(f"its NIXL process hangs ({self._stage.value})")

    def _end_session(self, left: Leave, how: str) -> None:
        self._print(f"{self._client} is gone: {how}")
        self._left = left
        self._begin()

    # Messages of clients.

    def _take_one(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        with contextlib.suppress(zmq.ZMQError):  # ZMQ does not know the connection of every message
            self._unfinished.delivered(int(frames[0].get(zmq.SRCFD)))
        if len(frames) != 3 or len(frames[1]):
            self.counters.add("bad_frames")
            return
        asker = frames[0].bytes
        try:
            request = decode_request(frames[2].bytes)
        except InvalidMessage as invalid:
            self.counters.add("bad_frames")
            self._answer(asker, Refused(field=cut(invalid.field), value=invalid.shown_value, expected=invalid.expected))
            return
        if isinstance(request, Join):
            self._take_join(asker, request)
        else:
            self._answer(asker, self._take_word(request))

    def _take_join(self, asker: bytes, join: Join) -> None:
        if join.version != VERSION:
            self._answer(asker, Refused(field="version", value=str(join.version), expected=str(VERSION)))
        elif self._stage is not _Stage.READY or self._owner is None:
            self._answer(asker, Refused(field="listener", value=self._stage.value, expected="ready; try again"))
        else:
            self._stage, self._until_s = _Stage.CONNECTING, time.monotonic() + CONNECT_S
            self._session, self._asker, self._client = join.session, asker, join.host
            self._owner.tell(join)

    def _take_word(self, word: Alive | Leave) -> Reply:
        if self._stage is not _Stage.SERVING or word.session != self._session:
            return Refused(field="session", value="ended", expected="one that the listener still serves")
        self._until_s = time.monotonic() + SILENT_S
        if isinstance(word, Leave):
            right = "every byte was right" if not word.wrong else f"{word.wrong} bytes were WRONG"
            self._end_session(word, right if word.complete else "it gave up")
        return Noted()

    def _answer(self, asker: bytes, reply: Reply) -> None:
        try:
            self._socket.send_multipart([asker, b"", encode(reply)], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counters.add("dropped_answers")
