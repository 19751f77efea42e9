"""Fixtures of all tests of the link."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvferry.link.counters import Counters
from kvferry.link.renewer import LeaseRenewer
from tests.link import channel


@pytest.fixture(autouse=True)
def threads_before() -> None:
    """Record the threads that exist before the test."""
    channel.BEFORE.clear()
    channel.BEFORE.update(threading.enumerate())


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def renewer(counters: Counters) -> Iterator[LeaseRenewer]:
    """A renewer whose thread has ended after the test."""
    renewer = channel.renewing(counters)
    yield renewer
    renewer.close()
    assert not channel.threads_named("kvferry-side-channel")
