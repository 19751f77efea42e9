"""Single scenes of the lease table: reports, a former lease's orders, the copy in host memory."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.protocol.params import Blocks
from kvferry.protocol.slots import EMPTY, Done, SlotState, epoch_to_text, slot_word
from kvferry.worker.leases import LeaseTable
from tests.fakes.device_mark import FakeMark

CONSUMER = "a" * 32


def hold(slot: int, epoch: str) -> LeaseHold:
    return LeaseHold(request_id="r", slot=slot, epoch=epoch)


def done(slot: int, epoch: str, consumer: str, worker: int, expected: int) -> Done:
    return Done(
        slot=slot, epoch=epoch, consumer=consumer, worker=worker, expected=expected
    )


def test_a_worker_that_repeats_itself_does_not_stand_for_its_sibling() -> None:
    table, epoch = LeaseTable(1), epoch_to_text(Epoch(5))
    table.open(LeaseOpen(slot=0, epoch=epoch))
    table.hold(hold(0, epoch), FakeMark())
    for _ in range(3):
        assert table.done(done(0, epoch, CONSUMER, 0, expected=2)) is None
    assert table.done(done(0, epoch, CONSUMER, 1, expected=2)) == "r"


def test_orders_of_a_former_lease_do_not_touch_the_next_one_of_the_slot() -> None:
    table = LeaseTable(1)
    old, new = epoch_to_text(Epoch(5)), epoch_to_text(Epoch(6))
    table.open(LeaseOpen(slot=0, epoch=old))
    mark = FakeMark()
    table.hold(hold(0, old), mark)
    assert table.end(LeaseEnd(request_id="r", slot=0, epoch=old)) == "r"
    table.open(LeaseOpen(slot=0, epoch=new))
    mark.over = True
    table.advance()
    assert table.end(LeaseEnd(request_id="r", slot=0, epoch=old)) is None
    assert table.words[0] == slot_word(Epoch(6), SlotState.COMPUTING)


def test_clear_ends_every_lease_and_reports_none() -> None:
    table, epoch = LeaseTable(2), epoch_to_text(Epoch(5))
    table.open(LeaseOpen(slot=1, epoch=epoch))
    table.hold(hold(1, epoch), FakeMark(over=True))
    table.advance()
    table.clear()
    assert not table.words.any()
    assert not table.held
    assert table.end(LeaseEnd(request_id="r", slot=1, epoch=epoch)) is None


class Mirror:
    """A copy of the caches in host memory, without the bytes."""

    def __init__(self) -> None:
        self.copied: list[Blocks] = []
        self.mark = FakeMark()

    def waves(self, blocks: Blocks) -> deque[Blocks]:
        return deque([blocks])

    def try_copy(self, waves: deque[Blocks]) -> FakeMark:
        self.copied.append(waves.popleft())
        return self.mark


def held_with_a_mirror() -> tuple[LeaseTable, Mirror, FakeMark]:
    mirror, computed = Mirror(), FakeMark()
    table, epoch = LeaseTable(2, cast("Any", mirror)), epoch_to_text(Epoch(5))
    table.open(LeaseOpen(slot=1, epoch=epoch))
    table.hold(
        LeaseHold(request_id="r", slot=1, epoch=epoch, blocks=((1, 2),)), computed
    )
    return table, mirror, computed


def test_blocks_are_copied_after_the_device_and_ready_after_the_copy() -> None:
    table, mirror, computed = held_with_a_mirror()
    assert not table.advance()
    assert not mirror.copied
    computed.over = True
    assert table.advance()
    assert mirror.copied == [((1, 2),)]
    assert not table.advance()
    assert int(table.words[1]) == slot_word(Epoch(5), SlotState.COMPUTING)
    mirror.mark.over = True
    assert table.advance()
    assert int(table.words[1]) == slot_word(Epoch(5), SlotState.READY)
    assert not table.pending


def test_blocks_of_a_lease_that_has_ended_are_not_copied() -> None:
    table, mirror, computed = held_with_a_mirror()
    table.end(LeaseEnd(request_id="r", slot=1, epoch=epoch_to_text(Epoch(5))))
    computed.over = True
    assert not table.advance()
    assert not mirror.copied
    assert not table.pending
    assert int(table.words[1]) == EMPTY
