"""How a thread does long work without holding up the engine's thread, with which it shares the interpreter's lock."""

from __future__ import annotations

import time

_HELD_S = 100e-6
_RELEASED_S = 50e-6


class LockPauses:
    """Gives the interpreter's lock away after every `_HELD_S` of one thread's work.

    A thread that does not wait for anything gives the lock away after 5 ms only, for which the engine's thread would
    wait. So it sleeps for a moment.
    """

    def __init__(self) -> None:
        self._released_s = 0.0

    def begin(self) -> None:
        """The thread has just waited: its work begins now."""
        self._released_s = time.perf_counter()

    def pause(self) -> None:
        """Called after each part of the work: sleep if the lock was held for long enough."""
        if time.perf_counter() >= self._released_s + _HELD_S:
            time.sleep(_RELEASED_S)
            self._released_s = time.perf_counter()
