"""Finds the static peers before the first request needs them.

For each address a task finds out which engine answers there, and again whenever the connection has ended: then the
engine has restarted. The next step's orders pass the answer to the workers. An address without an answer delays no
other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvferry.link import limits
from kvferry.link.client import ask_description, refusal
from kvferry.link.connection import within
from kvferry.link.peer_link import ConnectedPeer, PeerLink, PeerLinks
from kvferry.protocol.errors import KvferryError, PeerRefused
from kvferry.protocol.handshake import (
    UNKNOWN_ENGINE,
    Hello,
    Refused,
    decode_without_workers,
)
from kvferry.protocol.hosts import ChannelAddress, host_port
from kvferry.protocol.orders import Prewarm

logger = logging.getLogger(__name__)


class PeerPrewarmer:
    """Finds the producers at these addresses, from `start` until the links are closed.

    Args:
        addresses: hosts and ports of their side channels, as requests will name them.
        client_id: the id of this engine.
        own_boot: of this engine, which is left out if it is among them.
        tell: called on the links' thread with every producer that has answered, once per connection.
        timeout_s: for the answer over a connection.
    """

    def __init__(
        self,
        links: PeerLinks,
        addresses: Iterable[ChannelAddress],
        client_id: str,
        own_boot: Callable[[], str],
        tell: Callable[[Prewarm], None],
        timeout_s: float,
    ) -> None:
        self._links = links
        self._addresses = tuple(dict.fromkeys(addresses))
        self._client_id = client_id
        self._own_boot = own_boot
        self._tell = tell
        self._timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start, once; returns at once."""
        self._links.client.call_soon(self._begin)

    def _begin(self) -> None:
        for address in self._addresses:
            link = self._links.to(address)
            self._tasks.append(asyncio.ensure_future(self._follow(link)))

    async def _follow(self, link: PeerLink) -> None:
        """Find the producer at an address, again and again."""
        loop = asyncio.get_running_loop()
        where = host_port(*link.address)
        logged = ""  # an error is logged once, until it is over or changes
        link.is_static = True
        link.update()
        while True:
            asked_s: float | None = None
            try:
                peer = await link.connected()
                asked_s = loop.time()
                producer = await within(self._timeout_s, self._find(peer, link.address))
                # By the boot: an engine's id may be another engine's, too.
                if producer.boot == self._own_boot():
                    link.is_static = False
                    link.update()
                    return
                logger.info("peer=%s@%s answers", producer.engine_id, where)
                self._tell(producer)
                logged = ""
                await asyncio.wait((peer.ended,))
                why = str(peer.ended.result())
            except KvferryError as error:
                why = str(error)
            except Exception as bug:
                why = repr(bug)
                logger.exception("prewarming %s failed", where)
            if why != logged:
                logger.warning("prewarming %s: %s", where, why)
                logged = why
            if asked_s is not None:
                # It is starting, perhaps, or ends every connection: it must fill neither the log nor the engine's
                # steps. An attempt to connect has a pause of its own.
                await asyncio.sleep(asked_s + limits.RETRY.longest_s - loop.time())

    async def _find(self, peer: ConnectedPeer, address: ChannelAddress) -> Prewarm:
        """The engine at the other end of a connection.

        Raises:
            KvferryError: no usable answer came.
        """
        hello = Hello(
            engine_id=UNKNOWN_ENGINE, client_id=self._client_id, queries_prompts=True
        )
        answer = decode_without_workers(await ask_description(peer.ask, hello))
        if isinstance(answer, Refused):
            raise PeerRefused(refusal(answer))
        host, port = address
        return Prewarm(
            host=host,
            port=port,
            engine_id=answer.engine_id,
            boot=answer.boot,
            is_static=True,
        )
