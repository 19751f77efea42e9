"""Messages to other engines that need no answer: renewals and releases.

Each peer has a task with a queue of messages and a connection, made for the first message and closed when it is idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.protocol.errors import KvferryError, PeerRefused
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.connection import Connection, within
from kvferry.scheduler.state import Counters

logger = logging.getLogger(__name__)

MAX_PEERS = 256
"""Most peers with a connection; beyond it the least recently used is closed. Clients choose hosts."""

QUEUED_MESSAGES = 64
"""Most messages that wait for one connection."""

CONNECT_S = 10.0
IDLE_S = 60.0
REFUSED_S = 2.0
"""Time without a new attempt after the secrets did not match; messages for that engine are dropped meanwhile."""

_MOST_ANSWER_BYTES = 4096
"""Answers are neither expected nor read: those that a peer sends all the same must not fill the memory."""
_LINGER_MS = 500

Endpoint = tuple[str, int, str]
"""Host, port and boot: a restarted engine is a new endpoint, whose name is looked up again and whose secret may
differ."""


@dataclass(slots=True)
class _Peer:
    """Attributes:
    is_refused: whether the secrets did not match; its task ends after `REFUSED_S`.
    """

    queue: asyncio.Queue[bytes]
    task: asyncio.Task[None] = field(init=False)
    is_refused: bool = False


class PeerSender:
    """Used on the client's loop.

    Args:
        counters: counts `side_channel_errors`.
    """

    def __init__(self, client: SideChannelClient, counters: Counters) -> None:
        self._client = client
        self._counters = counters
        self._peers: OrderedDict[Endpoint, _Peer] = OrderedDict()  # the one used last is last
        self._failures = RateLimitedLog(logger)  # clients choose the addresses

    def __len__(self) -> int:
        """Peers that are connected or connecting."""
        return len(self._peers)

    def send(self, endpoint: Endpoint, frame: bytes) -> None:
        """Have it sent once the peer is connected. A message that cannot be sent is counted and dropped."""
        peer = self._peers.get(endpoint) or self._add(endpoint)
        self._peers.move_to_end(endpoint)
        if peer.is_refused:
            self._counters.add("side_channel_errors")
            return
        try:
            peer.queue.put_nowait(frame)
        except asyncio.QueueFull:
            self._failed(endpoint, "too many messages wait for its connection")

    async def sent(self) -> None:
        """Wait until all messages are sent."""
        await asyncio.gather(*(peer.queue.join() for peer in self._peers.values() if not peer.is_refused))

    def _add(self, endpoint: Endpoint) -> _Peer:
        if len(self._peers) >= MAX_PEERS:
            self._peers.popitem(last=False)[1].task.cancel()
        peer = self._peers[endpoint] = _Peer(asyncio.Queue(QUEUED_MESSAGES))
        peer.task = asyncio.ensure_future(self._serve(endpoint, peer))
        return peer

    async def _serve(self, endpoint: Endpoint, peer: _Peer) -> None:
        try:
            await self._send_until_idle(endpoint, peer.queue)
        except PeerRefused as refused:
            self._failed(endpoint, str(refused))
            peer.is_refused = True
            await asyncio.sleep(REFUSED_S)
        except KvferryError as failed:
            self._failed(endpoint, str(failed))
        except Exception:
            self._failed(endpoint, "an internal error")
            logger.exception("messages for %s:%d could not be sent", *endpoint[:2])
        finally:
            if self._peers.get(endpoint) is peer:  # it may have been dropped meanwhile, and added again
                del self._peers[endpoint]

    async def _send_until_idle(self, endpoint: Endpoint, queue: asyncio.Queue[bytes]) -> None:
        connection: Connection | None = None
        try:
            while True:
                try:
                    frame = await asyncio.wait_for(queue.get(), IDLE_S)
                except asyncio.TimeoutError:
                    if queue.empty():  # one may have been put since the time was over
                        return
                    continue
                if connection is None or connection.has_ended:
                    host, port, _ = endpoint
                    connection = await within(CONNECT_S, self._client.connect(host, port, _MOST_ANSWER_BYTES))
                    connection.close_at_end()
                await connection.send(frame)
                queue.task_done()
        finally:
            if connection is not None:
                connection.close(_LINGER_MS)

    def _failed(self, endpoint: Endpoint, why: str) -> None:
        self._counters.add("side_channel_errors")
        self._failures.warning("side channel of %s:%d: %s", endpoint[0], endpoint[1], why)
