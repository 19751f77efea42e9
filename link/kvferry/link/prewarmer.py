"""Finds the static peers before the first request needs them.

For each address a task finds out which engine answers there, keeps the connection, and begins again when that has
ended: then the engine has restarted. The next step's orders pass the answer to the workers. An address without an
answer delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NoReturn

import zmq

from kvferry.link import limits
from kvferry.link.client import SideChannelClient, describe, refusal
from kvferry.link.connection import Connection, within
from kvferry.protocol.errors import KvferryError, PeerRefused
from kvferry.protocol.handshake import (
    MAX_PART_FRAME_BYTES,
    UNKNOWN_ENGINE,
    Hello,
    Refused,
    decode_without_workers,
)
from kvferry.protocol.hosts import host_port
from kvferry.protocol.orders import Prewarm

logger = logging.getLogger(__name__)


class PeerPrewarmer:
    """Finds the producers at these addresses, from `start` until the client is closed.

    Args:
        addresses: hosts and ports of their side channels, as requests will name them.
        client_id: the id of this engine.
        own_boot: of this engine, which is left out if it is among them.
        tell: called on the client's thread with every producer that has answered, once per connection.
        timeout_s: for connecting and the answer together.
    """

    def __init__(
        self,
        client: SideChannelClient,
        addresses: Iterable[tuple[str, int]],
        client_id: str,
        own_boot: str,
        tell: Callable[[Prewarm], None],
        timeout_s: float,
    ) -> None:
        self._client = client
        self._addresses = tuple(dict.fromkeys(addresses))
        self._client_id = client_id
        self._own_boot = own_boot
        self._tell = tell
        self._timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start, once; returns at once."""
        self._client.call_soon(self._begin)

    def _begin(self) -> None:
        self._tasks = [asyncio.ensure_future(self._follow(*address)) for address in self._addresses]

    async def _follow(self, host: str, port: int) -> None:
        """Find the producer at an address, again and again."""
        failures = 0
        logged = ""  # an error is logged once, until it is over or changes
        while True:
            connection: Connection | None = None
            try:
                finding = _find(self._client, host, port, self._client_id)
                found = await within(self._timeout_s, finding)
                connection, producer = found
                # By the boot: an engine's id may be another engine's, too.
                if producer.boot == self._own_boot:
                    return
                logger.info("peer=%s@%s answers", producer.engine_id, host_port(host, port))
                self._tell(producer)
                failures = 0
                logged = ""
                await _until_ended(connection)
            except (KvferryError, zmq.ZMQError) as error:
                why = str(error)
            except Exception as bug:
                why = repr(bug)
                logger.exception("prewarming %s failed", host_port(host, port))
            finally:
                if connection is not None:
                    connection.close()
            if why != logged:
                logger.warning("prewarming %s: %s", host_port(host, port), why)
                logged = why
            failures += 1
            await asyncio.sleep(limits.PREWARM_RETRY.delay_s(failures))


async def _find(
    client: SideChannelClient, host: str, port: int, client_id: str
) -> tuple[Connection, Prewarm]:
    """The connection to the listener at an address, and its engine.

    Raises:
        KvferryError: no usable answer came.
    """
    connection = await client.connect(host, port, MAX_PART_FRAME_BYTES, waits=True)
    try:
        hello = Hello(engine_id=UNKNOWN_ENGINE, client_id=client_id, queries_prompts=True)
        answer = decode_without_workers(await describe(connection, hello))
        if isinstance(answer, Refused):
            raise PeerRefused(refusal(answer))
    except BaseException:
        connection.close()
        raise
    producer = Prewarm(
        host=host,
        port=port,
        engine_id=answer.engine_id,
        boot=answer.boot,
        is_static=True,
    )
    return connection, producer


async def _until_ended(connection: Connection) -> NoReturn:
    """Wait for the end of a connection.

    Raises:
        ConnectionEnded: always.
    """
    # Nothing more is sent, so nothing should come. Messages that come anyway are dropped.
    while True:
        await connection.receive()
