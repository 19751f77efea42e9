"""A worker's transfer thread as a test sees it: its integrity at any moment, and a thread that stands still."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.inbox import ThreadSnapshot
from kvferry.worker.loads.state import LoadState
from kvferry.worker.worker import FerryWorker
from tests.harness.inside import thread_of

ANSWER_WITHIN_S = 30.0
STANDS_WITHIN_S = 60.0


def snapshot_of(worker: FerryWorker) -> ThreadSnapshot:
    """The worker's transfer thread between two of its turns; it must run."""
    seen = worker.snapshot(ANSWER_WITHIN_S)
    assert seen is not None, "the transfer thread has ended"
    return seen


def check_worker(worker: FerryWorker, *, idle: bool = False) -> None:
    """Check the integrity of a worker between two turns of its transfer thread; waits. One that has ended has none.

    Args:
        idle: also check that nothing is under way: no load, no first read, no quarantined load. Peers may be known and
            leases held.

    Raises:
        LocalProtocolError: with all the sums, or the thread does not answer.
    """
    try:
        seen = worker.snapshot(ANSWER_WITHIN_S)
    except TimeoutError:
        raise LocalProtocolError(
            f"the transfer thread has not answered within {ANSWER_WITHIN_S:g} s"
        ) from None
    if seen is None:
        return
    wrong = list(seen.wrong)
    if idle:
        waiting = seen.loads[LoadState.WAITING]
        left = {
            "loads wait": waiting,
            "loads run or are quarantined": sum(seen.loads.values()) - waiting,
            "first reads have not ended": seen.first_reads,
            "handles were not taken back": seen.refused,
            "transfers are open": seen.handles.transfers,
            "peers are leaving": seen.handles.leaving,
        }
        wrong += [f"{count} {what}" for what, count in left.items() if count]
    if wrong:
        raise LocalProtocolError(f"{'; '.join(wrong)}. {seen.sums}")


@contextlib.contextmanager
def standing_still(worker: FerryWorker) -> Iterator[None]:
    """The worker's transfer thread stands still in the middle of a turn, until the block ends."""
    stands, goes_on = threading.Event(), threading.Event()
    registry = thread_of(worker).registry
    step = registry.step

    def stand_still(*args: Any) -> bool:
        stands.set()
        goes_on.wait(STANDS_WITHIN_S)
        return step(*args)

    with mock.patch.object(registry, "step", stand_still):
        thread_of(worker).wake()
        assert stands.wait(STANDS_WITHIN_S)
        try:
            yield
        finally:
            goes_on.set()
