"""What one engine has to say to others: a link for each address, with one connection, and the links of all.

    wanted ── its turn, connects ──► connected ── nothing is wanted for `IDLE_S`, or its slot is needed ──► (gone)
       ▲             └─ fails ─┐         └─ ends while something is wanted ─┐
       └────────── backoff ◄───┴────────────────────────────────────────────┘

What lasts as long as a connection is the `ConnectedPeer`'s. It is made when the connection begins and dropped when it
ends, so nothing of one connection is left for the next: no answer that somebody waits for, no bytes counted, no timer.
How there comes to be a connection is the `PeerLink`'s.

A link carries messages: renewals and releases, which need no answer; queries, whose answers come when they come; and
the description that prewarming asks for. When to send which is decided by others: `LeaseRenewer`, `QueryClient` and
`PeerPrewarmer`. At first each of these had connections, failures and a backoff of its own, so an engine had three
connections to a producer, found out three times that it was gone, and connected again although one was there.

All of it runs on the thread of the side channel's client.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.link import limits
from kvferry.link.client import SideChannelClient
from kvferry.link.connection import Connection, within
from kvferry.link.connection_slots import (
    ConnectionSlot,
    ConnectionSlots,
    ConnectionSlotsSnapshot,
    TurnKind,
)
from kvferry.link.counters import Counters
from kvferry.protocol.errors import (
    ConnectionEnded,
    HandshakeFailed,
    KvferryError,
    NothingListens,
    PeerRefused,
)
from kvferry.protocol.handshake import MAX_PART_FRAME_BYTES, is_refused
from kvferry.protocol.hosts import ChannelAddress, host_port, read_address
from kvferry.protocol.queries import MAX_ANSWERS_BYTES, Answers, answers_in
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

# One for the process: what a peer can cause over one link, others can over theirs.
_bugs = RateLimitedLog(logger)


@dataclass(frozen=True, slots=True)
class Message:
    """A message without an answer.

    Attributes:
        boot: the life of the engine that it is for.
        metric, amount: what is counted once it has left.
    """

    frame: bytes
    boot: str
    metric: str
    amount: int = 1


class WaitingMessages:
    """The messages of one link that wait for its connection.

    Attributes:
        all_left: set while none waits.
    """

    def __init__(self) -> None:
        self.all_left = asyncio.Event()
        self.all_left.set()
        self._messages: deque[Message] = deque()
        self._until_s: float | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> bool:
        """Add a message. False if too many wait already."""
        if len(self._messages) >= limits.QUEUED_MESSAGES:
            return False
        self._messages.append(message)
        self.all_left.clear()
        return True

    def take(self) -> list[Message]:
        """All of them; none waits then."""
        messages = list(self._messages)
        self._messages.clear()
        self._until_s = None
        self.all_left.set()
        return messages

    def left_s(self, now_s: float) -> float:
        """Time that they still wait for a closed port, from the first call on: its engine may be about to listen."""
        if self._until_s is None:
            self._until_s = now_s + limits.CONNECT_S
        return self._until_s - now_s


class Subscriber(Protocol):
    """Who queries a peer (`QueryClient`). Its link is told what it wants, and tells it what happens.

    Attributes:
        has_queries: whether queries are open: while they are, the connection is made again whenever it ends.
        is_needed: whether the connection keeps its slot although others need it.
        is_sibling: whether only another peer has named this one.
    """

    @property
    def has_queries(self) -> bool: ...

    @property
    def is_needed(self) -> bool: ...

    @property
    def is_sibling(self) -> bool: ...

    def connected(self) -> None:
        """There is a connection, over which no query was sent."""

    def received(self, answers: Answers) -> None:
        """Answers have come."""

    def refused(self) -> None:
        """The peer does not know one of the messages."""

    def failed(self) -> None:
        """A connection has ended, or could not be made."""

    def closed(self) -> None:
        """The link is gone."""


@dataclass(frozen=True, slots=True)
class PeerLinksSnapshot:
    """The links at one moment.

    Attributes:
        addresses: peers that are connected, or are to be, the first one first.
        slots: of their connections.
    """

    addresses: tuple[ChannelAddress, ...]
    slots: ConnectionSlotsSnapshot


class PeerLinks:
    """The links of an engine to its peers, until `close`.

    Args:
        client: on whose loop the links live.
        counters: counts messages as they say, and `side_channel_errors`.

    Attributes:
        slots: for the connections to peers that clients name.
    """

    def __init__(self, client: SideChannelClient, counters: Counters) -> None:
        self.client = client
        self.counters = counters
        self.slots = ConnectionSlots(limits.SLOTS)
        self._by_address: dict[ChannelAddress, PeerLink] = {}
        self._log = RateLimitedLog(logger)  # clients choose the addresses

    def snapshot(self) -> PeerLinksSnapshot:
        """The links now. May be called on another thread while the client's waits."""
        return PeerLinksSnapshot(tuple(self._by_address), self.slots.snapshot())

    def close(self) -> None:
        """Send the messages that wait, where that takes no longer than `LAST_WAIT_S`, and end. Idempotent."""
        with contextlib.suppress(HandshakeFailed):  # it was closed already
            self.client.wait_for(self._sent())
        self.client.close()

    # On the client's loop.

    def to(self, address: ChannelAddress) -> PeerLink:
        """The link to this address. A new one connects once something is wanted of it."""
        link = self._by_address.get(address)
        if link is None:
            link = PeerLink(self, address)
            self._by_address[address] = link
        return link

    async def _sent(self) -> None:
        waiting = [link.messages.all_left.wait() for link in self._by_address.values()]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waiting), limits.LAST_WAIT_S)

    # For `PeerLink`.

    def forget(self, link: PeerLink) -> None:
        """The link is of no more use."""
        # Another one may have its address by now.
        if self._by_address.get(link.address) is link:
            del self._by_address[link.address]

    def failed(self, address: ChannelAddress, why: str) -> None:
        """Count and log it."""
        self._log.warning("side channel of %s: %s", host_port(*address), why)
        self.counters.add("side_channel_errors")


class PeerLink:
    """The link to the peer at one address.

    Attributes:
        subscriber: who queries it. It calls `update` whenever what it wants has changed.
        is_static: whether the operator has configured this peer: then it is connected all the time, without a slot.
            Whoever changes it calls `update`.
        messages: those that wait for a connection.
    """

    def __init__(self, links: PeerLinks, address: ChannelAddress) -> None:
        self.address = address
        self.subscriber: Subscriber | None = None
        self.is_static = False
        self.messages = WaitingMessages()
        self._links = links
        self._task: asyncio.Task[None] | None = None
        self._peer: ConnectedPeer | None = None
        # Of the last message.
        self._boot = ""
        # Who waits for a connection.
        self._made: asyncio.Future[ConnectedPeer] | None = None
        # Of an attempt.
        self._kind = TurnKind.NAMED
        self._waits_for_turn = False
        self._failures = 0  # in a row
        self._is_refused = False

    @property
    def peer(self) -> ConnectedPeer | None:
        """The peer, if there is a connection now."""
        if self._peer is None or self._peer.ended.done():
            return None
        return self._peer

    def update(self) -> None:
        """What is wanted of it has changed."""
        if self._peer is not None:
            self._peer.set_use(self._use())
        elif not self._is_wanted():
            # What nobody waits for any more must not keep its turn from others. 300 aborted requests that named closed
            # ports kept all connections from honest prompts for 10 s.
            if not self._is_refused:
                self._close()
        elif self._task is None:
            self._start()
        elif self._waits_for_turn and self._kind is not self._wanted_kind():
            # It may wait behind many others of its kind.
            self._restart()

    def send(self, message: Message) -> None:
        """Send a message once the peer is connected. One that cannot be sent is dropped, and an error counted."""
        self._check_boot(message.boot)
        peer = self.peer
        if self._is_refused:
            self._links.counters.add("side_channel_errors")
        elif peer is not None:
            self._send(peer, message)
        elif self.messages.put(message):
            self.update()
        else:
            self._links.failed(
                self.address, "too many messages wait for its connection"
            )

    async def connected(self) -> ConnectedPeer:
        """The peer; waits for the next attempt to end if it is not connected. One caller at a time.

        Raises:
            KvferryError: the attempt has failed.
        """
        if self.peer is not None:
            return self.peer
        self._made = asyncio.get_running_loop().create_future()
        return await self._made

    # What is wanted of it.

    def _has_queries(self) -> bool:
        return self.subscriber is not None and self.subscriber.has_queries

    def _is_wanted(self) -> bool:
        return bool(self.messages) or self._has_queries() or self.is_static

    def _is_needed(self) -> bool:
        is_needed = self.subscriber is not None and self.subscriber.is_needed
        return is_needed or self.is_static

    def _use(self) -> Use:
        if self._is_needed():
            return Use.NEEDED
        if self._is_wanted():
            return Use.WANTED
        return Use.NONE

    def _wanted_kind(self) -> TurnKind:
        if self.messages:
            return TurnKind.MESSAGE
        if self.subscriber is not None and self.subscriber.is_sibling:
            return TurnKind.SIBLING
        return TurnKind.NAMED

    # Attempts.

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._serve())

    def _restart(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._start()

    def _give_up_slot(self) -> None:
        if self._is_needed() or self.messages:
            # Its host has more queries than its share: it waits for its turn. Or it was connected before it was static,
            # or its connection has just ended, and messages wait for the next.
            if self._peer is not None:
                self._peer.end("has made room for another one")
        else:
            self._close()

    def _close(self) -> None:
        """Give up its connection, and whatever is wanted of it."""
        self._forget()
        if self._task is not None:
            self._task.cancel()

    def _forget(self) -> None:
        self._drop_peer()
        self._links.forget(self)
        if self.subscriber is not None:
            self.subscriber.closed()

    def _check_boot(self, boot: str) -> None:
        """Connect anew for an engine that has restarted, where it may be elsewhere, or have another secret."""
        has_restarted = self._boot not in ("", boot)
        self._boot = boot
        if not has_restarted:
            return
        if self._is_refused:
            self._is_refused = False
            self._restart()
            return
        is_name = read_address(self.address[0]) is None
        # Not while it is queried: all queries would fail, every 5 s where requests for two boots are open, and they
        # find out by themselves whether it is there.
        if not is_name or self._peer is None or self._has_queries():
            return
        # Not again and again: clients can make boots up.
        if self._peer.age_s >= limits.CONNECT_S:
            # The host of the old one may be gone without a word. Its connection would take renewals for a minute.
            self._drop_peer()

    def _drop_peer(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    async def _serve(self) -> None:
        """Connect, again and again as long as something is wanted."""
        try:
            while self._is_wanted():
                try:
                    await self._connect_and_hold()
                except KvferryError as failed:
                    await self._attempt_failed(failed)
                except Exception:  # noqa: BLE001 - shown, with its traceback
                    _bugs.exception(
                        "the link to %s has failed", host_port(*self.address)
                    )
                    await self._attempt_failed(HandshakeFailed("an internal error"))
        finally:
            # Not if another task has taken its place.
            if self._task is asyncio.current_task():
                self._forget()

    async def _attempt_failed(self, failed: KvferryError) -> None:
        """Drop the messages that have waited long enough, tell all who wait, and pause before the next attempt."""
        is_closed_port = isinstance(failed, NothingListens)
        why = str(failed)
        delay_s = self._delay_s()
        num_messages = len(self.messages)
        if self.messages and is_closed_port:
            left_s = self.messages.left_s(asyncio.get_running_loop().time())
            delay_s = min(delay_s, left_s)
            why = f"did not answer within {limits.CONNECT_S:g} s: nothing listens there"
            if left_s <= 0:
                self.messages.take()
        else:
            self.messages.take()
        has_dropped = num_messages > len(self.messages)
        self._is_refused = isinstance(failed, PeerRefused)
        if self._is_refused:
            delay_s = limits.REFUSED_S
        if self._made is not None and not self._made.done():
            self._made.set_exception(failed)
        await self._pause(delay_s, why, is_counted=has_dropped)
        self._is_refused = False

    async def _pause(
        self, delay_s: float, why: str, *, is_counted: bool = False
    ) -> None:
        if is_counted or self._has_queries():
            self._links.failed(self.address, why)
        if self.subscriber is not None:
            self.subscriber.failed()
        if self._is_wanted() or self._is_refused:
            await asyncio.sleep(delay_s)

    def _delay_s(self) -> float:
        self._failures += 1
        return limits.RETRY.delay_s(self._failures)

    async def _connect_and_hold(self) -> None:
        """Connect, and return when the connection has ended.

        Raises:
            KvferryError: it cannot be made.
        """
        self._kind = self._wanted_kind()
        peer = await self._connect()
        try:
            self._begin(peer)
            await asyncio.wait((peer.ended,))
        finally:
            peer.close()
            if self._peer is peer:
                self._peer = None
        if peer.has_answered:
            self._failures = 0
        # Nothing has failed if it was idle. What was put since it has ended has a new one at once.
        if self._has_queries() or self.is_static:
            await self._pause(self._delay_s(), str(peer.ended.result()))

    async def _connect(self) -> ConnectedPeer:
        slot = None
        if self.is_static:
            connection = await self._open()
            self._links.slots.prove(self.address)
        else:
            self._waits_for_turn = True
            try:
                slot = await self._links.slots.connect(
                    self.address, self._open, self._give_up_slot, self._kind
                )
            finally:
                self._waits_for_turn = False
            connection = slot.connection
        return ConnectedPeer(
            self.address,
            connection,
            slot,
            self._use(),
            on_answers=self._answered,
            on_refused=self._refused,
            on_idle=self._close,
        )

    async def _open(self) -> Connection:
        self._waits_for_turn = False
        host, port = self.address
        connecting = self._links.client.connect(host, port, MAX_ANSWERS_BYTES)
        return await within(limits.CONNECT_S, connecting)

    def _begin(self, peer: ConnectedPeer) -> None:
        """It is connected: send what waits, and tell all who wait."""
        self._peer = peer
        for message in self.messages.take():
            self._send(peer, message)
        if self._made is not None and not self._made.done():
            self._made.set_result(peer)
        if self.subscriber is not None:
            self.subscriber.connected()
        peer.set_use(self._use())

    def _send(self, peer: ConnectedPeer, message: Message) -> None:
        try:
            peer.send(message.frame)
        except HandshakeFailed as full:
            self._links.failed(self.address, str(full))
        else:
            self._links.counters.add(message.metric, amount=message.amount)

    def _answered(self, answers: Answers) -> None:
        if self.subscriber is not None:
            self.subscriber.received(answers)

    def _refused(self) -> None:
        if self.subscriber is not None:
            self.subscriber.refused()


# While there is a connection.


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
        address: ChannelAddress,
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
        except Exception:  # noqa: BLE001 - shown, with its traceback
            _bugs.exception(
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
