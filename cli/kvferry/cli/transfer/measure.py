"""The command's part of a measurement: it starts nothing, and passes messages between its reader and an owner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cli.transfer.child import Child
from kvferry.cli.transfer.messages import Measured, Offer, Progress, ReadsFailed, Task

START_S = 120.0
"""Timeout of loading NIXL, also on a busy machine."""
_GRACE_S = 10.0
"""Added to the timeout of a read before the reader counts as hanging: it compares bytes in between."""
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results.

    Attributes:
        mine, theirs: the reader's and the owner's agent and memory.
        lanes: the transports, as UCX names them.
    """

    mine: Offer
    theirs: Offer
    lanes: str
    measured: Measured


def measure(
    reader: Child,
    task: Task,
    connect: Callable[[bytes], Offer],
    show: Callable[[Progress], None],
    idle: Callable[[], None] = lambda: None,
    start_s: float = START_S,
) -> Outcome:
    """Let a reader read an owner's memory.

    Args:
        connect: makes the owner known to the reader's agent, by its metadata, and returns the owner's offer.
        show: called with the progress.
        idle: called several times a second while the reader works.
        start_s: deadline of loading NIXL.

    Raises:
        ReadsFailed: the reader failed, ended or hangs.
    """
    show(Progress(what="loading NIXL"))
    reader.send(task)
    mine = reader.expect(Offer, start_s)
    theirs = connect(mine.agent_metadata)
    reader.send(theirs)
    received_s = time.monotonic()
    while not isinstance(message := reader.take(_POLL_S), Measured):
        now_s = time.monotonic()
        if isinstance(message, Progress):
            received_s = now_s
            show(message)
        elif now_s - received_s > task.timeout_s + _GRACE_S:
            raise ReadsFailed(f"NIXL hangs: no result for {now_s - received_s:.0f} s", late=True)
        idle()
    return Outcome(mine, theirs, reader.lanes(), message)
