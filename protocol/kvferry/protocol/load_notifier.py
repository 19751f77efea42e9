"""A worker rings when one of its loads has ended, so that its engine's scheduler need not step to find out.

vLLM lets a scheduler hear of its workers by steps only, and both poll for a second after each. The bell is a datagram
socket in Linux's abstract namespace, named by the engine's boot: it leaves no file behind. A ring is a hint. Workers on
another host, or in another network namespace, cannot ring, so a scheduler relies on the bell only once each of its
workers has rung.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

_INDEX_BYTES = 4


def _address(boot: str) -> str:
    return f"\0kvferry-{boot}"


def _socket() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.setblocking(False)
    return found


class LoadNotifier:
    """A worker's end. Thread-safe.

    Args:
        index: of the worker in its engine.
    """

    def __init__(self, index: int) -> None:
        self._index = index.to_bytes(_INDEX_BYTES, "little")
        self._address = ""

    def tie(self, boot: str) -> None:
        """Set the engine's boot, which comes with its orders."""
        self._address = _address(boot)

    def ring(self) -> None:
        """Ring, if there is a bell that can be reached. A full queue of rings is as good as one more."""
        if self._address:
            with contextlib.suppress(OSError), _socket() as once:
                once.sendto(self._index, self._address)


class LoadListener:
    """The scheduler's end; `take_rings` is to be called when the file descriptor is readable.

    Args:
        boot: of the engine.
        workers: how many there are.
        wake: called for rings, on the thread that takes them.
        depth: steps that the engine begins before it has the report of the first of them.
    """

    def __init__(self, boot: str, workers: int, wake: Callable[[], None], depth: int = 1) -> None:
        self._has_rung = False
        self._depth = depth
        self._unheard_steps = 0
        self._unproven = set(range(workers))
        self._wake = wake
        self._socket = _socket()
        try:
            self._socket.bind(_address(boot))
        except OSError as error:
            logger.debug("no bell: %s", error)

    def fileno(self) -> int:
        """The file descriptor."""
        return self._socket.fileno()

    @property
    def is_proven(self) -> bool:
        """Whether all workers have rung before."""
        return not self._unproven

    @property
    def is_silent(self) -> bool:
        """Whether no load has ended since the last step began, and none is in a report that the engine has not got."""
        return not (self._has_rung or self._unheard_steps)

    def begin_step(self) -> None:
        """A step begins; what has rung is in its report."""
        has_rung, self._has_rung = (
            self._has_rung,
            False,
        )  # before all else: another thread may ring meanwhile
        self._unheard_steps = self._depth - 1 if has_rung else max(0, self._unheard_steps - 1)

    def take_rings(self) -> None:
        """Take all rings that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while ring := self._socket.recv(_INDEX_BYTES + 1):
                self._unproven.discard(int.from_bytes(ring, "little"))
                self._has_rung = True
        self._wake()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
