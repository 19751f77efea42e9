"""The lease table against a model that knows only the rules, over random histories."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.protocol.ids import EMPTY, Epoch, SlotState, epoch_to_text, slot_word
from kvferry.protocol.notifications import Done
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.protocol.params import Blocks
from kvferry.worker.leases import LeaseTable
from tests.fakes.device_mark import FakeMark

SLOTS = 3
CONSUMERS = ("a" * 32, "b" * 32)


class ModelLease:
    """One lease by the rules: everything that ever happened to it."""

    def __init__(self, slot: int, epoch: Epoch, request_id: str) -> None:
        self.slot, self.epoch, self.request_id = slot, epoch, request_id
        self.held = self.ready = self.over = False
        self.mark = FakeMark()
        self.notifiers: set[tuple[str, int]] = set()
        self.expected: dict[str, int] = {}

    @property
    def text(self) -> str:
        return epoch_to_text(self.epoch)

    @property
    def complete(self) -> bool:
        counts = {consumer: sum(who == consumer for who, _ in self.notifiers) for consumer in self.expected}
        return self.held and any(counts[consumer] >= expected for consumer, expected in self.expected.items())

    @property
    def word(self) -> int:
        if self.over:
            return EMPTY
        return slot_word(self.epoch, SlotState.READY if self.ready else SlotState.COMPUTING)


leases_of = st.integers(0, 10**6)
notifiers = st.tuples(st.sampled_from(CONSUMERS), st.integers(0, 2), st.integers(1, 3))


class LeaseTableHistory(RuleBasedStateMachine):
    """Orders as the scheduler may give them, notifications as any agent may send them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(SLOTS)
        self.leases: list[ModelLease] = []
        self.reported: list[str] = []

    def current(self, slot: int) -> ModelLease | None:
        return next((lease for lease in self.leases if lease.slot == slot and not lease.over), None)

    def pick(self, draw: int, among: list[ModelLease]) -> ModelLease:
        return among[draw % len(among)]

    def report(self, lease: ModelLease, request_id: str | None) -> None:
        """Check that a lease that the table reports as over is over by the rules, was held, and has an empty word."""
        if request_id is None:
            return
        assert request_id == lease.request_id
        assert lease.held, "reported before its hold"
        assert self.table.words[lease.slot] == EMPTY, "reported before its word was cleared"
        assert request_id not in self.reported, "reported twice"
        self.reported.append(request_id)

    def free(self) -> list[int]:
        """Slots without a lease, and those whose lease was abandoned before its hold: its end may come later."""
        found = {slot: self.current(slot) for slot in range(SLOTS)}
        return [slot for slot, lease in found.items() if lease is None or not lease.held]

    @precondition(lambda self: bool(self.free()))
    @rule(draw=leases_of)
    def open(self, draw: int) -> None:
        free = self.free()
        former = self.current(free[draw % len(free)])
        if former is not None:
            former.over = True
        number = len(self.leases)
        lease = ModelLease(free[draw % len(free)], Epoch(1 + number * 977 % 2**59), f"request-{number}")
        self.leases.append(lease)
        self.table.open(LeaseOpen(slot=lease.slot, epoch=lease.text))

    @precondition(lambda self: any(not x.held for x in self.leases))
    @rule(draw=leases_of)
    def hold(self, draw: int) -> None:
        lease = self.pick(draw, [x for x in self.leases if not x.held])
        said = self.table.hold(LeaseHold(request_id=lease.request_id, slot=lease.slot, epoch=lease.text), lease.mark)
        lease.held = True
        if lease.over:
            assert said is None, "a lease that had ended was held"
            return
        assert (said is not None) == lease.complete, "an early done must be remembered"
        lease.over = lease.complete
        self.report(lease, said)

    @precondition(lambda self: any(x.held for x in self.leases))
    @rule(draw=leases_of)
    def ready(self, draw: int) -> None:
        lease = self.pick(draw, [x for x in self.leases if x.held])
        lease.mark.over = lease.ready = True
        self.table.advance()
        assert self.table.pending() == sum(x.held and not x.ready and not x.over for x in self.leases)

    @precondition(lambda self: bool(self.leases))
    @rule(draw=leases_of)
    def end(self, draw: int) -> None:
        lease = self.pick(draw, self.leases)
        said = self.table.end(LeaseEnd(request_id=lease.request_id, slot=lease.slot, epoch=lease.text))
        assert (said is not None) == (lease.held and not lease.over)
        lease.over = True
        self.report(lease, said)

    @precondition(lambda self: bool(self.leases))
    @rule(draw=leases_of, notifier=notifiers)
    def done(self, draw: int, notifier: tuple[str, int, int]) -> None:
        lease = self.pick(draw, self.leases)
        consumer, worker, expected = notifier
        message = Done(slot=lease.slot, epoch=lease.text, consumer=consumer, worker=worker, expected=expected)
        if lease.over:
            with pytest.raises(KeyError):
                self.table.done(message)
            return
        said = self.table.done(message)
        lease.notifiers.add((consumer, worker))
        lease.expected[consumer] = max(lease.expected.get(consumer, 0), expected)
        assert (said is not None) == lease.complete
        lease.over = lease.complete
        self.report(lease, said)

    @rule(slot=st.integers(0, 2**24 - 1), epoch=st.integers(1, 2**60 - 1))
    def forge(self, slot: int, epoch: int) -> None:
        """Any agent may guess an epoch; only the epoch of the slot's own lease counts."""
        if any(lease.epoch == epoch for lease in self.leases):
            return
        text = epoch_to_text(Epoch(epoch))
        with pytest.raises(KeyError):
            self.table.done(Done(slot=slot, epoch=text, consumer=CONSUMERS[0], worker=0, expected=1))
        assert self.table.end(LeaseEnd(request_id="forged", slot=slot, epoch=text)) is None
        assert self.table.hold(LeaseHold(request_id="forged", slot=slot, epoch=text), FakeMark(over=True)) is None
        self.table.advance()

    @invariant()
    def words_say_what_the_rules_say(self) -> None:
        for slot in range(SLOTS):
            lease = self.current(slot)
            assert self.table.words[slot] == (EMPTY if lease is None else lease.word)
        assert self.table.held() == sum(lease.held and not lease.over for lease in self.leases)


TestLeaseTableHistory = LeaseTableHistory.TestCase


def hold(slot: int, epoch: str) -> LeaseHold:
    return LeaseHold(request_id="r", slot=slot, epoch=epoch)


def done(slot: int, epoch: str, consumer: str, worker: int, expected: int) -> Done:
    return Done(slot=slot, epoch=epoch, consumer=consumer, worker=worker, expected=expected)


def test_a_worker_that_repeats_itself_does_not_stand_for_its_sibling() -> None:
    table, epoch = LeaseTable(1), epoch_to_text(Epoch(5))
    table.open(LeaseOpen(slot=0, epoch=epoch))
    table.hold(hold(0, epoch), FakeMark())
    for _ in range(3):
        assert table.done(done(0, epoch, CONSUMERS[0], 0, expected=2)) is None
    assert table.done(done(0, epoch, CONSUMERS[0], 1, expected=2)) == "r"


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
    assert table.held() == 0
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
    table.hold(LeaseHold(request_id="r", slot=1, epoch=epoch, blocks=((1, 2),)), computed)
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
    assert table.pending() == 0


def test_blocks_of_a_lease_that_has_ended_are_not_copied() -> None:
    table, mirror, computed = held_with_a_mirror()
    table.end(LeaseEnd(request_id="r", slot=1, epoch=epoch_to_text(Epoch(5))))
    computed.over = True
    assert not table.advance()
    assert not mirror.copied
    assert table.pending() == 0
    assert int(table.words[1]) == EMPTY
