"""Fixtures of all tests of the scheduler."""

from __future__ import annotations

import pytest

from kvferry.link.counters import Counters


@pytest.fixture
def counters() -> Counters:
    return Counters()
