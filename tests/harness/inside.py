"""The one place where tests reach into a worker: to forge what its memory holds, or to break or delay its thread.

What a test only looks at is in `FerryWorker.snapshot` and in the `snapshot` of the parts.
"""

from __future__ import annotations

import asyncio

from kvferry.worker.peers.first_contact import FirstContact
from kvferry.worker.transfer_thread import TransferThread
from kvferry.worker.worker import FerryWorker
from kvferry.worker.worker_memory import WorkerMemory


def memory_of(worker: FerryWorker) -> WorkerMemory:
    return worker._memory


def thread_of(worker: FerryWorker) -> TransferThread:
    now = worker._now
    assert now is not None, "its memory is withdrawn"
    return now.thread


def first_contact_of(worker: FerryWorker) -> FirstContact:
    return worker._first_contact


def wait_for_link(worker: FerryWorker) -> None:
    """Wait until the thread of its side channel has run what it had to run."""
    first_contact_of(worker).link.wait_for(asyncio.sleep(0))
