"""The table of a memory's states: complete, closed, and without a way round the end of all reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.registration import (
    MEMORY_TRANSITIONS,
    MemoryEvent,
    MemoryState,
    Registration,
)
from tests.promises import promise

PAIRS = [(state, event) for state in MemoryState for event in MemoryEvent]
ILLEGAL = [pair for pair in PAIRS if pair not in MEMORY_TRANSITIONS]


def registration_in(state: MemoryState) -> Registration:
    """Reached by the shortest way."""
    registration = Registration()
    for event in (
        MemoryEvent.WITHDRAW,
        MemoryEvent.QUIET,
        MemoryEvent.DEREGISTERED,
    ):
        if registration.state is state:
            break
        registration.apply(event)
    assert registration.state is state
    return registration


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_event_that_the_table_lacks_raises_and_changes_nothing(
    state: MemoryState, event: MemoryEvent
) -> None:
    registration = registration_in(state)
    for attempt in (registration.check, registration.apply):
        with pytest.raises(LocalProtocolError, match=f"{event.name} cannot happen"):
            attempt(event)
    assert (registration.state, registration.generation) == (state, 0)


@promise(2)
@given(st.lists(st.sampled_from(MemoryEvent)))
def test_pages_go_only_when_all_reads_have_ended_since_the_last_registration(
    events: list[MemoryEvent],
) -> None:
    registration = Registration()
    happened: list[MemoryEvent] = []
    generations = 0
    for event in events:
        if (registration.state, event) not in MEMORY_TRANSITIONS:
            continue
        registration.apply(event)
        happened.append(event)
        generations += event is MemoryEvent.REGISTERED
        assert registration.generation == generations
        if registration.state is MemoryState.WITHDRAWN:
            assert happened[-3:] == [
                MemoryEvent.WITHDRAW,
                MemoryEvent.QUIET,
                MemoryEvent.DEREGISTERED,
            ]
