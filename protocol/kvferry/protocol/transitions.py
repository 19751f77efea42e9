"""State machines as tables: every transition that may happen is one row, and every other one raises.

    TABLE = {(State.A, Event.X): State.B, (State.B, Event.Y): None}

    try:
        after = TABLE[state, event]
    except KeyError:
        raise cannot_happen(subject, state, event) from None

The table is looked up where the state is kept: a transition of every step is no call.
"""

from __future__ import annotations

import enum

from kvferry.protocol.errors import LocalProtocolError


class TableEnum(enum.Enum):
    """An enum whose members are keys of tables used in every step."""

    # `Enum.__hash__` is a Python call that hashes the member's name.
    __hash__ = object.__hash__


def cannot_happen(
    subject: object, state: enum.Enum, event: enum.Enum
) -> LocalProtocolError:
    """The error for an event that has no row in this state; its text begins with `str(subject)`."""
    return LocalProtocolError(
        f"{subject}: {event.name} cannot happen in state {state.name}"
    )
