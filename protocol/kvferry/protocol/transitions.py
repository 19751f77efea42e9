"""State machines as tables: every transition that may happen is one row, and every other one raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from kvferry.protocol.errors import LocalProtocolError


class TableEnum(enum.Enum):
    """An enum whose members are keys of tables used in every step."""

    # `Enum.__hash__` is a Python call that hashes the member's name.
    __hash__ = object.__hash__


State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)
After = TypeVar("After", bound=enum.Enum | None)


def next_state(
    transitions: Mapping[tuple[State, Event], After],
    state: State,
    event: Event,
    subject: object,
) -> After:
    """The state after `event` by a table of all transitions of a state machine; None, where a table has it, ends it.

    Raises:
        LocalProtocolError: `event` may not happen in `state`; the text begins with `str(subject)`.
    """
    try:
        return transitions[state, event]
    except KeyError:
        raise LocalProtocolError(
            f"{subject}: {event.name} cannot happen in state {state.name}"
        ) from None
