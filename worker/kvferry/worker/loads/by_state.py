"""All loads of a worker by state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, KeysView

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.transitions import next_state
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.slot_watch import Wait
from kvferry.worker.loads.state import LOAD_TRANSITIONS, LoadEvent, LoadState


class LoadsByState:
    """All loads that are not over, each under its state, in the order in which they entered it."""

    def __init__(self) -> None:
        # Ordered dicts, not dicts: the first of thousands is taken in constant time, however many were taken before.
        self._loads: dict[LoadState, OrderedDict[Load, None]] = {
            state: OrderedDict() for state in LoadState if state is not LoadState.OVER
        }
        self._by_wait: dict[Wait, Load] = {}

    def add(self, load: Load) -> None:
        """Take a new load, which is WAITING.

        Raises:
            LocalProtocolError: it is not.
        """
        if load.state is not LoadState.WAITING:
            raise LocalProtocolError(
                f"{load}: a new load is {load.state.name}; {load.story}"
            )
        self._loads[LoadState.WAITING][load] = None

    def apply(
        self, load: Load, event: LoadEvent, now_s: float, wait: Wait | None = None
    ) -> None:
        """Let an event happen to a load: its state, its container and its story change together.

        Args:
            wait: of a load that parks: what it waits for.

        Raises:
            LocalProtocolError: the event may not happen in its state. Nothing has changed, and the text ends with the
                load's story.
        """
        before = load.state
        try:
            after = next_state(LOAD_TRANSITIONS, before, event, load)
        except LocalProtocolError as error:
            raise LocalProtocolError(f"{error}; {load.story}") from None
        if (event is LoadEvent.PARK) != (wait is not None):
            raise LocalProtocolError(
                f"{load}: only a load that parks has a wait; {load.story}"
            )
        del self._loads[before][load]
        if load.wait is not None:
            del self._by_wait[load.wait]
        if wait is not None:
            self._by_wait[wait] = load
        load.wait = wait
        load.state = after
        load.since_s = now_s
        load.story.add(event, now_s)
        if after is not LoadState.OVER:
            self._loads[after][load] = None

    def in_state(self, state: LoadState) -> KeysView[Load]:
        """The loads in a state, as a view that follows every change; the one that entered it first is first."""
        return self._loads[state].keys()

    def of(self, *states: LoadState) -> Iterator[Load]:
        """The loads in these states."""
        for state in states:
            yield from self._loads[state]

    def count(self, *states: LoadState) -> int:
        """How many loads are in these states. May be called on any thread."""
        return sum(len(self._loads[state]) for state in states)

    def counts(self) -> dict[LoadState, int]:
        """How many loads are in each state but OVER."""
        return {state: len(loads) for state, loads in self._loads.items()}

    def parked_for(self, wait: Wait) -> Load:
        """The load that is parked until this wait is over."""
        return self._by_wait[wait]
