"""Shared parts of the ledgers and threads: transition tables, the observer, counters, fair shares."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from kvferry.protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from kvferry.scheduler.consumer.remote_prompt import RemotePrompt
    from kvferry.scheduler.producer.lease import ProducerLease


class TableEnum(enum.Enum):
    """An enum whose members are keys of tables used in every step. Identity hash, for speed: `Enum.__hash__` is a
    Python call that hashes the name."""

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


class Observer:
    """Callbacks of both ledgers; no-ops by default. Overrides must neither raise nor wait."""

    def lease_opened(self, lease: ProducerLease) -> None:
        """A request has got a slot."""

    def lease_over(self, lease: ProducerLease, how: str) -> None:
        """Its blocks are freed, or were never held; `how` is the label of `leases_released` or `turns_released`."""

    def recomputed(self, prompt: RemotePrompt, reason: str) -> None:
        """An offered prompt is computed here; `reason` is the label of `local_recomputes`."""


CounterKey = tuple[str, str]
"""Metric and label value; the label is empty where the metric has none."""


class Counters:
    """Thread-safe counters and samples.

    `take` returns what was added since the last call and resets it; `total` is never reset, for tests and debug output.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_taken: dict[CounterKey, int] = {}
        self._total: dict[CounterKey, int] = {}
        self._samples: dict[str, list[float]] = {}

    def add(self, metric: str, label: str = "", amount: int = 1) -> None:
        """Count `amount` more of `metric`."""
        key = (metric, label)
        with self._lock:
            for counts in (self._since_taken, self._total):
                counts[key] = counts.get(key, 0) + amount

    def total(self, metric: str, label: str = "") -> int:
        """The count since the start."""
        with self._lock:
            return self._total.get((metric, label), 0)

    def take(self) -> dict[CounterKey, int]:
        """The counts since the last call."""
        if not self._since_taken:
            return {}
        with self._lock:
            taken, self._since_taken = self._since_taken, {}
        return taken

    def sample(self, metric: str, value: float) -> None:
        """Add a measurement of `metric`."""
        with self._lock:
            self._samples.setdefault(metric, []).append(value)

    def take_samples(self) -> dict[str, list[float]]:
        """The measurements since the last call, by metric."""
        if not self._samples:
            return {}
        with self._lock:
            taken, self._samples = self._samples, {}
        return taken


def has_share(count: int, taken: int, most: int) -> bool:
    """Whether one host with `count` of the `taken` places may have one more of `most`: if it has fewer than are free.

    Clients choose how many places they want for which host. By this rule one host gets half of them at most, two get a
    third each, and there is always one for the next; a fixed part of them would be too few for a fleet on one host.
    """
    return count < most - taken


HEARTBEATS_PER_LEASE = 6
