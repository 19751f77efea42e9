"""Holds that wait: READY comes after the device, after the copy, and never for a lease that has ended."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from kvferry.protocol.ids import SlotState, epoch_from_text, slot_word
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.protocol.params import Blocks
from kvferry.worker.leases.pending_ready import PendingReady
from kvferry.worker.leases.table import LeaseTable
from kvferry.worker.staging.host_buffer import HostMirror

EPOCH = "000000000000abc"


class Mark:
    def __init__(self, *, over: bool) -> None:
        self.over = over

    def reached(self) -> bool:
        return self.over


class Mirror:
    """Notes what is copied."""

    def __init__(self) -> None:
        self.copied: list[Blocks] = []
        self.mark = Mark(over=False)

    def waves(self, blocks: Blocks) -> deque[Blocks]:
        return deque([blocks])

    def try_copy(self, waves: deque[Blocks]) -> Mark:
        self.copied.append(waves.popleft())
        return self.mark


def _scene() -> tuple[LeaseTable, Mirror, PendingReady]:
    table, mirror = LeaseTable(4), Mirror()
    pending = PendingReady(table, cast("Any", mirror))
    assert isinstance(cast("HostMirror", mirror), Mirror)
    return table, mirror, pending


def _hold(table: LeaseTable) -> LeaseHold:
    table.open(LeaseOpen(slot=1, epoch=EPOCH))
    hold = LeaseHold(request_id="r", slot=1, epoch=EPOCH, blocks=((1, 2),))
    table.hold(hold)
    return hold


def test_blocks_are_copied_after_the_device_and_ready_after_the_copy() -> None:
    table, mirror, pending = _scene()
    computed = Mark(over=False)
    pending.add(_hold(table), computed)
    assert not pending.step()
    assert not mirror.copied
    computed.over = True
    assert pending.step()
    assert mirror.copied == [((1, 2),)]
    assert not pending.step()
    assert int(table.words[1]) == slot_word(epoch_from_text(EPOCH), SlotState.COMPUTING)
    mirror.mark.over = True
    assert pending.step()
    assert int(table.words[1]) == slot_word(epoch_from_text(EPOCH), SlotState.READY)
    assert len(pending) == 0


def test_blocks_of_a_lease_that_has_ended_are_not_copied() -> None:
    table, mirror, pending = _scene()
    computed = Mark(over=False)
    pending.add(_hold(table), computed)
    table.end(LeaseEnd(request_id="r", slot=1, epoch=EPOCH))
    computed.over = True
    assert not pending.step()
    assert not mirror.copied
    assert len(pending) == 0
    assert int(table.words[1]) == 0
