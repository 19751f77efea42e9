"""The side channel of `kvferry bench`: a client visits a listener, which offers it memory of known content to read.

    client                                         listener
    Visit{version, session, host}               →  every few seconds, or the session ends
                                                ←  Offer | Refused
    Visit{version, session, host, status}       →  the client has ended
                                                ←  Offer | Refused

Both ends are those of an engine's side channel (`kvferry.link`), with its secrets, bounds and guards. Nothing that a
client sends reaches NIXL, and no input ends the listener.
"""

from __future__ import annotations

import contextlib
import secrets as random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import zmq

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.transfer.child import COMMAND, START_S, Child, measure
from kvferry.cli.transfer.messages import Measured, Offer, ReadsFailed, Task
from kvferry.link.allowed_hosts import ANY_HOST, AllowedHosts
from kvferry.link.client import SideChannelClient, refusal
from kvferry.link.counters import Counters
from kvferry.link.guarded_socket import GuardedSocket
from kvferry.link.host_names import listening_address
from kvferry.link.secrets import VARIABLE, Secrets
from kvferry.protocol.convert import decode
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, KvferryError, cut
from kvferry.protocol.handshake import Refused
from kvferry.protocol.hosts import host_port
from kvferry.protocol.ids import Hex128, Positive, Text

VERSION = 2
MAX_VISIT_BYTES = 4 << 10
MAX_REPLY_BYTES = 160 << 10
VISIT_S = 2.0
# A client that is silent for so long is gone.
SILENT_S = 20.0
# The owner's pipe is looked at as often.
_POLL_MS = 50
_RETRY_S = 0.3
_GOODBYE_S = 2.0
CHECK = "check the port, firewalls between, UCX_NET_DEVICES and `kvferry doctor` on both machines"

Status = Literal[0, 1, 2]
"""The exit status of a client."""
_ENDINGS = ("every byte was right", "bytes were WRONG", "it gave up")
GAVE_UP: Status = 2


class Visit(msgspec.Struct, frozen=True, kw_only=True, tag="bench visit"):
    """A client reads, or has ended.

    Attributes:
        session: a random id of this client.
        status: once it has ended.
    """

    version: Positive = VERSION
    session: Hex128
    host: Text
    status: Status | None = None


Reply = Offer | Refused

_visits: msgspec.msgpack.Decoder[Visit] = msgspec.msgpack.Decoder(Visit)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class BenchListener:
    """Serves one client; used by one thread.

    Args:
        owner: has its task; ended by `close`.
        secrets: the first is its own; the client may have any.
        allowed: hosts whose clients may read.
        report: called with one line per event.

    Raises `InvalidArgument` if the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        owner: Child,
        secrets: Secrets,
        allowed: AllowedHosts,
        report: Callable[[str], None],
    ) -> None:
        self.counters = Counters()
        try:
            self._socket = GuardedSocket(
                listening_address(host),
                port,
                MAX_VISIT_BYTES,
                secrets,
                self.counters,
                self._answer,
            )
        except (OSError, zmq.ZMQError) as refused:
            expected = f"an address here, its port free ({refused})"
            raise InvalidArgument("--listen", host_port(host, port), expected) from None
        how = "without a secret"
        if secrets:
            how = f"with secret {secrets[0].fingerprint}"
        self._where = f"{host_port(host, port)} {how}"
        self._owner = owner
        self._allowed = allowed
        self._report = report
        self._offer: Offer | None = None
        self._client: Visit | None = None
        # The deadline of the owner's start, then of the client's next visit.
        self._until_s = time.monotonic() + START_S
        self._status: Status | None = None
        self._stopped = False

    def serve(self) -> Status:
        """Serve until the client has ended; returns its exit status, or `GAVE_UP` if it was silent.

        Raises:
            ReadsFailed: there is no memory to read, or not any more.
            KeyboardInterrupt: after `stop`.
        """
        while self._status is None:
            if self._stopped:
                raise KeyboardInterrupt
            self._socket.serve(self._socket.poll(_POLL_MS))
            self._check_owner()
            if self._client is not None and time.monotonic() > self._until_s:
                self._end(self._client, GAVE_UP, f"no message for {SILENT_S:g} s")
        return self._status

    def stop(self) -> None:
        """End `serve` soon. For signal handlers: an exception of theirs is lost where Python ignores exceptions."""
        self._stopped = True

    def close(self) -> None:
        """End the owner and free the port."""
        # In this order: meanwhile the last answer leaves.
        self._owner.close()
        self._socket.close()

    def _check_owner(self) -> None:
        try:
            message = self._owner.take()
            if isinstance(message, Offer):
                self._offer = message
                self._report(f"listening on {self._where}, with {message.kind}")
            elif self._offer is None and time.monotonic() > self._until_s:
                raise ReadsFailed("its NIXL process hangs at its start")
        except ReadsFailed as failed:
            raise ReadsFailed(
                f"there is no memory to read: {failed}; see `kvferry doctor`"
            ) from None

    def _end(self, client: Visit, status: Status, how: str) -> None:
        self._report(f"{client.host} is gone: {how}")
        self._status = status

    def _answer(self, client_id: bytes, frame: bytes) -> None:
        reply: Reply
        try:
            visit = decode(frame, _visits, MAX_VISIT_BYTES, InvalidMessage)
            reply = self._receive(visit)
        except InvalidMessage as invalid:
            self._socket.bad_frame(str(invalid))
            reply = _refused(invalid.field, invalid.shown_value, invalid.expected)
        self._socket.send(client_id, msgspec.msgpack.encode(reply))

    def _receive(self, visit: Visit) -> Reply:
        if visit.version != VERSION:
            return _refused("version", str(visit.version), str(VERSION))
        peer = self._socket.peer
        if not self._allowed.allow(peer):
            expected = f"a secret at both ends ({VARIABLE}), or a host that the listener's --allowed-hosts names"
            self._report(f"refused a client at {peer}: expected {expected}")
            return _refused("client", peer, expected)
        if self._offer is None:
            return _refused("listener", "starting", "ready; try again")
        if self._client is None:
            self._report(f"{visit.host} reads")
            self._client = visit
        elif visit.session != self._client.session:
            expected = "none: every client needs its own listener"
            return _refused("client", "another one", expected)
        self._until_s = time.monotonic() + SILENT_S
        if visit.status is not None:
            self._end(visit, visit.status, _ENDINGS[visit.status])
        return self._offer


def _refused(field: str, value: str, expected: str) -> Refused:
    return Refused(field=cut(field), value=value, expected=expected)


class BenchClient:
    """The client of one listener."""

    def __init__(
        self, host: str, port: int, timeout_s: float, secrets: Secrets
    ) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._secrets = secrets
        self._session = random.token_hex(16)
        self._visited_s = 0.0

    def run(
        self,
        task: Task,
        show: Callable[[str], None],
        command: Sequence[str] = COMMAND,
    ) -> Measured:
        """Run the whole benchmark.

        Args:
            show: called with what the reader does.
            command: the arguments of Python that run the reader.

        Raises:
            ReadsFailed: it could not be run; with the things to check, in one line.
            PeerRefused: the secrets of both ends do not match.
        """

        def wait(doing: str, _: float) -> None:
            show(doing)
            if time.monotonic() - self._visited_s > VISIT_S:
                self.visit(self._timeout_s)

        try:
            task = msgspec.structs.replace(task, offer=self.visit(self._timeout_s))
            status = GAVE_UP
            try:
                with contextlib.closing(Child(command)) as reader:
                    measured = measure(reader, task, wait)
                status = 1 if measured.wrong else 0
            finally:
                # If it is lost, the listener notices by itself that the client is silent.
                with contextlib.suppress(KvferryError):
                    self.visit(_GOODBYE_S, status)
        except ReadsFailed as failed:
            raise ReadsFailed(f"{failed}; {CHECK}") from None
        return measured

    def visit(self, timeout_s: float, status: Status | None = None) -> Offer:
        """Visit the listener, again while it starts.

        Raises:
            ReadsFailed: there is none, or it refuses this client.
            PeerRefused: as `run`.
        """
        host = socket.gethostname()[:256] or "unnamed"
        visit = Visit(session=self._session, host=host, status=status)
        end_s = time.monotonic() + START_S
        while True:
            reply = self._exchange(visit, timeout_s)
            if isinstance(reply, Offer):
                self._visited_s = time.monotonic()
                return reply
            if reply.field != "listener" or time.monotonic() > end_s:
                where = host_port(self._host, self._port)
                raise ReadsFailed(f"{where} {refusal(reply)}")
            # Both ends are often started at once, and loading NIXL takes seconds.
            time.sleep(_RETRY_S)

    def _exchange(self, visit: Visit, timeout_s: float) -> Reply:
        frame = msgspec.msgpack.encode(visit)
        try:
            # A client for each: none that a frozen listener has kept waiting is used again.
            with SideChannelClient(self._secrets, ANY_HOST) as client:
                answer = client.exchange(self._host, self._port, frame, timeout_s)
            return decode(answer, _replies, MAX_REPLY_BYTES, InvalidMessage)
        except (HandshakeFailed, InvalidMessage) as failed:
            raise ReadsFailed(
                f"{failed}; run `kvferry bench --listen` there first"
            ) from None
