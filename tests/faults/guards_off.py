"""A plugin of pytest that switches one guard off; see `tests.faults.guards`."""

from __future__ import annotations

import functools
import importlib
import os

import pytest

from tests import waiting
from tests.faults.guards import GUARDS
from tests.faults.switches import Guard

VARIABLE = "KVFERRY_GUARD_OFF"
_LONGEST_S = 3.0
"""More than anything takes that does come, on all but the slowest machines; there a test fails all the same."""


def switch_off(guard: Guard) -> None:
    """In this process, for good."""
    module, _, name = guard.target.partition(":")
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    setattr(owner, last, guard.off(getattr(owner, last)))


def pytest_configure() -> None:
    """Before any test module is imported."""
    key = os.environ.get(VARIABLE)
    if not key:
        return
    chosen = [guard for guard in GUARDS if guard.key == key]
    if not chosen:
        raise pytest.UsageError(
            f"{VARIABLE} is {key}; expected one of {', '.join(guard.key for guard in GUARDS)}"
        )
    switch_off(chosen[0])
    # What a guard brings about does not come without it, nor any rest: there is no need to wait long for it.
    waiting.LONGEST_S = _LONGEST_S
    vars(importlib.import_module("tests.harness.cache_engine"))["IDLE_WITHIN_S"] = 0.5
