"""Waits until a worker is idle: nothing is under way, and nothing is left."""

from __future__ import annotations

import contextlib
import time

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.worker import FerryWorker

TIMEOUT_S = 90.0
"""Longer than a handshake takes at most to fail, with the 30 or 60 s of `handshake_timeout_s` in these tests: a load
whose producer has closed before it answered waits for that."""


def wait_until_idle(worker: FerryWorker) -> None:
    """Wait until the worker is idle; its last reads may still have to end.

    Raises:
        LocalProtocolError: with the sums.
    """
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(LocalProtocolError):
            worker.check_integrity(idle=True)
            return
        time.sleep(0.005)
    worker.check_integrity(idle=True)
