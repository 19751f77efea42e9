"""Find the static peers before the first request needs them.

One thread asks each address which engine answers there, and again when that engine has restarted. The next step's
orders pass the answer to the workers. Nothing waits for this thread, and an address without an answer delays no other.
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

from kvferry.protocol.orders import Prewarm
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import derive_keys
from kvferry.scheduler.side_channel.addresses import Found, HostNames, address_of
from kvferry.scheduler.side_channel.inbox import WakingQueue
from kvferry.scheduler.side_channel.prewarm_target import PrewarmTarget

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
_LONGEST_WAIT_MS = 60_000


class PeerPrewarmer:
    """Finds the producers at these addresses, from `start` until `close`.

    Args:
        addresses: hosts and ports of their side channels, as requests will name them.
        asker: the id of this engine, which is left out if it is among them.
        tell: called on this object's thread with every producer that has answered.
        timeout_s: for each attempt.
        secrets: of the side channel.

    Raises:
        InvalidConfig: there are secrets, but ZMQ has no CURVE.
    """

    def __init__(
        self,
        addresses: Iterable[tuple[str, int]],
        asker: str,
        tell: Callable[[Prewarm], None],
        timeout_s: float,
        secrets: Secrets = (),
    ) -> None:
        derive_keys(secrets)
        self._asker = asker
        self._tell = tell
        self._inbox: WakingQueue[Found | None] = WakingQueue()
        self._names = HostNames(self._inbox.put)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._targets = [
            PrewarmTarget(host, port, asker, timeout_s, secrets, self._context)
            for host, port in dict.fromkeys(addresses)
        ]
        self._shown: dict[tuple[str, int], str] = {}
        self._thread = threading.Thread(target=self._run, name="kvferry-prewarmer", daemon=True)

    def start(self) -> None:
        """Start the thread, once. If the system has no thread left, log it: loads then begin with a handshake."""
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.error("peers are not prewarmed: %s", error)

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
                for target in list(self._targets):
                    self._turn(target, time.monotonic())
        finally:
            self._end()

    def _end(self) -> None:
        for target in self._targets:
            target.close()
        self._context.destroy(linger=0)
        self._inbox.close()

    def _wait(self) -> bool:
        """Wait until there is something to do. Returns whether to continue."""
        poller = zmq.Poller()
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        for target in self._targets:
            for socket in target.sockets:
                poller.register(socket, zmq.POLLIN)
        due_s = min((target.due_s for target in self._targets), default=math.inf)
        # Rounded up: a timeout below a millisecond would be 0, and the loop would spin.
        left_ms = math.ceil(min((due_s - time.monotonic()) * 1000, _LONGEST_WAIT_MS))
        poller.poll(0 if not self._inbox.empty() else max(0, left_ms))
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._inbox.get()
                if found is None:
                    return False
                for target in self._targets:
                    if target.host == found.host:
                        target.found(found.address, time.monotonic())
        return True

    def _turn(self, target: PrewarmTarget, now_s: float) -> None:
        try:
            self._advance(target, now_s)
        except Exception as bug:
            # The other targets continue, and this one is tried again later.
            logger.exception("prewarming %s:%d failed", target.host, target.port)
            target.back_off(repr(bug), now_s)
        self._show(target)

    def _advance(self, target: PrewarmTarget, now_s: float) -> None:
        if target.sockets:
            producer = target.on_event(now_s)
            if producer is not None:
                self._answered(target, producer)
        if target.due_s <= now_s and target.turn(now_s):
            address = address_of(target.host)
            if address is not None:
                target.found(address, now_s)
            else:
                self._names.find(target.host)

    def _answered(self, target: PrewarmTarget, producer: Prewarm) -> None:
        if producer.engine_id == self._asker:
            target.close()
            self._targets.remove(target)
            return
        logger.info("peer=%s@%s:%d answers", producer.engine_id, producer.host, producer.port)
        self._tell(producer)

    def _show(self, target: PrewarmTarget) -> None:
        """Log an error once, until it is over or changes."""
        where = (target.host, target.port)
        if target.trouble != self._shown.get(where, ""):
            self._shown[where] = target.trouble
            if target.trouble:
                logger.warning("prewarming %s:%d: %s", *where, target.trouble)
