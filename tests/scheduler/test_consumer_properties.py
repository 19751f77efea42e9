"""The consumer's ledger against a model that knows only the rules, by random histories."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.link.commands import (
    ForgetLease,
    LeaseCommand,
    LeaseKey,
    ReleaseLease,
    RemoteLease,
    RenewLease,
)
from kvferry.link.counters import Counters
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.orders import NO_LOADS
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.requests import PromptKind
from tests.draws import draws
from tests.harness.ledgers import check_loads
from tests.protocol.samples import make_ticket, params_of_length


def source_of(lease: int, tokens: int = 300) -> RemotePrefill:
    """Params under the n-th lease."""
    params = params_of_length(tokens, remote_host=f"10.0.0.{lease % 2}")
    ticket = make_ticket(
        lease_slot=lease,
        lease_epoch=f"{lease + 1:015x}",
        digests=params.kvferry.digests,
    )
    return params_of_length(tokens, remote_host=params.remote_host, kvferry=ticket)


@dataclass
class Modelled:
    """One request as the rules describe it."""

    source: RemotePrefill
    shared: int
    kind: PromptKind
    state: str = "offered"
    asked_with: int = 0

    @property
    def matched(self) -> int:
        """Tokens that may be loaded; 0 for a turn or a prefix with fewer than its threshold."""
        count = max(0, self.shared - self.asked_with)
        return 0 if count < LEAST[self.kind] else count

    @property
    def metric(self) -> str:
        """What counts that it is computed."""
        is_prefix = self.kind is PromptKind.PREFIX
        return "prefixes_not_pulled" if is_prefix else "local_recomputes"


THRESHOLD = 50
PREFIX_THRESHOLD = 280
LEAST = {
    PromptKind.HANDOVER: 0,
    PromptKind.TURN: THRESHOLD,
    PromptKind.PREFIX: PREFIX_THRESHOLD,
}
"""Fewer missing tokens of each kind are computed."""
REMEMBERED = 3
"""Leases that the ledger knows to be over, of five that there are: some are tried again."""


class ConsumerHistories(RuleBasedStateMachine):
    """Requests arrive with good, shared and useless params; vLLM takes any step that it may take."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()
        self.ledger = ConsumerLedger(self.counters, THRESHOLD, max_ended=REMEMBERED)
        self.ended: list[LeaseKey] = []
        self.model: dict[str, Modelled] = {}
        self.requests = 0
        self.expected: list[tuple[type[LeaseCommand], LeaseKey]] = []
        self.ever: list[tuple[type[LeaseCommand], LeaseKey]] = []
        self.orders: set[str] = set()

    def some(self, data: st.DataObject, *states: str) -> str:
        return data.draw(
            st.sampled_from(
                [name for name, one in self.model.items() if one.state in states]
            )
        )

    def has(self, *states: str) -> bool:
        return any(one.state in states for one in self.model.values())

    def claimed(self, source: RemotePrefill) -> bool:
        key = RemoteLease.from_params(source).key
        waiting = [
            one
            for one in self.model.values()
            if one.state in ("offered", "loading", "aborted")
        ]
        return any(RemoteLease.from_params(one.source).key == key for one in waiting)

    def over(self, source: RemotePrefill) -> bool:
        return RemoteLease.from_params(source).key in self.ended[-REMEMBERED:]

    def expect(self, kind: type[LeaseCommand], source: RemotePrefill) -> None:
        key = RemoteLease.from_params(source).key
        self.expected.append((kind, key))
        if kind is not RenewLease:
            self.ended.append(key)

    @rule(
        lease=st.integers(0, 4),
        shared=st.sampled_from([0, 256, 300]),
        kind=st.sampled_from(PromptKind),
    )
    def offer(self, lease: int, shared: int, kind: PromptKind) -> None:
        self.requests += 1
        source, request_id = source_of(lease), f"r{self.requests}"
        reason = self.ledger.offer(
            request_id, source, shared, 5.0, kind=kind, min_tokens=LEAST[kind]
        )
        if self.claimed(source):
            assert reason == "lease_in_use"
        elif self.over(source):
            assert reason == "lease_over"
        elif not shared:
            assert reason == "other_prompt"
        else:
            assert reason is None
            self.model[request_id] = Modelled(source, shared, kind)
            self.expect(RenewLease, source)

    @rule(lease=st.integers(0, 4))
    def decline(self, lease: int) -> None:
        source = source_of(lease)
        self.ledger.decline(source)
        if not self.claimed(source) and not self.over(source):
            self.expect(ReleaseLease, source)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), local=st.sampled_from([0, 16, 256, 300, 1000]))
    def match(self, data: st.DataObject, local: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model)))
        one = self.model[request_id]
        matched = self.ledger.matched_tokens(request_id, local)
        if one.state == "offered":
            one.asked_with = local
            assert matched == one.matched
        else:
            assert matched == 0, "a request was matched twice"

    @precondition(lambda self: self.has("offered"))
    @rule(data=st.data(), less=st.sampled_from([0, 0, 16]))
    def load(self, data: st.DataObject, less: int) -> None:
        request_id = self.some(data, "offered")
        one = self.model[request_id]
        count = one.matched - less
        if count <= 0:
            return
        kinds = (PromptKind.TURN, PromptKind.PREFIX)
        loads = {kind: self.counters.total(f"{kind.value}_loads") for kind in kinds}
        with pytest.raises(LocalProtocolError, match="matched"):
            self.ledger.allocated(request_id, count + less + 1, ((1,),))
        self.ledger.allocated(request_id, count, [[9, 4], []])
        for kind in kinds:
            counted = self.counters.total(f"{kind.value}_loads") - loads[kind]
            assert counted == (one.kind is kind)
        one.state = "loading"
        self.orders.add(request_id)

    @precondition(lambda self: self.has("offered", "loaded", "failed", "declined"))
    @rule(data=st.data())
    def allocate_without_loading(self, data: st.DataObject) -> None:
        request_id = self.some(data, "offered", "loaded", "failed", "declined")
        one = self.model[request_id]
        reasons = {
            why: self.counters.total(one.metric, why)
            for why in ("not_wanted", "below_threshold", "local_hit")
        }
        self.ledger.allocated(request_id, 0, ((1,),))
        if one.state == "offered":
            one.state = "declined"
            self.expect(ReleaseLease, one.source)
            if one.asked_with < one.shared:
                reasons["not_wanted" if one.matched else "below_threshold"] += 1
            elif one.kind is PromptKind.PREFIX:
                reasons["local_hit"] += 1
        assert reasons == {why: self.counters.total(one.metric, why) for why in reasons}

    @precondition(lambda self: self.has("loading", "aborted"))
    @rule(data=st.data(), good=st.booleans())
    def workers_report(self, data: st.DataObject, good: bool) -> None:
        request_id = self.some(data, "loading", "aborted")
        one = self.model[request_id]
        reported = (
            self.ledger.loaded(request_id) if good else self.ledger.failed(request_id)
        )
        assert reported is not None
        assert reported.source == one.source
        self.expect(ForgetLease if good else ReleaseLease, one.source)
        if one.state == "aborted":
            del self.model[request_id]
        else:
            one.state = "loaded" if good else "failed"

    @precondition(
        lambda self: self.has("offered", "loading", "loaded", "failed", "declined")
    )
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = self.some(
            data, "offered", "loading", "loaded", "failed", "declined"
        )
        one = self.model[request_id]
        self.ledger.finished(request_id)
        if one.state == "loading":
            one.state = "aborted"
            return
        if one.state == "offered":
            self.expect(ReleaseLease, one.source)
        del self.model[request_id]

    @rule()
    def take(self) -> None:
        orders = self.ledger.take_orders().loads
        assert {order.request_id for order in orders} == self.orders
        assert len(orders) == len(self.orders)
        self.orders = set()
        for order in orders:
            one = self.model.get(order.request_id)
            if one is not None:
                assert order.source == one.source
                assert order.first_token == one.asked_with
                assert one.asked_with < order.stop_token <= one.shared
        commands = [
            (type(command), command.lease.key)
            for command in self.ledger.take_commands()
        ]
        assert commands == self.expected
        self.ever += commands
        self.expected = []
        assert self.ledger.take_orders() == NO_LOADS
        assert self.ledger.take_commands() == ()

    @invariant()
    def ledger_agrees(self) -> None:
        check_loads(self.ledger)
        assert len(self.ledger) == len(self.model)
        for name, one in self.model.items():
            state = self.ledger.state(name)
            assert state is not None
            assert state.value == one.state

    def teardown(self) -> None:
        """When every request is over nothing is left, and no lease is kept any more."""
        for name, one in list(self.model.items()):
            if one.state != "aborted":
                self.ledger.finished(name)
            if one.state in ("loading", "aborted"):
                self.ledger.loaded(name)
        check_loads(self.ledger)
        assert len(self.ledger) == 0
        self.ever += [
            (type(command), command.lease.key)
            for command in self.ledger.take_commands()
        ]
        kept: Counter[LeaseKey] = Counter()
        for kind, key in self.ever:
            if kind is RenewLease:
                kept[key] += 1
                assert kept[key] == 1, "kept by two requests at once"
            else:
                kept[key] = 0
        assert not any(kept.values())


ConsumerHistories.TestCase.settings = settings(
    max_examples=draws(120), stateful_step_count=40
)
TestConsumerHistories = ConsumerHistories.TestCase
