"""Output and end of this folder's commands: lines with the elapsed time, short paths, one way to be stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

STOPPED = "stopped; everything that was started has been ended"


class Progress:
    """Says what is being done, with the seconds since it was made."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """One line."""
        print(f"[{self.elapsed_s:6.1f} s] {text}", flush=True)


def shown(path: Path) -> str:
    """A path from the working directory, or whole where it is elsewhere."""
    return f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)


def raise_when_stopped() -> None:
    """From now on signals that ask this process to stop raise `KeyboardInterrupt` wherever it is.

    SIGINT too: asyncio's own handler would wait for the next await, and engines are awaited without one.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
