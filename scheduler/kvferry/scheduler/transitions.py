"""Transition tables of state machines. A ledger executes its table and has no other way to change a state."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from kvferry.protocol.errors import LocalProtocolError


class TableEnum(enum.Enum):
    """An enum whose members are keys of tables used in every step."""

    # `Enum.__hash__` is a Python call that hashes the name; the identity's is not, and members are singletons.
    __hash__ = object.__hash__


State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


def next_state(
    transitions: Mapping[tuple[State, Event], State | None],
    state: State,
    event: Event,
    subject: object,
) -> State | None:
    """The state after `event` by a table of all transitions of a state machine; None ends it.

    Raises:
        LocalProtocolError: `event` may not happen in `state`; the text begins with `str(subject)`.
    """
    try:
        return transitions[state, event]
    except KeyError:
        raise LocalProtocolError(
            f"{subject}: {event.name} cannot happen in state {state.name}"
        ) from None
