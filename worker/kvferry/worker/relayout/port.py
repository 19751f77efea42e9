"""The port of the relayout. Every implementation passes `tests/worker/relayout/test_conformance.py`."""

from __future__ import annotations

from typing import Protocol

from kvferry.worker.memory.caches import DeviceMark
from kvferry.worker.relayout.wave_table import WaveTable


class Relayout(Protocol):
    """Puts waves in place. Used by one thread."""

    @property
    def launches(self) -> int:
        """Kernels launched for waves so far: one for each wave with units."""
        ...

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        """Begin to put a wave in place; never waits.

        The bytes of the source must have arrived, and nothing that was launched earlier may still write to the
        destination. Bytes that two pieces write get the value of either.

        Returns:
            A mark that is reached when it is done: until then the source and the destination must not be accessed.
            None while too many waves are under way: call again.

        Raises:
            InvalidTable: the wave would access memory that is not its own, or is too large. Nothing was begun.
        """
        ...

    def mark(self) -> DeviceMark:
        """A mark that is reached when every wave begun so far is done, also one whose start raised."""
        ...
