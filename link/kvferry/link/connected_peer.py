"""A peer while there is a connection to it: what is sent and asked, what it brings, and how long it is unused.

Made when the connection begins and dropped when it ends, so nothing of one connection is left for the next: no answer
that somebody waits for, no bytes counted, no timer. How a peer gets connected is `PeerLink`'s (`peer_link.py`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

from kvferry.link import limits
from kvferry.link.connection import Connection
from kvferry.link.connection_slots import Address, ConnectionSlot
from kvferry.protocol.errors import ConnectionEnded, HandshakeFailed, KvferryError
from kvferry.protocol.handshake import MAX_PART_FRAME_BYTES, is_refused
from kvferry.protocol.hosts import host_port
from kvferry.protocol.queries import MAX_ANSWERS_BYTES, Answers, answers_in

logger = logging.getLogger(__name__)


class Use(enum.Enum):
    """What a connection is for now."""

    NEEDED = enum.auto()
    """It keeps its slot although others need it."""
    WANTED = enum.auto()
    """It is kept until its slot is needed."""
    NONE = enum.auto()
    """The same, and not for longer than `IDLE_S`."""


class ConnectedPeer:
    """The peer at the other end of a connection, until `close`.

    Args:
        address: of the peer, for the log.
        slot: of the connection; None if it needs none.
        use: what it is for at first, while the messages are sent that have waited for it.
        on_answers: called with the answers to queries. What it raises ends the connection.
        on_refused: called where the peer does not know a message: it is of another version.
        on_idle: called once it was of no use for `IDLE_S`.

    Attributes:
        has_answered: whether the peer has answered anything that it was asked.
    """

    def __init__(
        self,
        address: Address,
        connection: Connection,
        slot: ConnectionSlot | None,
        use: Use,
        *,
        on_answers: Callable[[Answers], None],
        on_refused: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.has_answered = False
        self._address = address
        self._connection = connection
        self._slot = slot
        self._on_answers = on_answers
        self._on_refused = on_refused
        self._on_idle = on_idle
        self._is_closed = False
        self._use = use
        self._is_queried = False
        self._answer: asyncio.Future[bytes] | None = None
        self._ignored_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._used_s = self._begun_s
        self._idle_timer: asyncio.TimerHandle | None = None
        connection.max_answer_bytes = limits.MAX_IGNORED_BYTES
        connection.receive_all(self._received)

    @property
    def ended(self) -> asyncio.Future[HandshakeFailed]:
        """Its result says why the connection has ended."""
        return self._connection.ended

    @property
    def age_s(self) -> float:
        """Time since it was connected."""
        return self._loop.time() - self._begun_s

    def send(self, frame: bytes) -> None:
        """Send a message without an answer; never waits.

        Raises:
            HandshakeFailed: too many messages wait, or the connection has ended.
        """
        now_s = self._loop.time()
        try:
            self._connection.send(frame)
        except HandshakeFailed as full:
            # Its host may be gone. Many messages at once may fill a living one's queue, too.
            if now_s >= self._used_s + limits.CONNECT_S:
                self._connection.end(full)
            raise
        self._used_s = now_s
        self._let_slot()

    def send_queries(self, frame: bytes) -> None:
        """Send a message about queries; a peer that takes none loses the connection."""
        # Not earlier: who is sent nothing but renewals has nothing to answer.
        self._is_queried = True
        self._connection.max_answer_bytes = MAX_ANSWERS_BYTES
        try:
            self._connection.send(frame)
        except HandshakeFailed as full:
            self._connection.end(full)

    async def ask(self, frame: bytes) -> bytes:
        """Send a request of the handshake, and return its answer. One at a time.

        A caller that does not wait for the answer ends the connection.

        Raises:
            KvferryError: the connection has ended before the answer.
        """
        connection = self._connection
        if connection.ended.done():
            raise ConnectionEnded("is not connected")
        connection.max_answer_bytes = max(
            connection.max_answer_bytes, MAX_PART_FRAME_BYTES
        )
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._answer = answer
        try:
            connection.send(frame)
            await asyncio.wait(
                (answer, connection.ended), return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            # Nothing in an answer says to which request it belongs: a late one would be taken for the next one's.
            self.end("has not answered in time")
            raise
        finally:
            self._answer = None
        if answer.done():
            return answer.result()
        raise connection.ended.result()

    def end(self, why: str) -> None:
        """End the connection: the peer does not do what it must."""
        self._connection.end(HandshakeFailed(why))

    def close(self) -> None:
        """Nobody needs it any more. What was sent has `LINGER_MS` to leave. Idempotent."""
        self._is_closed = True
        self._stop_timer()
        if self._slot is not None:
            self._slot.close(limits.LINGER_MS)
        self._connection.close(limits.LINGER_MS)

    # Its use.

    def set_use(self, use: Use) -> None:
        """Let others have its slot, or not, and begin to count its idle time, or end it."""
        self._use = use
        self._let_slot()
        if self._is_closed:
            return  # its slot was taken at once
        if use is not Use.NONE:
            self._stop_timer()
        elif self._idle_timer is None:
            self._used_s = self._loop.time()
            self._wait_idle(limits.IDLE_S)

    def _let_slot(self) -> None:
        """Let others have its slot, unless it is needed; those that were idle for longer go first."""
        if self._slot is None:
            return
        if self._use is Use.NEEDED:
            self._slot.use()
        else:
            self._slot.idle()

    def _wait_idle(self, delay_s: float) -> None:
        self._idle_timer = self._loop.call_later(delay_s, self._check_idle)

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _check_idle(self) -> None:
        # Messages do not set the timer anew: most connections are used again and again until their engine ends.
        rest_s = self._used_s + limits.IDLE_S - self._loop.time()
        if rest_s > 0:
            self._wait_idle(rest_s)
        else:
            self._on_idle()

    # What it brings.

    def _received(self, frame: bytes) -> None:
        if self._is_closed:
            return  # nobody is left who has asked
        try:
            self._pass_on(frame)
        except KvferryError as refused:
            self.end(str(refused))
        except Exception:
            logger.exception(
                "an answer of %s could not be taken", host_port(*self._address)
            )
            self.end("an internal error")

    def _pass_on(self, frame: bytes) -> None:
        # A connection may bring both: prewarming asks for the description of a peer that is queried.
        answers = answers_in(frame) if self._is_queried else None
        if answers is not None:
            self.has_answered = True
            self._on_answers(answers)
        elif self._answer is not None and not self._answer.done():
            self.has_answered = True
            self._answer.set_result(frame)
        else:
            if self._is_queried and is_refused(frame):
                self._on_refused()
            self._ignore(frame)

    def _ignore(self, frame: bytes) -> None:
        """Count an answer that nobody has asked for.

        Raises:
            HandshakeFailed: there were too many.
        """
        self._ignored_bytes += len(frame) + limits.MESSAGE_BYTES
        if self._ignored_bytes > limits.MAX_IGNORED_BYTES:
            raise HandshakeFailed("sent answers to no query")
