"""Transition tables of state machines, and the observer of what the ledgers decide."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from kvferry.protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from kvferry.scheduler.consumer.remote_prompt import RemotePrompt
    from kvferry.scheduler.producer.lease import Lease


class TableEnum(enum.Enum):
    """An enum whose members are keys of tables used in every step. Identity hash, for speed: `Enum.__hash__` is a
    Python call that hashes the name."""

    __hash__ = object.__hash__


State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class TransitionTable(Generic[State, Event]):
    """All transitions of a state machine; a next state of None ends it.

    `next` changes nothing itself, so an illegal event leaves the caller's state unchanged.
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
    """Callbacks of both ledgers; no-ops by default. Overrides must neither raise nor wait."""

    def lease_opened(self, lease: Lease) -> None:
        """A request has got a slot."""

    def lease_over(self, lease: Lease, how: str) -> None:
        """Its blocks are freed, or were never held; `how` is the label of `leases_released` or `turns_released`."""

    def recomputed(self, prompt: RemotePrompt, reason: str) -> None:
        """An offered prompt is computed here; `reason` is the label of `local_recomputes`."""
