"""The port: whoever relays out. Every implementation passes `tests/worker/relayout/test_conformance.py`."""

from __future__ import annotations

from typing import Protocol

from kvferry.worker.memory.device import DeviceMark
from kvferry.worker.relayout.wave_table import WaveTable


class Relayout(Protocol):
    """Puts waves in place. Used by one thread."""

    @property
    def launches(self) -> int:
        """Kernels launched for waves so far: one per wave that had anything to do."""
        ...

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        """Begin to put a wave in place; never waits.

        The bytes of the source must be there, and nothing that was launched earlier may still write to the
        destination. Bytes that two pieces write have either's value.

        Returns:
            When it is done: until then the source and the destination must not be touched. None while too many
            waves are on their way: ask again.

        Raises:
            InvalidTable: the wave would touch memory that is not its own, or is too large. Nothing was begun.
        """
        ...

    def mark(self) -> DeviceMark:
        """Reached when every wave that was begun so far is done, one whose start raised included."""
        ...
