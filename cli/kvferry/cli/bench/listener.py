"""`kvferry bench --listen`: serves memory of known content, to one client at a time.

It gives access to the benchmark's memory only, and no input ends it. Its socket is guarded as that of an engine's side
channel, by the same class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    Offer,
    ReadsFailed,
    Reply,
    Task,
    decode_request,
    encode_frame,
)
from kvferry.protocol.errors import InvalidMessage, cut
from kvferry.protocol.handshake import Refused, channel_address
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.scheduler.side_channel.guarded_socket import GuardedSocket
from kvferry.scheduler.state import Counters

SILENT_S = 20.0
"""A client that is silent for so long is gone; it sends a message every 2 s."""
_POLL_MS = 50


@dataclass(slots=True)
class _Turn:
    """One client's turn, with an owner of its own.

    Attributes:
        offer: None while the owner starts.
        join: None until a client has joined.
        until_s: deadline of the owner's start, or of the client's next message.
    """

    owner: Child
    offer: Offer | None = None
    join: Join | None = None
    until_s: float = field(default_factory=lambda: time.monotonic() + START_S)


class BenchListener:
    """Serves until it is closed; used by one thread.

    Args:
        task: for the owners: which memory, and how much.
        secrets: the first is its own; clients may have any. Without secrets any client may join.
        report: called with one line per event.
        command: the arguments of Python that run an owner.

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
    ) -> None:
        self.counters = Counters()
        self._task, self._report, self._command = task, report, command
        try:
            self._socket = GuardedSocket(host, port, MAX_FRAME_BYTES, secrets, self.counters, self._answer)
        except zmq.ZMQError as refused:
            raise InvalidArgument("--listen", f"{host}:{port}", f"an address here, its port free ({refused})") from None
        secured = f"with secret {secrets[0].fingerprint}" if secrets else "without a secret"
        self._where = f"{channel_address(host, port).removeprefix('tcp://')} {secured}"
        self._announced = self._stopped = False
        self._status: int | None = None
        self._last = ("", "")
        self._turn = self._next_turn()

    def serve(self, once: bool) -> int:
        """Serve until `stop`, or until one client has left; returns the exit status: of `--once`, otherwise 0.

        Raises `ReadsFailed` if no memory can be registered.
        """
        while not self._stopped:
            self.step()
            if once and self._status is not None:
                return self._status
        return 0

    def stop(self) -> None:
        """End `serve` soon. For signal handlers: an exception of theirs is lost where Python ignores exceptions."""
        self._stopped = True

    def step(self) -> None:
        """Wait a short time for messages, and process them."""
        self._socket.serve(self._socket.poll(_POLL_MS))
        turn = self._turn
        try:
            message = turn.owner.take()
            if isinstance(message, Offer):
                turn.offer = message
                self._announce(message)
            if turn.join is not None and time.monotonic() >= turn.until_s:
                raise ReadsFailed(f"no message for {SILENT_S:g} s")
            if turn.offer is None and time.monotonic() >= turn.until_s:
                raise ReadsFailed("its NIXL process hangs at its start")
        except ReadsFailed as failed:
            if turn.join is not None:
                self._end_turn(turn.join, 2, cut(str(failed)))
                return
            raise ReadsFailed(f"there is no memory to read: {failed}; see `kvferry doctor`") from None

    def close(self) -> None:
        """Free the port and end the owner."""
        self._turn.owner.close()
        self._socket.close()

    def _next_turn(self) -> _Turn:
        """A new owner with new memory, for the next client."""
        turn = _Turn(Child(self._command))
        turn.owner.send(self._task)
        return turn

    def _end_turn(self, join: Join, status: int, how: str) -> None:
        self._report(f"{join.host} is gone: {how}")
        self._last, self._status = (join.session, how), status
        self._turn.owner.close()
        self._turn = self._next_turn()

    def _announce(self, offer: Offer) -> None:
        if not self._announced:
            self._announced = True
            self._report(f"listening on {self._where}, with {offer.kind}")

    def _answer(self, asker: bytes, frame: bytes) -> None:
        try:
            request = decode_request(frame)
        except InvalidMessage as invalid:
            self._socket.bad_frame(str(invalid))
            refused = Refused(field=cut(invalid.field), value=invalid.shown_value, expected=invalid.expected)
            self._socket.send(asker, encode_frame(refused))
            return
        reply = self._join(request) if isinstance(request, Join) else self._note(request)
        self._socket.send(asker, encode_frame(reply))

    def _join(self, join: Join) -> Reply:
        turn = self._turn
        if join.version != VERSION:
            return Refused(field="version", value=str(join.version), expected=str(VERSION))
        if turn.offer is None:
            return Refused(field="listener", value="starting", expected="ready; try again")
        if turn.join is not None:
            busy = "busy with another client; it serves one after the other"
            return Refused(field="listener", value=busy, expected="ready; try again")
        turn.join, turn.until_s = join, time.monotonic() + SILENT_S
        turn.owner.send(Connect(agent_metadata=join.agent_metadata))
        self._report(f"{join.host} reads")
        return turn.offer

    def _note(self, message: Alive | Leave) -> Reply:
        turn = self._turn
        if turn.join is None or message.session != turn.join.session:
            session, how = self._last
            value = f"ended: {how}" if message.session == session else "unknown"
            return Refused(field="session", value=value, expected="one that the listener still serves")
        turn.until_s = time.monotonic() + SILENT_S
        if isinstance(message, Leave):
            if not message.complete:
                self._end_turn(turn.join, 2, "it gave up")
            else:
                right = "every byte was right" if not message.wrong else f"{message.wrong} bytes were WRONG"
                self._end_turn(turn.join, int(message.wrong > 0), right)
        return Noted()
