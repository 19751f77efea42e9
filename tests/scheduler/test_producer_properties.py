"""The producer's ledger against a model that knows only the rules, by random histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.link.counters import Counters
from kvferry.link.limits import HEARTBEATS_PER_LEASE
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import (
    Epoch,
)
from kvferry.protocol.orders import LeaseOrders
from kvferry.protocol.slots import (
    EMPTY,
    Done,
    SlotState,
    slot_word,
)
from kvferry.scheduler.producer.block_references import Reservation
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import LeaseUse
from kvferry.worker.leases import LeaseTable
from tests.draws import draws
from tests.fakes.device_mark import FakeMark
from tests.harness.integrity import table_errors
from tests.harness.ledgers import check_leases
from tests.protocol.samples import BOOT

SLOTS = 3
LEASE_S = 6.0
TURN_S = 9.0
HEARTBEAT_S = LEASE_S / HEARTBEATS_PER_LEASE
PREFIX_S = 5.0
FIRST_S = {
    LeaseUse.PROMPT: LEASE_S,
    LeaseUse.TURN: TURN_S,
    LeaseUse.PREFIX: PREFIX_S,
}
OF_REQUESTS = (LeaseUse.PROMPT, LeaseUse.TURN)


@dataclass
class Modelled:
    """One lease as the rules describe it; `opens` are epochs of orders that are not sent."""

    epoch: int
    use: LeaseUse
    phase: str = "computing"
    opens: list[int] = field(default_factory=list)
    announced: bool = False
    deadline_s: float = 0.0
    slot: int = -1


class ProducerHistories(RuleBasedStateMachine):
    """Requests come, finish, abort; peers renew and release; time passes; workers report."""

    def __init__(self, stream_rows: int = 0) -> None:
        super().__init__()
        self.epochs = 0
        self.requests = 0
        self.counters = Counters()
        self.ledger = ProducerLedger(
            SLOTS,
            LEASE_S,
            self.counters,
            draw_epoch=self.draw_epoch,
            turn_s=TURN_S,
            stream_rows=stream_rows,
        )
        self.table = LeaseTable(SLOTS)
        self.held: dict[str, LeaseName] = {}
        self.reported: list[str] = []
        self.model: dict[str, Modelled] = {}
        self.must_hold: set[str] = set()
        self.must_end: set[int] = set()
        self.must_open: set[int] = set()
        self.now_s = 1000.0
        self.ledger.take_orders(self.now_s)  # the clock begins
        self.clock_s = 0.0
        self.reports: dict[str, int] = {}
        self.unfinished = dict.fromkeys(
            LeaseUse, 0
        )  # released while their requests ran

    def draw_epoch(self) -> Epoch:
        self.epochs += 1
        return Epoch(self.epochs)

    def some(self, data: st.DataObject, *phases: str) -> str:
        return data.draw(
            st.sampled_from(
                [name for name, lease in self.model.items() if lease.phase in phases]
            )
        )

    def has(self, *phases: str) -> bool:
        return any(lease.phase in phases for lease in self.model.values())

    @property
    def leased(self) -> int:
        return sum(lease.phase != "intended" for lease in self.model.values())

    def name_of(self, request_id: str) -> LeaseName:
        lease = self.model[request_id]
        return LeaseName(slot=lease.slot, epoch=f"{lease.epoch:015x}")

    @rule(use=st.sampled_from(OF_REQUESTS))
    def open(self, use: LeaseUse) -> None:
        self.requests += 1
        request_id = f"r{self.requests}"
        free = self.leased < SLOTS
        assert self.ledger.open(request_id, use) == free
        if free:
            self.model[request_id] = Modelled(self.epochs, use, opens=[self.epochs])

    @rule(use=st.sampled_from(OF_REQUESTS))
    def intend(self, use: LeaseUse) -> None:
        self.requests += 1
        assert self.ledger.intend(f"r{self.requests}", use)
        self.model[f"r{self.requests}"] = Modelled(0, use, "intended")

    @precondition(lambda self: self.has("intended"))
    @rule(data=st.data())
    def open_intended(self, data: st.DataObject) -> None:
        request_id = self.some(data, "intended")
        free = self.leased < SLOTS
        assert self.ledger.open(request_id) == free
        lease = self.model.pop(request_id)
        if free:
            self.model[request_id] = Modelled(
                self.epochs, lease.use, opens=[self.epochs]
            )

    @precondition(lambda self: self.model)
    @rule(data=st.data(), use=st.sampled_from(OF_REQUESTS))
    def intend_again(self, data: st.DataObject, use: LeaseUse) -> None:
        assert not self.ledger.intend(
            self.some(data, "intended", "computing", "held", "ending"), use
        )

    @precondition(lambda self: self.has("computing"))
    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        assert self.ledger.open(self.some(data, "computing"))

    @precondition(lambda self: self.has("computing"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = self.some(data, "computing")
        held = self.ledger.finish(request_id)
        assert held is not None
        lease = self.model[request_id]
        assert int(held.name.epoch, 16) == lease.epoch
        lease.phase, lease.slot, lease.deadline_s = (
            "held",
            held.slot,
            self.clock_s + FIRST_S[lease.use],
        )
        self.must_hold.add(request_id)

    @rule()
    def hold_prefix(self) -> None:
        self.requests += 1
        name = f"p{self.requests}"
        if self.leased == SLOTS:
            with pytest.raises(LocalProtocolError):
                self.ledger.hold_prefix(name, (), Reservation(), is_computed=True)
            return
        held = self.ledger.hold_prefix(name, (), Reservation(), is_computed=True)
        self.model[name] = Modelled(
            self.epochs,
            LeaseUse.PREFIX,
            "held",
            opens=[self.epochs],
            deadline_s=self.clock_s + PREFIX_S,
            slot=held.slot,
        )
        self.must_hold.add(name)
        with pytest.raises(LocalProtocolError):
            self.ledger.hold_prefix(name, (), Reservation(), is_computed=True)

    @precondition(lambda self: self.has("intended", "computing"))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        request_id = self.some(data, "intended", "computing")
        self.ledger.abandon(request_id)
        self.forget(self.model.pop(request_id))

    def forget(self, lease: Modelled) -> None:
        """Workers that know of a lease, or will, must end it."""
        if lease.announced:
            self.must_end.add(lease.epoch)
            self.must_open.update(lease.opens)

    @precondition(lambda self: self.has("held"))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = self.some(data, "held")
        assert self.ledger.release(self.name_of(request_id))
        self.end(self.model[request_id])

    def end(self, lease: Modelled) -> None:
        lease.phase = "ending"
        self.must_end.add(lease.epoch)

    @precondition(lambda self: self.has("held"))
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        request_id = self.some(data, "held")
        assert self.ledger.renew(self.name_of(request_id))
        lease = self.model[request_id]
        lease.deadline_s = max(lease.deadline_s, self.clock_s + LEASE_S)

    @rule(slot=st.integers(0, SLOTS + 1), epoch=st.integers(1, 3), data=st.data())
    def unknown_names_are_refused(
        self, slot: int, epoch: int, data: st.DataObject
    ) -> None:
        """A guessed epoch, an invalid slot, a lease that is over or computing."""
        guess = LeaseName(slot=slot, epoch=f"{epoch << 50:015x}")
        assert not self.ledger.release(guess)
        assert not self.ledger.renew(guess)
        unknown = [
            name for name, x in self.model.items() if x.slot >= 0 and self.is_unknown(x)
        ]
        if unknown:
            name = data.draw(st.sampled_from(unknown))
            assert not self.ledger.release(self.name_of(name))
            assert self.model[name].phase == "computing" or not self.ledger.renew(
                self.name_of(name)
            )

    def is_unknown(self, lease: Modelled) -> bool:
        """Whether nobody may release it."""
        return lease.phase in ("computing", "ending")

    @rule()
    def release_all(self) -> None:
        held = [lease for lease in self.model.values() if lease.phase == "held"]
        assert self.ledger.release_all("reset") == len(held)
        for lease in held:
            self.end(lease)

    # Sums of these are exact in binary, so the model and the ledger agree to the last bit.
    @rule(passed_s=st.sampled_from([0.0, 0.25, 1023 / 1024, 1.0, 5.0, 1000.0]))
    def step(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.clock_s += min(passed_s, HEARTBEAT_S)
        for lease in self.model.values():
            if lease.phase == "held" and self.clock_s >= lease.deadline_s:
                self.end(lease)
        orders = self.ledger.take_orders(self.now_s)
        live = list(self.model.items())
        assert {int(end.epoch, 16) for end in orders.ends} == self.must_end
        assert len(orders.ends) == len(self.must_end)
        live = [(name, lease) for name, lease in live if lease.phase != "intended"]
        expected = self.must_open.union(*(lease.opens for _, lease in live))
        assert {int(opened.epoch, 16) for opened in orders.opens} == expected
        assert len(orders.opens) == len(expected)
        assert {hold.request_id for hold in orders.holds} == self.must_hold
        slots = {int(opened.epoch, 16): opened.slot for opened in orders.opens}
        self.must_hold, self.must_end, self.must_open = set(), set(), set()
        for _, lease in live:
            lease.announced, lease.opens = True, []
            lease.slot = slots.get(lease.epoch, lease.slot)
        self.carry_out(orders)
        self.words_are_those_of_the_model()

    def carry_out(self, orders: LeaseOrders) -> None:
        """As a worker, in the order that `kvferry.protocol.orders` prescribes."""
        ending = {end.slot for end in orders.ends}
        for opened in orders.opens:
            assert self.table.words[opened.slot] == EMPTY or opened.slot in ending, (
                "a slot was reused without an end"
            )
            self.table.open(opened)
        for hold in orders.holds:
            self.held[hold.request_id] = LeaseName(slot=hold.slot, epoch=hold.epoch)
            self.report_once(self.table.hold(hold, FakeMark(over=True)))
        for end in orders.ends:
            self.report_once(self.table.end(end))
        self.table.advance()
        assert table_errors(self.table.snapshot()) == []

    def report_once(self, request_id: str | None) -> None:
        if request_id is not None:
            del self.held[request_id]
            self.reported.append(request_id)

    @rule()
    def a_lease_passes(self) -> None:
        for _ in range(HEARTBEATS_PER_LEASE + 1):
            self.step(HEARTBEAT_S)

    def words_are_those_of_the_model(self) -> None:
        """After a step the slots say exactly which leases may be read."""
        expected = [EMPTY] * SLOTS
        states = {"computing": SlotState.COMPUTING, "held": SlotState.READY}
        for name, lease in self.model.items():
            state = states.get(lease.phase)
            if state is not None and name not in self.reported:
                expected[lease.slot] = slot_word(Epoch(lease.epoch), state)
        assert self.table.words.tolist() == expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def all_consumers_are_done(self, data: st.DataObject) -> None:
        name = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        self.report_once(
            self.table.done(
                Done(
                    slot=name.slot,
                    epoch=name.epoch,
                    consumer=BOOT,
                    worker=0,
                    expected=1,
                )
            )
        )

    @precondition(lambda self: self.reported)
    @rule()
    def report(self) -> None:
        request_id = self.reported.pop(0)
        self.ledger.sent(request_id)
        del self.model[request_id]
        self.reports[request_id] = self.reports.get(request_id, 0) + 1
        with pytest.raises(LocalProtocolError):
            self.ledger.sent(request_id)

    @invariant()
    def ledger_agrees(self) -> None:
        check_leases(self.ledger)
        assert len(self.ledger) == self.leased
        for name, lease in self.model.items():
            state = self.ledger.state(name)
            assert state is not None
            assert state.value == lease.phase
        ended = sum(
            lease.phase not in ("intended", "computing")
            for lease in self.model.values()
        )
        assert self.ledger.block_references.num_requests == ended

    def teardown(self) -> None:
        """Without further messages everything is free within a lease, or a turn's time, and one step."""
        for name in [
            name
            for name, lease in self.model.items()
            if lease.phase in ("intended", "computing")
        ]:
            self.ledger.abandon(name)
            self.forget(self.model.pop(name))
        turns = any(lease.use is LeaseUse.TURN for lease in self.model.values())
        for _ in range(round((TURN_S if turns else LEASE_S) / HEARTBEAT_S) + 2):
            self.step(HEARTBEAT_S)
        while self.reported:
            self.report()
        assert len(self.ledger) == 0
        assert self.table.words.tolist() == [EMPTY] * SLOTS
        assert set(self.reports.values()) <= {1}
        ways = ("done", "release", "expired", "reset")
        for use in LeaseUse:
            ended = sum(
                self.counters.total(f"{use.value}_released", how) for how in ways
            )
            abandoned = self.counters.total(f"{use.value}_released", "abandoned")
            assert self.counters.total(f"{use.value}_opened") == ended + abandoned
            offered = ended - self.unfinished[use] if use is LeaseUse.TURN else 0
            assert self.counters.total(f"{use.value}_offered") == offered


ProducerHistories.TestCase.settings = settings(
    max_examples=draws(120), stateful_step_count=40
)
TestProducerHistories = ProducerHistories.TestCase
