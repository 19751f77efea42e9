"""Waiting for an outcome: never longer than it takes, never for ever."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

LONGEST_S = math.inf
"""The longest wait of any test. Shorter only where the awaited event is known not to come: see
`tests.faults.guards_off`."""

LONGEST_JOIN_S = 60.0
"""In the place of the product's bound for a thread that is to end. A `close` that takes half of it has waited for one
that does not end; any machine is quicker with one that does."""

SHORTEST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.002


def deadline_s(timeout_s: float) -> float:
    """When to give up what may take so long, by the monotonic clock."""
    return time.monotonic() + min(timeout_s, LONGEST_S)


def wait_until(
    happened: Callable[[], object], what: str, timeout_s: float = 30.0
) -> None:
    """Poll until `happened` is true.

    Raises:
        AssertionError: it did not become true in time; names `what`.
    """
    end_s = deadline_s(timeout_s)
    # Short pauses first: most reads of the fabrics' tests end within half a millisecond, and there are thousands.
    pause_s = SHORTEST_PAUSE_S
    while not happened():
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Stepped(Protocol):
    """An engine whose step loop the test runs."""

    def step(self) -> object: ...


def step_until(
    happened: Callable[[], object],
    what: str,
    *engines: Stepped,
    timeout_s: float = 30.0,
) -> None:
    """Step the engines until it has happened.

    Raises:
        AssertionError: it did not in time; names `what`.
    """
    end_s = deadline_s(timeout_s)
    while not happened():
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {what}"
        for engine in engines:
            engine.step()
        time.sleep(0.001)
