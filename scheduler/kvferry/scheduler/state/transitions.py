"""A transition table, and what happens to those who leave it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from kvferry.protocol.errors import LocalProtocolError


class TableEnum(enum.Enum):
    """Its members are keys of tables that are asked in every step. They are hashed as the one object that each of them
    is; the hash of an `Enum` is that of its name, and takes a call of Python's to find."""

    __hash__ = object.__hash__


State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class TransitionTable(Generic[State, Event]):
    """All transitions of a state machine; a next state of None ends it.

    `next` never changes anything itself, so an illegal event leaves its caller's state as it was.
    """

    def __init__(self, transitions: Mapping[tuple[State, Event], State | None]) -> None:
        self.transitions = dict(transitions)

    def next(self, state: State, event: Event, subject: object) -> State | None:
        """The state after `event`.

        Raises:
            LocalProtocolError: `event` may not happen in `state`; the text begins with `str(subject)`.
        """
        try:
            return self.transitions[state, event]
        except KeyError:
            raise LocalProtocolError(f"{subject}: {event.name} cannot happen in state {state.name}") from None
