"""Transition tables of state machines, and the observer of what the ledgers decide."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from kvferry.protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from kvferry.scheduler.consumer.ledger import RemotePrompt
    from kvferry.scheduler.producer.lease import Lease


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


class Observer:
    """Callbacks of both ledgers, which do nothing here. An override neither raises nor waits."""

    def lease_opened(self, lease: Lease) -> None:
        """A request has a slot."""

    def lease_over(self, lease: Lease, how: str) -> None:
        """Its blocks are given back, or never were held; `how` as the counters of leases that are over have it."""

    def recomputed(self, prompt: RemotePrompt, reason: str) -> None:
        """A prompt that was offered is computed here; `reason` as `local_recomputes` has it."""
