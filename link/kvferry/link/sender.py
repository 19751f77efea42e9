"""Messages to other engines that need no answer: renewals and releases.

Each peer has a task with a queue of messages and a connection, made for the first message and closed when it is idle,
or when its slot is needed (`connection_slots.py`). With more peers than slots, messages wait for a connection to be
idle.

At first the peer that was used least recently was dropped with all that it had not sent. When all were due in one turn,
it was the same ones each time, and their leases were never renewed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvferry.link import limits
from kvferry.link.client import SideChannelClient
from kvferry.link.connection import Connection, within
from kvferry.link.connection_slots import (
    ConnectionSlot,
    ConnectionSlots,
    ConnectionSlotsSnapshot,
    ProvenAddresses,
)
from kvferry.link.counts import Counts
from kvferry.protocol.errors import HandshakeFailed, KvferryError, NothingListens, PeerRefused
from kvferry.protocol.hosts import host_port
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


# With the boot: a restarted engine is a new endpoint, whose name is looked up again and whose secret may differ.
Endpoint = tuple[str, int, str]
"""Host, port and boot."""


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
    """A peer with messages, or with a connection that is kept for the next.

    Attributes:
        slot: of its connection, once that is made.
        is_refused: whether the secrets did not match; its task ends after `REFUSED_S`.
    """

    queue: asyncio.Queue[Message]
    task: asyncio.Task[None] = field(init=False)
    slot: ConnectionSlot | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class PeerSenderSnapshot:
    """Attributes:
    endpoints: peers that are connected, or are to be, the first one first.
    slots: of their connections.
    """

    endpoints: tuple[Endpoint, ...]
    slots: ConnectionSlotsSnapshot


class PeerSender:
    """Used on the client's loop.

    Args:
        counters: counts messages as they say, and `side_channel_errors`.
        proven: see `ConnectionSlots`.
    """

    def __init__(
        self, client: SideChannelClient, counters: Counts, proven: ProvenAddresses | None = None
    ) -> None:
        self._client = client
        self._counters = counters
        self._slots = ConnectionSlots(limits.SLOTS, proven)
        self._peers: dict[Endpoint, _Peer] = {}
        self._log = RateLimitedLog(logger)  # clients choose the addresses

    def __len__(self) -> int:
        """Peers that are connected, or are to be."""
        return len(self._peers)

    def snapshot(self) -> PeerSenderSnapshot:
        """Its peers now. May be called on another thread while the client's waits."""
        return PeerSenderSnapshot(tuple(self._peers), self._slots.snapshot())

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
        if peer.slot is not None:
            peer.slot.use()

    async def sent(self) -> None:
        """Wait until all messages are sent."""
        queues = [peer.queue for peer in self._peers.values() if not peer.is_refused]
        await asyncio.gather(*(queue.join() for queue in queues))

    def _add(self, endpoint: Endpoint) -> _Peer:
        peer = _Peer(asyncio.Queue(limits.QUEUED_MESSAGES))
        self._peers[endpoint] = peer
        peer.task = asyncio.ensure_future(self._serve(endpoint, peer))
        return peer

    async def _serve(self, endpoint: Endpoint, peer: _Peer) -> None:
        try:
            await self._send_until_idle(endpoint, peer)
        except PeerRefused as refused:
            self._failed(endpoint, str(refused))
            peer.is_refused = True
            await asyncio.sleep(limits.REFUSED_S)
        except KvferryError as failed:
            self._failed(endpoint, str(failed))
        except Exception:
            self._failed(endpoint, "an internal error")
            logger.exception("messages for %s could not be sent", host_port(*endpoint[:2]))
        finally:
            self._forget(endpoint, peer)

    def _forget(self, endpoint: Endpoint, peer: _Peer) -> None:
        # It may have been given up meanwhile, and added again.
        if self._peers.get(endpoint) is peer:
            del self._peers[endpoint]

    async def _send_until_idle(self, endpoint: Endpoint, peer: _Peer) -> None:
        try:
            while True:
                if peer.slot is not None and peer.queue.empty():
                    peer.slot.idle()
                try:
                    message = await asyncio.wait_for(peer.queue.get(), limits.IDLE_S)
                except asyncio.TimeoutError:
                    # One may have been put since the time was over.
                    if peer.queue.empty():
                        return
                    continue
                connection = await self._connected(endpoint, peer)
                await connection.send(message.frame)
                self._counters.add(message.metric, amount=message.amount)
                peer.queue.task_done()
        finally:
            if peer.slot is not None:
                peer.slot.close(limits.LINGER_MS)

    async def _connected(self, endpoint: Endpoint, peer: _Peer) -> Connection:
        """The peer's connection; made for the first message, and again when it has ended.

        Raises:
            KvferryError: it cannot be made.
        """
        if peer.slot is not None:
            if not peer.slot.connection.has_ended:
                return peer.slot.connection
            peer.slot.close(0)
            peer.slot = None
        peer.slot = await self._connect(endpoint, peer)
        peer.slot.connection.close_at_end()
        return peer.slot.connection

    async def _connect(self, endpoint: Endpoint, peer: _Peer) -> ConnectionSlot:
        host, port, _ = endpoint

        def connect() -> Coroutine[Any, Any, Connection]:
            connecting = self._client.connect(host, port, limits.MAX_IGNORED_BYTES)
            return within(limits.CONNECT_S, connecting)

        def give_up() -> None:
            self._forget(endpoint, peer)
            peer.task.cancel()

        loop = asyncio.get_running_loop()
        until_s: float | None = None
        failures = 0
        while True:
            try:
                return await self._slots.connect((host, port), connect, give_up)
            except NothingListens:
                pass
            # A closed port is tried again for `CONNECT_S` after the first attempt: its engine may be about to listen.
            # Between attempts it waits here, where it holds no turn that another address could have.
            now_s = loop.time()
            if until_s is None:
                until_s = now_s + limits.CONNECT_S
            if now_s >= until_s:
                why = f"did not answer within {limits.CONNECT_S:g} s: nothing listens there"
                raise HandshakeFailed(why)
            failures += 1
            delay_s = limits.RETRY.delay_s(failures)
            await asyncio.sleep(min(delay_s, until_s - now_s))

    def _failed(self, endpoint: Endpoint, why: str) -> None:
        self._log.warning("side channel of %s: %s", host_port(*endpoint[:2]), why)
        self._counters.add("side_channel_errors")
