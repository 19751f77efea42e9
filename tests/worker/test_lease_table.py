"""The lease table and its rows against a model that knows only the rules, over random histories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress
from kvferry.protocol.slots import (
    EMPTY,
    STREAM_ROWS,
    Done,
    SlotState,
    epoch_to_text,
    header_word,
    progress_word,
    slot_word,
)
from kvferry.worker.leases import LeaseTable, StreamRowTable
from tests.fakes.device_mark import FakeMark
from tests.harness.integrity import table_errors

SLOTS = 3
ROW_BLOCKS = (4, 7)
CONSUMERS = ("a" * 32, "b" * 32)


class ModelLease:
    """One lease by the rules: everything that ever happened to it under one epoch."""

    def __init__(
        self, slot: int, epoch: Epoch, request_id: str, former: ModelLease | None = None
    ) -> None:
        self.slot, self.epoch, self.request_id = slot, epoch, request_id
        self.origin: Epoch = former.origin if former is not None else epoch
        self.row: int | None = former.row if former is not None else None
        self.blocks: tuple[int, ...] = (0,) * len(ROW_BLOCKS)
        self.steps: list[tuple[int, FakeMark]] = []
        self.tokens = 0
        self.held = self.ready = self.over = self.broken = False
        self.mark = FakeMark()
        self.notifiers: set[tuple[str, int]] = set()
        self.expected: dict[str, int] = {}

    @property
    def text(self) -> str:
        return epoch_to_text(self.epoch)

    @property
    def complete(self) -> bool:
        counts = {
            consumer: sum(who == consumer for who, _ in self.notifiers)
            for consumer in self.expected
        }
        return self.held and any(
            counts[consumer] >= expected for consumer, expected in self.expected.items()
        )

    @property
    def word(self) -> int:
        if self.over:
            return EMPTY
        return slot_word(
            self.epoch, SlotState.READY if self.ready else SlotState.COMPUTING
        )


leases_of = st.integers(0, 10**6)
notifiers = st.tuples(st.sampled_from(CONSUMERS), st.integers(0, 2), st.integers(1, 3))


class LeaseTableHistory(RuleBasedStateMachine):
    """Orders as the scheduler may give them, notifications as any agent may send them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = StreamRowTable(ROW_BLOCKS)
        self.table = LeaseTable(SLOTS, rows=self.rows)
        self.leases: list[ModelLease] = []
        self.ids = np.zeros_like(self.rows.ids)
        self.ending: list[LeaseProgress] = []
        self.reported: list[str] = []

    def current(self, slot: int) -> ModelLease | None:
        return next(
            (lease for lease in self.leases if lease.slot == slot and not lease.over),
            None,
        )

    def pick(self, draw: int, among: list[ModelLease]) -> ModelLease:
        return among[draw % len(among)]

    def report(self, lease: ModelLease, request_id: str | None) -> None:
        """Check that a lease that the table reports as over is over by the rules, was held, and has an empty word."""
        if request_id is None:
            return
        assert request_id == lease.request_id
        assert lease.held, "reported before its hold"
        assert self.table.words[lease.slot] == EMPTY, (
            "reported before its word was cleared"
        )
        assert request_id not in self.reported, "reported twice"
        self.reported.append(request_id)

    def free(self) -> list[int]:
        """Slots without a lease, and those whose lease was abandoned before its hold: its end may come later."""
        found = {slot: self.current(slot) for slot in range(SLOTS)}
        return [
            slot for slot, lease in found.items() if lease is None or not lease.held
        ]

    @precondition(lambda self: bool(self.free()))
    @rule(draw=leases_of)
    def open(self, draw: int) -> None:
        free = self.free()
        former = self.current(free[draw % len(free)])
        if former is not None:
            former.over = True
        for lease in self.leases:
            lease.broken &= lease.slot != free[draw % len(free)]
        number = len(self.leases)
        lease = ModelLease(
            free[draw % len(free)], Epoch(1 + number * 977 % 2**59), f"request-{number}"
        )
        self.leases.append(lease)
        self.table.open(LeaseOpen(slot=lease.slot, epoch=lease.text))

    @precondition(lambda self: any(not x.held for x in self.leases))
    @rule(draw=leases_of)
    def hold(self, draw: int) -> None:
        lease = self.pick(draw, [x for x in self.leases if not x.held])
        said = self.table.hold(
            LeaseHold(request_id=lease.request_id, slot=lease.slot, epoch=lease.text),
            lease.mark,
        )
        lease.held = True
        if lease.over:
            assert said == lease.request_id, "it waits for nothing"
            self.reported.append(said)
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

    def progress_of(
        self, lease: ModelLease, first: tuple[int, ...], counts: tuple[int, ...]
    ) -> LeaseProgress:
        """The next step computes more of a prompt: tokens that rise, blocks that are nowhere else."""
        # Of one whose order was lost, or whose step raised, the scheduler does not know: it still has its row.
        used = {x.row for x in self.leases if not x.over or x.broken}
        row = (
            lease.row
            if lease.row is not None
            else next(row for row in range(STREAM_ROWS) if row not in used)
        )
        return LeaseProgress(
            slot=lease.slot,
            epoch=lease.text,
            row=row,
            origin=epoch_to_text(lease.origin),
            tokens=lease.tokens
            + sum(order.epoch == lease.text for order in self.ending)
            + len(lease.steps)
            + 1,
            first_blocks=first,
            blocks=tuple(
                tuple(range(900 * group + 7, 900 * group + 7 + n))
                for group, n in enumerate(counts)
            ),
        )

    @precondition(lambda self: any(not x.held for x in self.leases))
    @rule(draw=leases_of, more=st.tuples(st.integers(0, 2), st.integers(0, 2)))
    def publish(self, draw: int, more: tuple[int, int]) -> None:
        lease = self.pick(draw, [x for x in self.leases if not x.held])
        counts = tuple(
            min(n, most - has)
            for n, most, has in zip(more, ROW_BLOCKS, lease.blocks, strict=True)
        )
        order = self.progress_of(lease, lease.blocks, counts)
        assert self.table.publish(order) == (not lease.over)
        if lease.over:
            return
        self.ending.append(order)
        lease.row = order.row
        for start, first, ids in zip(
            (0, ROW_BLOCKS[0]), lease.blocks, order.blocks, strict=True
        ):
            self.ids[order.row, start + first : start + first + len(ids)] = ids
        lease.blocks = tuple(map(sum, zip(lease.blocks, counts, strict=True)))

    @precondition(lambda self: any(not x.held for x in self.leases))
    @rule(
        draw=leases_of,
        group=st.integers(0, 1),
        wrong=st.sampled_from(["behind", "too many", "row", "groups"]),
    )
    def publish_what_does_not_fit(self, draw: int, group: int, wrong: str) -> None:
        lease = self.pick(draw, [x for x in self.leases if not x.held])
        first, counts = list(lease.blocks), [0] * len(ROW_BLOCKS)
        if wrong == "behind":
            first[group] += 1
        elif wrong == "too many":
            counts[group] = ROW_BLOCKS[group] - first[group] + 1
        elif wrong == "groups":
            counts.append(1)
        order = self.progress_of(lease, tuple(first), tuple(counts))
        if wrong == "row":
            if lease.row is None:
                return
            order = structs.replace(order, row=(lease.row + 1) % STREAM_ROWS)
        assert not self.table.publish(order)
        if not lease.over:
            lease.broken = lease.over = True
            lease.steps = []
            self.ending = [order for order in self.ending if order.epoch != lease.text]

    @rule()
    def end_step(self) -> None:
        mark, ending, self.ending = FakeMark(), self.ending, []
        for order in ending:
            self.table.complete(order, mark)
            lease = next(x for x in self.leases if x.text == order.epoch)
            if not lease.over:
                lease.steps.append((order.tokens, mark))

    @rule()
    def a_step_raises(self) -> None:
        """What could be read before can be read; nothing else is any more."""
        ended = [lease for lease in self.leases if not lease.over and not lease.ready]
        said = [
            request_id for request_id in self.table.distrust() if request_id is not None
        ]
        assert sorted(said) == sorted(lease.request_id for lease in ended if lease.held)
        for lease in ended:
            lease.over = True
            lease.broken = not lease.held
            lease.steps = []
            self.ending = [order for order in self.ending if order.epoch != lease.text]
            self.report(lease, lease.request_id if lease.held else None)

    @precondition(lambda self: any(x.steps for x in self.leases))
    @rule(draw=leases_of, count=st.integers(1, 3))
    def finish_steps(self, draw: int, count: int) -> None:
        """The device finishes some steps of a prompt; of those that are done, the last one counts."""
        lease = self.pick(draw, [x for x in self.leases if x.steps])
        for _, mark in lease.steps[:count]:
            mark.over = True
        self.table.advance()
        for other in self.leases:
            while other.steps and other.steps[0][1].over:
                tokens, _ = other.steps.pop(0)
                other.tokens = tokens

    def preemptible(self) -> list[ModelLease]:
        """Those that are computed; an order for one may have been lost."""
        return [
            x
            for x in self.leases
            if not x.held
            and (not x.over or (x.broken and self.current(x.slot) is None))
        ]

    @precondition(lambda self: bool(self.preemptible()))
    @rule(draw=leases_of)
    def go_on_under_another_epoch(self, draw: int) -> None:
        """The request was preempted; the order that names the row first may not have been carried out."""
        former = self.pick(draw, self.preemptible())
        number = len(self.leases)
        former.row = self.progress_of(former, (), ()).row
        lease = ModelLease(
            former.slot, Epoch(1 + number * 977 % 2**59), f"request-{number}", former
        )
        former.over, former.broken = True, False
        self.leases.append(lease)
        origin = epoch_to_text(lease.origin)
        self.table.open(
            LeaseOpen(slot=lease.slot, epoch=lease.text, row=lease.row, origin=origin)
        )

    @precondition(lambda self: bool(self.leases))
    @rule(draw=leases_of)
    def end(self, draw: int) -> None:
        lease = self.pick(draw, self.leases)
        said = self.table.end(
            LeaseEnd(request_id=lease.request_id, slot=lease.slot, epoch=lease.text)
        )
        assert (said is not None) == (lease.held and not lease.over)
        lease.over = True
        self.report(lease, said)

    @precondition(lambda self: bool(self.leases))
    @rule(draw=leases_of, notifier=notifiers)
    def done(self, draw: int, notifier: tuple[str, int, int]) -> None:
        lease = self.pick(draw, self.leases)
        consumer, worker, expected = notifier
        message = Done(
            slot=lease.slot,
            epoch=lease.text,
            consumer=consumer,
            worker=worker,
            expected=expected,
        )
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
            self.table.done(
                Done(slot=slot, epoch=text, consumer=CONSUMERS[0], worker=0, expected=1)
            )
        assert (
            self.table.end(LeaseEnd(request_id="forged", slot=slot, epoch=text)) is None
        )
        assert (
            self.table.hold(
                LeaseHold(request_id="forged", slot=slot, epoch=text),
                FakeMark(over=True),
            )
            == "forged"
        )
        self.table.advance()

    @invariant()
    def words_say_what_the_rules_say(self) -> None:
        for slot in range(SLOTS):
            lease = self.current(slot)
            assert self.table.words[slot] == (EMPTY if lease is None else lease.word)
            tokens = 0 if lease is None else lease.tokens
            assert self.table.progress[slot] == (
                progress_word(lease.epoch, tokens) if lease and tokens else EMPTY
            )
        live = [lease for lease in self.leases if not lease.over]
        assert len(self.table.held) == sum(lease.held for lease in live)
        assert len(self.table.pending) == sum(
            (x.held and not x.ready) or bool(x.steps) for x in live
        )
        assert table_errors(self.table.snapshot()) == []

    @invariant()
    def rows_say_what_the_rules_say(self) -> None:
        headers = np.zeros_like(self.rows.headers)
        for lease in self.leases:
            if lease.row is not None and not lease.over:
                headers[lease.row] = header_word(lease.origin), header_word(lease.epoch)
        assert self.rows.headers.tolist() == headers.tolist()
        assert (self.rows.ids == self.ids).all(), "ids elsewhere, or others"


TestLeaseTableHistory = LeaseTableHistory.TestCase
