"""`kvferry bench --listen`: serves memory of known content to one client, and ends with it.

It gives access to the benchmark's memory only, and invalid input does not end it. Its socket is guarded as that of an
engine's side channel, by the same class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.transfer.child import COMMAND, START_S, Child
from kvferry.cli.transfer.messages import (
    MAX_FRAME_BYTES,
    VERSION,
    Alive,
    Connect,
    Join,
    Leave,
    Noted,
    ReadableAgent,
    ReadsFailed,
    Reply,
    Task,
    decode_request,
    encode_frame,
)
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.counters import Counters
from kvferry.link.guarded_socket import GuardedSocket
from kvferry.link.host_names import listening_address
from kvferry.link.secrets import VARIABLE, Secrets
from kvferry.protocol.errors import InvalidMessage, cut
from kvferry.protocol.handshake import Refused
from kvferry.protocol.hosts import host_port

# A client that is silent for so long is gone; it sends a message every 2 s.
SILENT_S = 20.0
# Its owner speaks through a pipe, which is looked at in between.
_POLL_MS = 50


class BenchListener:
    """Serves one client; used by one thread.

    Args:
        task: for the owner: which memory, and how much.
        secrets: the first is its own; the client may have any.
        report: called with one line per event.
        command: the arguments of Python that run the owner.
        allowed: hosts whose clients may join: NIXL parses a client's metadata in native code. None for those that need
            no list (`AllowedHosts.without_list`).

    Raises `InvalidArgument` if the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        task: Task,
        secrets: Secrets,
        report: Callable[[str], None],
        command: Sequence[str] = COMMAND,
        allowed: AllowedHosts | None = None,
    ) -> None:
        self.counters = Counters()
        self._report = report
        try:
            address = listening_address(host)
            self._socket = GuardedSocket(
                address, port, MAX_FRAME_BYTES, secrets, self.counters, self._answer
            )
        except (OSError, zmq.ZMQError) as refused:
            expected = f"an address here, its port free ({refused})"
            raise InvalidArgument("--listen", host_port(host, port), expected) from None
        if allowed is None:
            allowed = AllowedHosts.without_list(secrets)
        self._allowed = allowed
        how = "without a secret"
        if secrets:
            how = f"with secret {secrets[0].fingerprint}"
        self._where = f"{host_port(host, port)} {how}"
        self._owner = Child(command)
        self._owner.send(task)
        self._offer: ReadableAgent | None = None
        self._join: Join | None = None
        # The error of the owner, for the client that has joined.
        self._failed = ""
        # The deadline of the owner's start, then of the client's next message.
        self._until_s = time.monotonic() + START_S
        self._status: int | None = None
        self._stopped = False

    def serve(self) -> int:
        """Serve until the client has left or `stop`; returns the exit status: 1 if a byte was wrong, 2 if it gave up.

        Raises `ReadsFailed` if no memory can be registered.
        """
        while self._status is None and not self._stopped:
            self.step()
        return self._status or 0

    def stop(self) -> None:
        """End `serve` soon. For signal handlers: an exception of theirs is lost where Python ignores exceptions."""
        self._stopped = True

    def step(self) -> None:
        """Wait a short time for messages, and process them."""
        self._socket.serve(self._socket.poll(_POLL_MS))
        is_late = time.monotonic() >= self._until_s
        if self._join is not None and is_late:
            self._end(self._join, 2, f"no message for {SILENT_S:g} s")
        # Without its owner there is nothing to read; the client is told with its next message.
        if self._status is not None or self._failed:
            return
        try:
            message = self._owner.take()
            if isinstance(message, ReadableAgent):
                self._offer = message
                self._report(f"listening on {self._where}, with {message.kind}")
            elif self._offer is None and is_late:
                raise ReadsFailed("its NIXL process hangs at its start")
        except ReadsFailed as failed:
            if self._join is None:
                raise ReadsFailed(
                    f"there is no memory to read: {failed}; see `kvferry doctor`"
                ) from None
            self._failed = cut(str(failed))

    def close(self) -> None:
        """Free the port and end the owner."""
        self._owner.close()
        self._socket.close()

    def _end(self, join: Join, status: int, how: str) -> None:
        self._report(f"{join.host} is gone: {how}")
        self._status = status

    def _answer(self, client: bytes, frame: bytes) -> None:
        try:
            request = decode_request(frame)
        except InvalidMessage as invalid:
            self._socket.bad_frame(str(invalid))
            refused = Refused(
                field=cut(invalid.field),
                value=invalid.shown_value,
                expected=invalid.expected,
            )
            self._socket.send(client, encode_frame(refused))
            return
        reply: Reply
        if isinstance(request, Join):
            reply = self._admit(request)
        else:
            reply = self._note(request)
        self._socket.send(client, encode_frame(reply))

    def _admit(self, join: Join) -> Reply:
        if join.version != VERSION:
            return Refused(
                field="version", value=str(join.version), expected=str(VERSION)
            )
        # Before any memory is offered: NIXL parses what this client has sent.
        if not self._allowed.allow(self._socket.peer):
            expected = f"a secret at both ends ({VARIABLE}), or a host that the listener's --allowed-hosts names"
            self._report(
                f"refused a client at {self._socket.peer}: expected {expected}"
            )
            return Refused(field="client", value=self._socket.peer, expected=expected)
        if self._offer is None:
            return Refused(
                field="listener", value="starting", expected="ready; try again"
            )
        if self._join is not None:
            return Refused(
                field="client",
                value="another one",
                expected="none: every client needs its own listener",
            )
        self._join = join
        self._until_s = time.monotonic() + SILENT_S
        self._owner.send(Connect(agent_metadata=join.agent_metadata))
        self._report(f"{join.host} reads")
        return self._offer

    def _note(self, message: Alive | Leave) -> Reply:
        join = self._join
        # A client of an earlier listener, or one that was refused.
        if join is None or message.session != join.session:
            return Refused(
                field="session", value="unknown", expected="that of the client"
            )
        self._until_s = time.monotonic() + SILENT_S
        if self._failed:
            self._end(join, 2, self._failed)
            return Refused(
                field="session",
                value=f"ended: {self._failed}",
                expected="one that goes on",
            )
        if isinstance(message, Leave):
            if not message.complete:
                self._end(join, 2, "it gave up")
            elif message.wrong:
                self._end(join, 1, f"{message.wrong} bytes were WRONG")
            else:
                self._end(join, 0, "every byte was right")
        return Noted()
