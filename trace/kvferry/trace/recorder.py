"""A recorder: a queue from a busy thread to a writer thread.

`record` costs the busy thread one append. The writer may be slow or fail: records that do not fit into the queue are
dropped and counted, and the busy thread never waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Taken = TypeVar("Taken", contravariant=True)

GATHER_S = 0.2
"""Time between writes: a killed process loses at most the items of that time."""
CLOSE_S = 5.0
"""Most time that the end of a process waits for the writer."""
MOST_WAITING = 1 << 16
_BATCH = 256
"""Items per write: encoding them holds the interpreter's lock for a fraction of a millisecond."""


class Sink(Protocol[Taken]):
    """The destination of a recorder's items. Called by the writer thread."""

    def take(self, items: Sequence[Taken], lost: int) -> None:
        """Write the items, in order. May raise any exception: the items are lost then.

        Args:
            lost: items that were lost since the last call that did not raise.
        """

    def close(self) -> None:
        """Called once, after the last item."""


class Recorder(Generic[Item]):
    """One queue and one writer thread.

    Args:
        name: name of the thread.
        most_waiting: items in the queue; more are dropped.
    """

    def __init__(self, sink: Sink[Item], name: str = "kvferry-trace", *, most_waiting: int = MOST_WAITING) -> None:
        self._sink = sink
        self._most_waiting = most_waiting
        self._waiting: deque[Item] = deque()
        self._num_refused = 0
        self._num_failed = 0
        self._reported_lost = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Items that were not written and will not be."""
        return self._num_refused + self._num_failed

    def record(self, item: Item) -> None:
        """Queue an item to be written soon. Called by one thread; never raises, never waits."""
        if len(self._waiting) < self._most_waiting:
            self._waiting.append(item)
        else:
            self._num_refused += 1

    def close(self) -> None:
        """Write the waiting items, for at most `CLOSE_S`. Idempotent."""
        self._most_waiting = 0
        self._ending.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s: what was recorded last is not written after %g s", self._thread.name, CLOSE_S)

    def _run(self) -> None:
        while not self._ending.wait(GATHER_S):
            self._write_all()
        self._write_all()
        self._sink.close()

    def _write_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            lost = self.num_lost
            try:
                self._sink.take(batch, lost - self._reported_lost)
            except Exception as error:  # noqa: BLE001 - the next batch is written all the same
                if not self._num_failed:
                    logger.warning("%s: cannot be written, now and maybe later: %r", self._thread.name, error)
                self._num_failed += len(batch)
            else:
                self._reported_lost = lost
