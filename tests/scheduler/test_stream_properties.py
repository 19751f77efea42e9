"""Leases that are streamed, against the model of leases: rows, new epochs, releases while the prompt is computed.

The model of a worker carries the orders out as `kvferry.protocol.orders` says: leases are opened first.
"""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule

from kvferry.link.counters import Counters
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import (
    Epoch,
)
from kvferry.protocol.orders import LeaseOrders, LeaseProgress
from kvferry.protocol.slots import (
    EMPTY,
)
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import LeaseUse, ProducerLease
from tests.draws import draws
from tests.fakes.device_mark import FakeMark
from tests.harness.integrity import table_errors
from tests.harness.ledgers import check_leases
from tests.scheduler.test_producer_properties import SLOTS, Modelled, ProducerHistories

ROWS = 2
SPAN = 4


class Row:
    """A worker's row: its header and its ids."""

    def __init__(self) -> None:
        self.header = ("", "")
        self.ids: list[int] = []


class StreamHistories(ProducerHistories):
    """As the histories of leases; prompts are asked for, computed in steps, preempted and released meanwhile."""

    def __init__(self) -> None:
        super().__init__(stream_rows=ROWS)
        self.rows = [Row() for _ in range(ROWS)]
        self.row_of: dict[int, int] = {}
        self.progress: dict[int, tuple[str, int]] = {}
        self.blocks: dict[str, list[int]] = {}  # published, of leases that are streamed
        self.origin: dict[str, int] = {}
        self.forgotten: list[LeaseName] = []
        self.dead: set[str] = set()
        self.next_block = 0

    def streamed(self, *phases: str) -> list[str]:
        return [
            name
            for name in self.blocks
            if name in self.model and self.model[name].phase in phases
        ]

    def lease(self, name: str) -> ProducerLease:
        lease = self.ledger.running(name)
        assert lease is not None
        return lease

    @precondition(lambda self: self.has("computing"))
    @rule(data=st.data())
    def asked_for(self, data: st.DataObject) -> None:
        name = self.some(data, "computing")
        if name in self.blocks:
            return
        used = len(self.streamed("computing", "held", "ending"))
        stream = self.ledger.streams.begin(self.lease(name))
        assert (stream is not None) == (used < ROWS)
        if stream is not None:
            self.blocks[name], self.origin[name] = [], self.model[name].epoch
            self.model[name].slot = self.lease(name).slot

    @precondition(lambda self: self.streamed("computing"))
    @rule(data=st.data(), count=st.integers(1, 3))
    def computed(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(self.streamed("computing")))
        new = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.blocks[name] += new
        lease, blocks = self.lease(name), (list(self.blocks[name]),)
        assert lease.stream is not None
        assert lease.stream.goes_on_with(blocks)
        self.ledger.streams.publish(
            lease, lease.stream, SPAN * len(self.blocks[name]), blocks
        )

    @precondition(lambda self: self.streamed("computing"))
    @rule(data=st.data())
    def preempted(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.streamed("computing")))
        lease, model = self.lease(name), self.model[name]
        assert lease.stream is not None
        assert not self.blocks[name] or not lease.stream.goes_on_with(([-1],))
        before = lease.name
        self.ledger.streams.restart(lease, lease.stream)
        if self.blocks[name]:
            self.dead.add(before.epoch)
            if before != lease.origin:
                self.forgotten.append(before)
            self.blocks[name] = []
            model.epoch = self.epochs
            model.opens.append(model.epoch)
        assert int(lease.name.epoch, 16) == model.epoch

    @precondition(lambda self: self.streamed("computing", "held"))
    @rule(data=st.data())
    def released_by_the_name_in_the_ticket(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.streamed("computing", "held")))
        model = self.model[name]
        assert self.ledger.release(self.ticket(name))
        if model.phase == "held":
            self.end(model)
        else:
            self.unfinished[model.use] += 1
            self.forget(self.model.pop(name))

    @precondition(lambda self: self.streamed("held"))
    @rule(data=st.data())
    def renewed_by_the_name_in_the_ticket(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.streamed("held")))
        assert self.ledger.renew(self.ticket(name))
        model = self.model[name]
        model.deadline_s = max(model.deadline_s, self.clock_s + self.ledger.lease_s)

    @precondition(lambda self: self.forgotten)
    @rule(data=st.data())
    def names_in_between_find_nothing(self, data: st.DataObject) -> None:
        assert not self.ledger.release(data.draw(st.sampled_from(self.forgotten)))

    def ticket(self, name: str) -> LeaseName:
        return LeaseName(slot=self.model[name].slot, epoch=f"{self.origin[name]:015x}")

    def is_unknown(self, lease: Modelled) -> bool:
        return super().is_unknown(lease) and not any(
            self.model.get(name) is lease for name in self.blocks
        )

    def carry_out(self, orders: LeaseOrders) -> None:
        ended = {end.slot for end in orders.ends}
        for opened in orders.opens:
            if opened.row is not None:
                assert opened.origin is not None
                self.rows[opened.row].header = (opened.origin, opened.epoch)
                self.row_of[opened.slot] = opened.row
            else:
                assert self.table.words[opened.slot] == EMPTY or opened.slot in ended
                self.clear(opened.slot)
            self.table.open(opened)
        for hold in orders.holds:
            assert hold.epoch not in self.dead, (
                "an epoch whose blocks were given away is held"
            )
            self.held[hold.request_id] = LeaseName(slot=hold.slot, epoch=hold.epoch)
            self.report_once(self.table.hold(hold, FakeMark(over=True)))
        for order in orders.progress:
            self.publish(order)
        for end in orders.ends:
            if self.epoch_of(end.slot) == end.epoch:
                self.clear(end.slot)
            self.report_once(self.table.end(end))
        self.table.advance()
        assert table_errors(self.table.snapshot()) == []

    def epoch_of(self, slot: int) -> str:
        return f"{int(self.table.words[slot]) >> 4:015x}"

    def clear(self, slot: int) -> None:
        self.progress.pop(slot, None)
        row = self.row_of.pop(slot, None)
        if row is not None and row not in self.row_of.values():
            self.rows[row] = Row()

    def publish(self, order: LeaseProgress) -> None:
        if self.epoch_of(order.slot) != order.epoch:
            return
        row = self.rows[order.row]
        row.header = (order.origin, order.epoch)
        self.row_of[order.slot] = order.row
        row.ids[order.first_blocks[0] :] = order.blocks[0]
        self.progress[order.slot] = (order.epoch, order.tokens)

    def report_once(self, request_id: str | None) -> None:
        if request_id is not None:
            self.clear(self.held[request_id].slot)
        super().report_once(request_id)

    def words_are_those_of_the_model(self) -> None:
        super().words_are_those_of_the_model()
        for name, row in self.live_rows():
            model, blocks = self.model[name], self.blocks[name]
            if blocks:
                assert row.header == (
                    f"{self.origin[name]:015x}",
                    f"{model.epoch:015x}",
                )
                assert row.ids == blocks
                assert self.progress[model.slot] == (
                    f"{model.epoch:015x}",
                    SPAN * len(blocks),
                )
            else:
                assert (
                    self.progress.get(model.slot, ("", 0))[0] != f"{model.epoch:015x}"
                )

    def live_rows(self) -> Iterator[tuple[str, Row]]:
        for name in self.streamed("computing", "held"):
            if name not in self.reported:
                lease = self.ledger.get(name)
                assert lease is not None
                assert lease.stream is not None
                yield name, self.rows[lease.stream.row]

    @invariant()
    def every_row_has_one_lease(self) -> None:
        used = len(self.streamed("computing", "held", "ending"))
        assert len(self.ledger.streams.free_rows) == ROWS - used

    def teardown(self) -> None:
        super().teardown()
        assert all(row.header == ("", "") for row in self.rows)
        assert sorted(self.ledger.streams.free_rows) == list(range(ROWS))
        assert self.counters.total("stream_restarts") == len(self.dead)


StreamHistories.TestCase.settings = settings(
    max_examples=draws(150), stateful_step_count=50
)
TestStreamHistories = StreamHistories.TestCase


def test_a_row_that_two_leases_use_is_found() -> None:
    ledger = ProducerLedger(
        SLOTS, 30.0, Counters(), draw_epoch=iter(map(Epoch, range(1, 9))).__next__
    )
    streams = []
    for name in ("a", "b"):
        assert ledger.open(name, LeaseUse.PROMPT)
        lease = ledger.running(name)
        assert lease is not None
        streams.append(ledger.streams.begin(lease))
    check_leases(ledger)
    assert streams[0] is not None
    assert streams[1] is not None
    streams[1].row = streams[0].row
    with pytest.raises(LocalProtocolError):
        check_leases(ledger)


def test_a_lease_that_comes_and_goes_in_a_slot_after_one_that_was_preempted_is_not_sent_at_all() -> (
    None
):
    """All within one step: the workers know the first lease and must end it, and never hear of the second."""
    ledger = ProducerLedger(
        1, 30.0, Counters(), draw_epoch=iter(map(Epoch, range(1, 9))).__next__
    )
    assert ledger.open("a", LeaseUse.PROMPT)
    lease = ledger.running("a")
    assert lease is not None
    ledger.take_orders(0.0)
    stream = ledger.streams.begin(lease)
    assert stream is not None
    ledger.streams.publish(lease, stream, SPAN, ([1],))
    ledger.streams.restart(lease, stream)
    assert ledger.release(lease.origin)
    assert ledger.open("b", LeaseUse.PROMPT)
    ledger.abandon("b")
    orders = ledger.take_orders(0.0)
    assert [(opened.row, opened.epoch) for opened in orders.opens] == [
        (stream.row, lease.name.epoch)
    ]
    assert [(end.request_id, end.epoch) for end in orders.ends] == [
        ("a", lease.name.epoch)
    ]
