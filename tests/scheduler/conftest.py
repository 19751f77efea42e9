"""What every test of the scheduler starts from."""

from __future__ import annotations

import threading

import pytest

from tests.scheduler import channel


@pytest.fixture(autouse=True)
def threads_before() -> None:
    """Threads are counted from here on."""
    channel.BEFORE.clear()
    channel.BEFORE.update(threading.enumerate())
