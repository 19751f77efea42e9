"""Fixtures of all tests of the scheduler."""

from __future__ import annotations

import pytest

from kvferry.scheduler.counters import Counters


@pytest.fixture
def counters() -> Counters:
    return Counters()
