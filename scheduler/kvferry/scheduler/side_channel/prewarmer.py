"""Producers that this engine is configured to know are looked for from the start, so that no request meets one first.

One thread asks who answers at each address and says so; when an address is answered by a new life, it says so again.
The workers are told by the next step's orders. Nobody waits for it, and an address where nobody is delays no other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from kvferry.protocol.orders import Meet
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import derive_keys
from kvferry.scheduler.side_channel.addresses import Found, HostNames, address_of
from kvferry.scheduler.side_channel.inbox import WakingQueue
from kvferry.scheduler.side_channel.prewarm_target import Acquaintance

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
_LONGEST_WAIT_MS = 60_000


class Acquaintances:
    """Looks for producers from `start` until `close`.

    Args:
        addresses: hosts and ports of their side channels, as requests will name them.
        asker: this engine, which may be among them and is left out.
        tell: called on this class's thread with everybody who has answered.
        timeout_s: for each attempt.
        secrets: of the side channel.

    Raises:
        InvalidConfig: there are secrets, and ZMQ has no CURVE.
    """

    def __init__(
        self,
        addresses: Iterable[tuple[str, int]],
        asker: str,
        tell: Callable[[Meet], None],
        timeout_s: float,
        secrets: Secrets = (),
    ) -> None:
        derive_keys(secrets)
        self._asker = asker
        self._tell = tell
        self._inbox: WakingQueue[Found | None] = WakingQueue()
        self._names = HostNames(self._inbox.put)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._all = [
            Acquaintance(host, port, asker, timeout_s, secrets, self._context)
            for host, port in dict.fromkeys(addresses)
        ]
        self._shown: dict[tuple[str, int], str] = {}
        self._thread = threading.Thread(target=self._run, name="kvferry-acquaintances", daemon=True)

    def start(self) -> None:
        """Begin; once. Without a thread of the system's nobody is looked for, and requests meet producers first."""
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.error("producers that are known at the start are not looked for: %s", error)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        if self._thread.ident is None:
            self._end()
        elif self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while self._wait():
                for one in list(self._all):
                    self._turn(one, time.monotonic())
        finally:
            self._end()

    def _end(self) -> None:
        for one in self._all:
            one.close()
        self._context.destroy(linger=0)
        self._inbox.close()

    def _wait(self) -> bool:
        """Until there is something to do. Returns whether to go on."""
        poller = zmq.Poller()
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        for one in self._all:
            for socket in one.sockets:
                poller.register(socket, zmq.POLLIN)
        due_s = min((one.due_s for one in self._all), default=math.inf)
        # Rounded up: a wait of less than a millisecond would not wait at all, and spin.
        left_ms = math.ceil(min((due_s - time.monotonic()) * 1000, _LONGEST_WAIT_MS))
        poller.poll(0 if not self._inbox.empty() else max(0, left_ms))
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._inbox.get()
                if found is None:
                    return False
                for one in self._all:
                    if one.host == found.host:
                        one.found(found.address, time.monotonic())
        return True

    def _turn(self, one: Acquaintance, now_s: float) -> None:
        try:
            self._bring_on(one, now_s)
        except Exception as bug:
            # Whoever it was about, the others are still to be looked for, and it is itself, later.
            logger.exception("the producer at %s:%d could not be looked for", one.host, one.port)
            one.rest(repr(bug), now_s)
        self._show(one)

    def _bring_on(self, one: Acquaintance, now_s: float) -> None:
        if one.sockets:
            met = one.hear(now_s)
            if met is not None:
                self._met(one, met)
        if one.due_s <= now_s and one.turn(now_s):
            address = address_of(one.host)
            if address is not None:
                one.found(address, now_s)
            else:
                self._names.find(one.host)

    def _met(self, one: Acquaintance, met: Meet) -> None:
        if met.engine_id == self._asker:
            one.close()
            self._all.remove(one)
            return
        logger.info("peer=%s@%s:%d answers", met.engine_id, met.host, met.port)
        self._tell(met)

    def _show(self, one: Acquaintance) -> None:
        """Trouble is worth one line, until it is over or another one."""
        where = (one.host, one.port)
        if one.trouble != self._shown.get(where, ""):
            self._shown[where] = one.trouble
            if one.trouble:
                logger.warning("the producer at %s:%d is looked for: %s", *where, one.trouble)
