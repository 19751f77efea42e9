"""Messages to other engines that need no answer: renewals and releases.

Each peer has a task with a queue of messages and a connection, made for the first message and closed when it is idle,
or when its place is needed (`places.py`). With more peers than places messages wait for a connection to be idle: at
first the peer that was used least recently was dropped with all that it had not sent, and when all were due in one turn
it was the same ones each time, whose leases were never renewed again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from kvferry.protocol.errors import HandshakeFailed, KvferryError, NothingListens, PeerRefused
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.connection import Connection, backoff_s, within
from kvferry.protocol.side_channel.hosts import host_port
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.side_channel.connection_slots import (
    ConnectionSlot,
    ConnectionSlots,
    ProvenAddresses,
)

logger = logging.getLogger(__name__)

MAX_PEERS = 256
"""Most peers with a connection; beyond it one that is idle is closed. Clients choose hosts."""

QUEUED_MESSAGES = 64
"""Most messages that wait for one connection."""

CONNECT_S = 10.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
"""Attempts to connect to a port that is closed; in between they hold up nobody."""
IDLE_S = 60.0
REFUSED_S = 2.0
"""Time without a new attempt after the secrets did not match; messages for that engine are dropped meanwhile."""

_MOST_ANSWER_BYTES = 4096
"""Answers are neither expected nor read: those that a peer sends all the same must not fill the memory."""
_LINGER_MS = 500

Endpoint = tuple[str, int, str]
"""Host, port and boot: a restarted engine is a new endpoint, whose name is looked up again and whose secret may
differ."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message without an answer.

    Attributes:
        metric, amount: what is counted once it has left.
    """

    frame: bytes
    metric: str
    amount: int = 1


@dataclass(slots=True)
class _Peer:
    """Attributes:
    place: of its connection, once that is made.
    is_refused: whether the secrets did not match; its task ends after `REFUSED_S`.
    """

    queue: asyncio.Queue[Message]
    task: asyncio.Task[None] = field(init=False)
    place: ConnectionSlot | None = None
    is_refused: bool = False


class PeerSender:
    """Used on the client's loop.

    Args:
        counters: counts messages as they say, and `side_channel_errors`.
        proven: see `ConnectionSlots`.
    """

    def __init__(
        self, client: SideChannelClient, counters: Counters, proven: ProvenAddresses | None = None
    ) -> None:
        self._client = client
        self._counters = counters
        self._places = ConnectionSlots(MAX_PEERS, proven)
        self._peers: dict[Endpoint, _Peer] = {}
        self._failures = RateLimitedLog(logger)  # clients choose the addresses

    def __len__(self) -> int:
        """Peers that are connected, or are to be."""
        return len(self._peers)

    def send(self, endpoint: Endpoint, message: Message) -> None:
        """Have it sent once the peer is connected. A message that cannot be sent is dropped, and an error counted."""
        peer = self._peers.get(endpoint) or self._add(endpoint)
        if peer.is_refused:
            self._counters.add("side_channel_errors")
            return
        try:
            peer.queue.put_nowait(message)
        except asyncio.QueueFull:
            self._failed(endpoint, "too many messages wait for its connection")
        if peer.place is not None:
            peer.place.use()

    async def sent(self) -> None:
        """Wait until all messages are sent."""
        await asyncio.gather(
            *(peer.queue.join() for peer in self._peers.values() if not peer.is_refused)
        )

    def _add(self, endpoint: Endpoint) -> _Peer:
        peer = self._peers[endpoint] = _Peer(asyncio.Queue(QUEUED_MESSAGES))
        peer.task = asyncio.ensure_future(self._serve(endpoint, peer))
        return peer

    async def _serve(self, endpoint: Endpoint, peer: _Peer) -> None:
        try:
            await self._send_until_idle(endpoint, peer)
        except PeerRefused as refused:
            self._failed(endpoint, str(refused))
            peer.is_refused = True
            await asyncio.sleep(REFUSED_S)
        except KvferryError as failed:
            self._failed(endpoint, str(failed))
        except Exception:
            self._failed(endpoint, "an internal error")
            logger.exception("messages for %s could not be sent", host_port(*endpoint[:2]))
        finally:
            self._forget(endpoint, peer)

    def _forget(self, endpoint: Endpoint, peer: _Peer) -> None:
        if (
            self._peers.get(endpoint) is peer
        ):  # it may have been given up meanwhile, and added again
            del self._peers[endpoint]

    async def _send_until_idle(self, endpoint: Endpoint, peer: _Peer) -> None:
        try:
            while True:
                if peer.place is not None and peer.queue.empty():
                    peer.place.idle()
                try:
                    message = await asyncio.wait_for(peer.queue.get(), IDLE_S)
                except asyncio.TimeoutError:
                    if peer.queue.empty():  # one may have been put since the time was over
                        return
                    continue
                await (await self._connected(endpoint, peer)).send(message.frame)
                self._counters.add(message.metric, amount=message.amount)
                peer.queue.task_done()
        finally:
            if peer.place is not None:
                peer.place.close(_LINGER_MS)

    async def _connected(self, endpoint: Endpoint, peer: _Peer) -> Connection:
        """The peer's connection; made for the first message, and again when it has ended.

        Raises:
            KvferryError: it cannot be made. A closed port is tried again for `CONNECT_S`: its engine may be about to
                listen.
        """
        if peer.place is not None and not peer.place.connection.has_ended:
            return peer.place.connection
        if peer.place is not None:
            peer.place.close(0)
            peer.place = None
        host, port, _ = endpoint

        def give_up() -> None:
            self._forget(endpoint, peer)
            peer.task.cancel()

        loop = asyncio.get_running_loop()
        until_s: float | None = None
        failures = 0
        while True:
            try:
                peer.place = await self._places.connect(
                    (host, port),
                    lambda: within(CONNECT_S, self._client.connect(host, port, _MOST_ANSWER_BYTES)),
                    give_up,
                )
                break
            except NothingListens:
                now_s = loop.time()
                until_s = now_s + CONNECT_S if until_s is None else until_s
                if now_s >= until_s:
                    raise HandshakeFailed(
                        f"did not answer within {CONNECT_S:g} s: nothing listens there"
                    ) from None
                failures += 1
                delay_s = backoff_s(failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)
            await asyncio.sleep(min(delay_s, until_s - now_s))
        peer.place.connection.close_at_end()
        return peer.place.connection

    def _failed(self, endpoint: Endpoint, why: str) -> None:
        self._failures.warning("side channel of %s: %s", host_port(*endpoint[:2]), why)
        self._counters.add("side_channel_errors")
