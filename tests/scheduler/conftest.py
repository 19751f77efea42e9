"""Fixtures of all tests of the scheduler."""

from __future__ import annotations

import threading

import pytest

from tests.scheduler import channel


@pytest.fixture(autouse=True)
def threads_before() -> None:
    """Record the threads that exist before the test."""
    channel.BEFORE.clear()
    channel.BEFORE.update(threading.enumerate())
