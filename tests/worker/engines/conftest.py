"""Rigs of engines; each test has its own, and no thread of kvferry outlives it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from tests.worker.engine_rig import Rig


def _transfer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvferry-transfer"]


def _rig(kind: str) -> Iterator[Rig]:
    rig = Rig(kind)
    yield rig
    rig.close()
    wait_until(lambda: not _transfer_threads(), "the transfer threads have ended")


@pytest.fixture(params=["memory", "nixl"])
def any_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """On the fake fabric and on the real one."""
    yield from _rig(request.param)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """On the fake fabric, for faults that only a fake has on demand."""
    yield from _rig("memory")
