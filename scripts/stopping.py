"""Whatever asks a command to stop ends it in one way, in which everything that it started is ended too."""

from __future__ import annotations

import signal
from types import FrameType

STOPPED = "stopped; everything that was started has been ended"


def raise_when_stopped() -> None:
    """From now on signals that ask this process to stop raise `KeyboardInterrupt` wherever it is.

    SIGINT too: asyncio's own handler would wait for the next await, and engines are awaited without one.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
