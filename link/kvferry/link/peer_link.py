"""What one engine has to say to others: a link for each address, with one connection, and the links of all.

    wanted ── its turn, connects ──► connected ── nothing is wanted for `IDLE_S`, or its slot is needed ──► (gone)
       ▲             └─ fails ─┐         └─ ends while something is wanted ─┐
       └────────── backoff ◄───┴────────────────────────────────────────────┘

A link carries messages: renewals and releases, which need no answer; queries, whose answers come when they come; and
the description that prewarming asks for. When to send which is decided by others: `LeaseRenewer`, `QueryClient` and
`PeerPrewarmer`. At first each of these had connections, failures and a backoff of its own, so an engine had three
connections to a producer, found out three times that it was gone, and connected again although one was there.

All of it runs on the thread of the side channel's client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvferry.link import limits
from kvferry.link.client import SideChannelClient
from kvferry.link.connection import Connection, within
from kvferry.link.connection_slots import (
    Address,
    ConnectionSlot,
    ConnectionSlots,
    ConnectionSlotsSnapshot,
    TurnKind,
)
from kvferry.link.counts import Counts
from kvferry.protocol.errors import (
    ConnectionEnded,
    HandshakeFailed,
    KvferryError,
    NothingListens,
    PeerRefused,
)
from kvferry.protocol.handshake import MAX_PART_FRAME_BYTES
from kvferry.protocol.hosts import host_port, read_address
from kvferry.protocol.prompt_queries import MAX_ANSWERS_BYTES, is_answers
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


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

    def received(self, frame: bytes) -> None:
        """Answers have come.

        Raises:
            InvalidMessage: they are none; the connection ends.
        """

    def failed(self) -> None:
        """A connection has ended, or could not be made."""

    def closed(self) -> None:
        """The link is gone."""


@dataclass(frozen=True, slots=True)
class PeerLinksSnapshot:
    """Attributes:
    addresses: peers that are connected, or are to be, the first one first.
    slots: of their connections.
    """

    addresses: tuple[Address, ...]
    slots: ConnectionSlotsSnapshot


class PeerLinks:
    """The links of an engine to its peers, until `close`.

    Args:
        client: on whose loop the links live.
        counters: counts messages as they say, and `side_channel_errors`.

    Attributes:
        slots: for the connections to peers that clients name.
    """

    def __init__(self, client: SideChannelClient, counters: Counts) -> None:
        self.client = client
        self.counters = counters
        self.slots = ConnectionSlots(limits.SLOTS)
        self._by_address: dict[Address, PeerLink] = {}
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

    def to(self, address: Address) -> PeerLink:
        """The link to this address. A new one connects once something is wanted of it."""
        link = self._by_address.get(address)
        if link is None:
            link = PeerLink(self, address)
            self._by_address[address] = link
        return link

    async def _sent(self) -> None:
        waiting = [link.has_sent.wait() for link in self._by_address.values()]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waiting), limits.LAST_WAIT_S)

    # For `PeerLink`.

    def forget(self, link: PeerLink) -> None:
        """The link is of no more use."""
        # Another one may have its address by now.
        if self._by_address.get(link.address) is link:
            del self._by_address[link.address]

    def failed(self, address: Address, why: str) -> None:
        """Count and log it."""
        self._log.warning("side channel of %s: %s", host_port(*address), why)
        self.counters.add("side_channel_errors")


class PeerLink:
    """The link to the peer at one address.

    Attributes:
        subscriber: who queries it. It calls `update` whenever what it wants has changed.
        is_static: whether the operator has configured this peer: then it is connected all the time, without a slot.
            Whoever changes it calls `update`.
        has_sent: set while no message waits for a connection.
    """

    def __init__(self, links: PeerLinks, address: Address) -> None:
        self.address = address
        self.subscriber: Subscriber | None = None
        self.is_static = False
        self.has_sent = asyncio.Event()
        self.has_sent.set()
        self._links = links
        self._task: asyncio.Task[None] | None = None
        # What waits for a connection.
        self._messages: deque[Message] = deque()
        self._boot = ""  # of the last message
        self._made: asyncio.Future[Connection] | None = None
        # Of an attempt.
        self._kind = TurnKind.NAMED
        self._waits_for_turn = False
        self._failures = 0  # in a row
        self._until_s: float | None = None
        self._is_refused = False
        # Of a connection.
        self._connection: Connection | None = None
        self._slot: ConnectionSlot | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._ignored_bytes = 0
        self._connected_s = 0.0
        self._used_s = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None and not self._connection.ended.done()

    def update(self) -> None:
        """What is wanted of it has changed."""
        if self._connection is not None:
            self._update_use()
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
        if self._is_refused:
            self._links.counters.add("side_channel_errors")
        elif self.is_connected:
            self._send(self._connected(), message)
        elif len(self._messages) >= limits.QUEUED_MESSAGES:
            self._links.failed(
                self.address, "too many messages wait for its connection"
            )
        else:
            self._messages.append(message)
            self.has_sent.clear()
            self.update()

    def send_queries(self, frame: bytes) -> None:
        """Send the subscriber's message; a peer that takes none loses the connection. Only while there is one."""
        connection = self._connected()
        # Not earlier: who is sent nothing but renewals has nothing to answer.
        connection.max_answer_bytes = MAX_ANSWERS_BYTES
        try:
            connection.send(frame)
        except HandshakeFailed as full:
            connection.end(full)

    async def connection(self) -> Connection:
        """The connection; waits for the next attempt to end if there is none. One caller at a time.

        Raises:
            KvferryError: the attempt has failed.
        """
        if self.is_connected:
            return self._connected()
        self._made = asyncio.get_running_loop().create_future()
        return await self._made

    async def ask(self, frame: bytes) -> bytes:
        """Send a request of the handshake, and return its answer. One at a time, and only while there is a connection.

        A caller that does not wait for the answer ends the connection.

        Raises:
            KvferryError: the connection has ended before the answer.
        """
        connection = self._connected()
        connection.max_answer_bytes = max(
            connection.max_answer_bytes, MAX_PART_FRAME_BYTES
        )
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            connection.send(frame)
            await asyncio.wait(
                (answer, connection.ended), return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            # Nothing in an answer says to which request it belongs: a late one would be taken for the next one's.
            connection.end(HandshakeFailed("has not answered in time"))
            raise
        finally:
            self._answer = None
        if answer.done():
            return answer.result()
        raise connection.ended.result()

    def end(self, why: str) -> None:
        """End the connection, if there is one: the peer does not do what it must."""
        if self._connection is not None:
            self._connection.end(HandshakeFailed(why))

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None or connection.ended.done():
            raise ConnectionEnded("is not connected")
        return connection

    # Attempts.

    def _has_queries(self) -> bool:
        return self.subscriber is not None and self.subscriber.has_queries

    def _is_wanted(self) -> bool:
        return bool(self._messages) or self._has_queries() or self.is_static

    def _wanted_kind(self) -> TurnKind:
        if self._messages:
            return TurnKind.MESSAGE
        if self.subscriber is not None and self.subscriber.is_sibling:
            return TurnKind.SIBLING
        return TurnKind.NAMED

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._serve())

    def _restart(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._start()

    def _give_up_slot(self) -> None:
        is_needed = self.subscriber is not None and self.subscriber.is_needed
        if is_needed or self.is_static or self._messages:
            # Its host has more queries than its share: it waits for its turn. Or it was connected before it was static,
            # or its connection has just ended, and messages wait for the next.
            self.end("has made room for another one")
        else:
            self._close()

    def _close(self) -> None:
        """Give up its connection, and whatever is wanted of it."""
        self._forget()
        if self._task is not None:
            self._task.cancel()

    def _forget(self) -> None:
        self._disconnected()
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
        age_s = asyncio.get_running_loop().time() - self._connected_s
        is_name = read_address(self.address[0]) is None
        # Not again and again: clients can make boots up. Nor while it is queried: all queries would fail, every 5 s
        # where requests for two boots are open, and they find out by themselves whether it is there.
        may_be_gone = is_name and age_s >= limits.CONNECT_S and not self._has_queries()
        if self._connection is not None and may_be_gone:
            # The host of the old one may be gone without a word. Its connection would take renewals for a minute.
            self._connection.close(limits.LINGER_MS)
            self._disconnected()

    async def _serve(self) -> None:
        """Connect, again and again as long as something is wanted."""
        try:
            while self._is_wanted():
                try:
                    await self._connect_and_hold()
                except KvferryError as failed:
                    await self._attempt_failed(failed)
                except Exception:
                    logger.exception(
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
        num_messages = len(self._messages)
        if self._messages and is_closed_port:
            left_s = self._left_s()
            delay_s = min(delay_s, left_s)
            why = f"did not answer within {limits.CONNECT_S:g} s: nothing listens there"
            if left_s <= 0:
                self._take_messages()
        else:
            self._take_messages()
        has_dropped = num_messages > len(self._messages)
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

    def _left_s(self) -> float:
        """Time that messages still wait for a closed port: its engine may be about to listen."""
        now_s = asyncio.get_running_loop().time()
        if self._until_s is None:
            self._until_s = now_s + limits.CONNECT_S
        return self._until_s - now_s

    def _take_messages(self) -> list[Message]:
        messages = list(self._messages)
        self._messages.clear()
        self._until_s = None
        self.has_sent.set()
        return messages

    async def _connect_and_hold(self) -> None:
        """Connect, and return when the connection has ended.

        Raises:
            KvferryError: it cannot be made.
        """
        slot: ConnectionSlot | None = None
        self._kind = self._wanted_kind()
        if self.is_static:
            connection = await self._open()
            self._links.slots.prove(self.address)
        else:
            slot = await self._connect_in_turn()
            connection = slot.connection
        try:
            self._begin(connection, slot)
            await asyncio.wait((connection.ended,))
        finally:
            if self._connection is connection:
                self._disconnected()
            if slot is not None:
                slot.close(limits.LINGER_MS)
            connection.close(limits.LINGER_MS)
        # Nothing has failed if it was idle. What was put since it has ended has a new one at once.
        if self._has_queries() or self.is_static:
            await self._pause(self._delay_s(), str(connection.ended.result()))

    async def _connect_in_turn(self) -> ConnectionSlot:
        self._waits_for_turn = True
        try:
            return await self._links.slots.connect(
                self.address, self._open, self._give_up_slot, self._kind
            )
        finally:
            self._waits_for_turn = False

    async def _open(self) -> Connection:
        self._waits_for_turn = False
        host, port = self.address
        connecting = self._links.client.connect(host, port, MAX_ANSWERS_BYTES)
        return await within(limits.CONNECT_S, connecting)

    # Connected.

    def _begin(self, connection: Connection, slot: ConnectionSlot | None) -> None:
        self._connection = connection
        self._slot = slot
        self._ignored_bytes = 0
        self._connected_s = asyncio.get_running_loop().time()
        self._used_s = self._connected_s
        connection.max_answer_bytes = limits.MAX_IGNORED_BYTES
        connection.receive_all(self._received)
        for message in self._take_messages():
            self._send(connection, message)
        if self._made is not None and not self._made.done():
            self._made.set_result(connection)
        if self.subscriber is not None:
            self.subscriber.connected()
        self._update_use()

    def _disconnected(self) -> None:
        self._connection = None
        self._slot = None
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _send(self, connection: Connection, message: Message) -> None:
        now_s = asyncio.get_running_loop().time()
        try:
            connection.send(message.frame)
        except HandshakeFailed as full:
            self._links.failed(self.address, str(full))
            # Its host may be gone. Many messages at once may fill a living one's queue, too.
            if now_s >= self._used_s + limits.CONNECT_S:
                connection.end(full)
            return
        self._used_s = now_s
        self._let_slot()
        self._links.counters.add(message.metric, amount=message.amount)

    def _update_use(self) -> None:
        """Let others have its slot, or not, and begin to count its idle time, or end it."""
        self._let_slot()
        if self._connection is None:
            return  # its slot was taken at once
        is_idle = not self._is_wanted()
        if is_idle and self._idle_timer is None:
            self._used_s = asyncio.get_running_loop().time()
            self._wait_idle(limits.IDLE_S)
        elif not is_idle and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _let_slot(self) -> None:
        """Let others have its slot, unless it is needed; those that were idle for longer go first."""
        if self._slot is None:
            return
        is_needed = self.subscriber is not None and self.subscriber.is_needed
        if is_needed or self.is_static:
            self._slot.use()
        else:
            self._slot.idle()

    def _wait_idle(self, delay_s: float) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(
            delay_s, self._check_idle
        )

    def _check_idle(self) -> None:
        # Messages do not set the timer anew: most connections are used again and again until their engine ends.
        rest_s = self._used_s + limits.IDLE_S - asyncio.get_running_loop().time()
        if rest_s > 0:
            self._wait_idle(rest_s)
        else:
            self._close()

    def _received(self, frame: bytes) -> None:
        if self._connection is None:
            return  # given up, and about to be closed: nobody is left who has asked
        try:
            self._pass_on(frame)
        except KvferryError as refused:
            self.end(str(refused))
        except Exception:
            logger.exception(
                "an answer of %s could not be taken", host_port(*self.address)
            )
            self.end("an internal error")

    def _pass_on(self, frame: bytes) -> None:
        if is_answers(frame):
            if self.subscriber is not None:
                self._failures = 0
                self.subscriber.received(frame)
                return
        elif self._answer is not None and not self._answer.done():
            self._failures = 0
            self._answer.set_result(frame)
            return
        self._ignored_bytes += len(frame) + limits.MESSAGE_BYTES
        if self._ignored_bytes > limits.MAX_IGNORED_BYTES:
            raise HandshakeFailed("answers what it was not asked")
