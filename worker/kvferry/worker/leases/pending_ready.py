"""Held leases that are not READY yet: the device still writes their blocks, or they are being copied."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvferry.protocol.orders import LeaseHold
from kvferry.protocol.params import Blocks
from kvferry.worker.leases.table import LeaseTable
from kvferry.worker.memory.device import DeviceMark
from kvferry.worker.staging.host_buffer import HostMirror


@dataclass(slots=True, eq=False)
class _PendingHold:
    """A hold that waits for the device.

    Attributes:
        mark: reached when everything that may write the blocks has finished; later, when they have been copied.
        waves: blocks that have yet to be copied before they may be read.
    """

    hold: LeaseHold
    mark: DeviceMark
    waves: deque[Blocks]


class PendingReady:
    """The holds that wait for the device. Used on the transfer thread.

    Args:
        mirror: where blocks are copied to before they may be read; None where peers read the caches.
    """

    def __init__(self, table: LeaseTable, mirror: HostMirror | None) -> None:
        self._table = table
        self._mirror = mirror
        self._pending: list[_PendingHold] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, hold: LeaseHold, mark: DeviceMark) -> None:
        """Set the lease READY once the mark is reached and the blocks are where peers read them."""
        waves = self._mirror.waves(hold.blocks) if self._mirror is not None else deque[Blocks]()
        self._pending.append(_PendingHold(hold, mark, waves))

    def step(self) -> bool:
        """Advance the holds whose mark is reached. Returns whether there were any.

        A lease that has ended meanwhile is dropped: its blocks may be another request's by now.
        """
        self._pending = [one for one in self._pending if self._table.is_open(one.hold.slot, one.hold.epoch)]
        reached = [one for one in self._pending if one.mark.reached()]
        for one in reached:
            self._pending.remove(one)
            if not one.waves or self._mirror is None:
                self._table.ready(one.hold)
                continue
            self._pending.append(one)  # before the copy: an exception does not lose it, and others come first next time
            one.mark = self._mirror.try_copy(one.waves) or one.mark
        return bool(reached)
