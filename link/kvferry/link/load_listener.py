"""A worker notifies its engine's scheduler when a load has ended, so that the scheduler need not step to find out.

    worker's transfer thread                                 scheduler
    `LoadNotifier`: a load has ended ─ datagram: its index ─►  `LoadListener`, which wakes the engine's loop

The worker's end stands where its results are, in `worker/loads/results.py`.

vLLM lets a scheduler hear of its workers by steps only, and both poll for a second after each step. A notification only
says that a step is worth while: the report of the load comes with that step.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

from kvferry.link import limits

logger = logging.getLogger(__name__)

INDEX_BYTES = 4
"""A datagram: the index of a worker in its engine, little endian."""

ADDRESS = "\0kvferry-{boot}"
"""In Linux's abstract namespace: the socket leaves no file behind, whatever ends the process."""


def datagram_socket() -> socket.socket:
    """A socket for either end, which never waits."""
    created = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    created.setblocking(False)
    return created


class LoadListener:
    """The scheduler's end; `receive` is to be called when the file descriptor is readable.

    Args:
        boot: of the engine.
        workers: how many there are.
        wake: called for notifications, on the thread that receives them.
        depth: steps that the engine begins before it has the report of the first of them.
    """

    def __init__(
        self, boot: str, workers: int, wake: Callable[[], None], depth: int = 1
    ) -> None:
        self._has_ended_loads = False
        self._depth = depth
        self._unreported_steps = 0
        self._unheard_workers = set(range(workers))
        self._wake = wake
        self._socket = datagram_socket()
        try:
            self._socket.bind(ADDRESS.format(boot=boot))
        except OSError as error:
            # Without it the scheduler steps while loads are under way, as it does for workers on other hosts.
            logger.debug("ends of loads are not notified: %s", error)

    def fileno(self) -> int:
        """The file descriptor."""
        return self._socket.fileno()

    @property
    def hears_all_workers(self) -> bool:
        """True if every worker has notified before.

        Workers on another host, or in another network namespace, cannot. So a scheduler relies on notifications only
        once it has one of each of its workers.
        """
        return not self._unheard_workers

    @property
    def has_no_news(self) -> bool:
        """True if no load has ended since the last step began, and every ended one is in a report that has arrived."""
        return not self._has_ended_loads and not self._unreported_steps

    def begin_step(self) -> None:
        """A step begins: its report has the loads that have ended so far."""
        # Cleared before anything else: another thread may receive a notification meanwhile, which is for the next step.
        has_ended_loads = self._has_ended_loads
        self._has_ended_loads = False
        if has_ended_loads:
            self._unreported_steps = self._depth - 1
        else:
            self._unreported_steps = max(0, self._unreported_steps - 1)

    def receive(self) -> None:
        """Receive the notifications that have arrived, or the first of very many: the others are received next."""
        # Any program of this host that knows the boot can send them, without end.
        with contextlib.suppress(BlockingIOError):
            for _ in range(limits.MESSAGES_AT_ONCE):
                # One byte more than an index has, so that a longer datagram is not taken for one.
                datagram = self._socket.recv(INDEX_BYTES + 1)
                if not datagram:
                    break
                self._unheard_workers.discard(int.from_bytes(datagram, "little"))
                self._has_ended_loads = True
        self._wake()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
