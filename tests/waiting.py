"""Waiting for an outcome: never longer than it takes, never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(happened: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Poll until `happened` is true.

    Raises:
        AssertionError: it did not become true in time; names `what`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.002)
