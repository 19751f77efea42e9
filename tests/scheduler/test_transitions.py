"""Both transition tables: complete, closed, and obeyed by the ledgers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.link.counters import Counters
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.ids import Epoch
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import (
    LEASE_TRANSITIONS,
    LOAD_OVER,
    REMOTE_PROMPT_TRANSITIONS,
    LeaseEvent,
    LeaseState,
    LeaseUse,
    RemotePromptEvent,
    RemotePromptState,
)
from tests.harness.ledgers import check_leases, check_loads
from tests.protocol.samples import make_params


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [
        (LEASE_TRANSITIONS, LeaseState, LeaseEvent),
        (REMOTE_PROMPT_TRANSITIONS, RemotePromptState, RemotePromptEvent),
    ],
)
def test_every_state_is_reachable_and_can_end(
    table: dict[Any, Any], states: type[enum.Enum], events: type[enum.Enum]
) -> None:
    initial = next(iter(states))
    assert set(table.values()) | {initial} == {*states, None}
    assert {event for _, event in table} == set(events)
    ending: set[object] = {None}
    for _ in states:
        ending |= {state for (state, _), after in table.items() if after in ending}
    assert ending == {*states, None}


REQUEST = "cmpl-1"


def producer_in(state: LeaseState) -> ProducerLedger:
    """A ledger whose only request is in this state."""
    ledger = ProducerLedger(
        slots=2, lease_s=30.0, counters=Counters(), draw_epoch=lambda: Epoch(9)
    )
    ledger.intend(REQUEST, LeaseUse.PROMPT)
    if state is LeaseState.INTENDED:
        return ledger
    ledger.open(REQUEST)
    ledger.take_orders(0.0)
    if state is LeaseState.COMPUTING:
        return ledger
    lease = ledger.finish(REQUEST)
    assert lease is not None
    if state is LeaseState.ENDING:
        assert ledger.release(lease.name)
    assert ledger.state(REQUEST) is state
    return ledger


def consumer_in(state: RemotePromptState) -> ConsumerLedger:
    """A ledger whose only request is in this state."""
    ledger = ConsumerLedger(Counters())
    ledger.offer(REQUEST, make_params(), 300, 0.0)
    if state is RemotePromptState.DECLINED:
        ledger.allocated(REQUEST, 0, ())
    elif state is not RemotePromptState.OFFERED:
        ledger.matched_tokens(REQUEST, 0)
        ledger.allocated(REQUEST, 300, ((1,), (2,)))
    if state is RemotePromptState.LOADED:
        ledger.loaded(REQUEST)
    elif state is RemotePromptState.FAILED:
        ledger.failed(REQUEST)
    elif state is RemotePromptState.ABORTED:
        ledger.finished(REQUEST)
    assert ledger.state(REQUEST) is state
    return ledger


def contents(ledger: ProducerLedger | ConsumerLedger) -> dict[str, object]:
    """Everything a ledger knows, comparable by value."""
    return {
        name: repr(value) for name, value in vars(ledger).items() if name != "_counters"
    }


LEASE_CALLS: dict[LeaseEvent, Callable[[ProducerLedger], object]] = {
    LeaseEvent.COMPLETE: lambda ledger: ledger.finish(REQUEST),
    LeaseEvent.ABANDON: lambda ledger: ledger.abandon(REQUEST),
    LeaseEvent.SENT: lambda ledger: ledger.sent(REQUEST),
}
LOAD_CALLS: dict[RemotePromptEvent, Callable[[ConsumerLedger], object]] = {
    RemotePromptEvent.LOAD: lambda ledger: ledger.allocated(REQUEST, 300, ((1,), (2,))),
    RemotePromptEvent.DECLINE: lambda ledger: ledger.allocated(REQUEST, 0, ()),
    RemotePromptEvent.LOADED: lambda ledger: ledger.loaded(REQUEST),
    RemotePromptEvent.FAILED: lambda ledger: ledger.failed(REQUEST),
    RemotePromptEvent.FINISH: lambda ledger: ledger.finished(REQUEST),
}


@pytest.mark.parametrize("event", LEASE_CALLS)
@pytest.mark.parametrize("state", LeaseState)
def test_the_producers_ledger_obeys_its_table_and_is_unchanged_by_what_is_forbidden(
    state: LeaseState, event: LeaseEvent
) -> None:
    ledger = producer_in(state)
    before = contents(ledger)
    if (state, event) in LEASE_TRANSITIONS:
        LEASE_CALLS[event](ledger)
        assert ledger.state(REQUEST) is LEASE_TRANSITIONS[state, event]
    else:
        with pytest.raises(LocalProtocolError):
            LEASE_CALLS[event](ledger)
        assert contents(ledger) == before
    check_leases(ledger)


@pytest.mark.parametrize("event", LOAD_CALLS)
@pytest.mark.parametrize("state", RemotePromptState)
def test_the_consumers_ledger_obeys_its_table_and_is_unchanged_by_what_is_forbidden(
    state: RemotePromptState, event: RemotePromptEvent
) -> None:
    ledger = consumer_in(state)
    ledger.matched_tokens(REQUEST, 0)
    before = contents(ledger)
    is_later_allocation = event is RemotePromptEvent.DECLINE and state in LOAD_OVER
    if is_later_allocation:
        LOAD_CALLS[event](ledger)  # vLLM reports it too
        assert contents(ledger) == before
    elif (state, event) in REMOTE_PROMPT_TRANSITIONS:
        LOAD_CALLS[event](ledger)
        assert ledger.state(REQUEST) is REMOTE_PROMPT_TRANSITIONS[state, event]
    else:
        with pytest.raises(LocalProtocolError):
            LOAD_CALLS[event](ledger)
        assert contents(ledger) == before
    check_loads(ledger)


def test_events_of_requests_without_a_lease_or_a_load_change_nothing() -> None:
    """vLLM reports every request; most have no lease or load. Only reports of workers must be about a known one."""
    leases, loads = ProducerLedger(2, 30.0, Counters()), ConsumerLedger(Counters())
    before = contents(leases), contents(loads)
    assert leases.finish("other") is None
    leases.abandon("other")
    assert loads.loaded("other") is None
    assert loads.failed("other") is None
    loads.finished("other")
    loads.allocated("other", 0, ((1,),))
    assert loads.matched_tokens("other", 0) == 0
    with pytest.raises(LocalProtocolError):
        leases.sent("other")
    with pytest.raises(LocalProtocolError):
        loads.allocated("other", 1, ((1,),))
    assert (contents(leases), contents(loads)) == before
