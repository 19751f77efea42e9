"""What a consumer may believe of a producer at this moment, and whether the caches hold it.

A consumer takes for good what a slot that says READY covers, and the tokens that a slot reports of a prompt that is
being computed, in the blocks that its row lists. Here both are read from a worker's memory, and compared with what the
toy model writes for these tokens (`states_of`): one wrong cell is one wrong answer that somebody may get.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvferry.protocol.ids import Epoch
from kvferry.protocol.slots import MAX_PROGRESS, SlotState, epoch_from_text, header_word
from kvferry.scheduler.requests import LeaseState, ProducerLease
from kvferry.worker.worker import FerryWorker
from tests.harness.core.configs import BLOCK_TOKENS
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.toy_model import states_of
from tests.harness.exported import rows_of, slots_of
from tests.harness.integrity import check_worker


class Believed(NamedTuple):
    """Leading tokens of a request that may be read, and their blocks."""

    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]
    is_ready: bool


def settle(node: Node) -> None:
    """Let the workers carry out what they were told: slots say all that they will say before the next orders."""
    for worker in node.ferry_workers:
        check_worker(worker)  # the thread has taken the orders
        check_worker(worker)  # and has finished the turn in which it did


def believed(node: Node, stage: int = 0) -> list[Believed]:
    """All that may be read from one worker. Call `settle` before."""
    worker = node.ferry_workers[stage]
    side = ferry_of(node.engine.connector).scheduler_side
    leases = {
        lease.slot: lease
        for lease in side.leases.leases(*LeaseState)
        if lease.slot >= 0
    }
    return [
        found
        for slot, lease in leases.items()
        for found in _of(node, side, worker, slot, lease)
        if found.num_tokens
    ]


def _of(
    node: Node, side: Any, worker: FerryWorker, slot: int, lease: ProducerLease
) -> Iterator[Believed]:
    slots = slots_of(worker)
    word, progress = int(slots.words[slot]), int(slots.progress[slot])
    if word >> 4 != epoch_from_text(lease.name.epoch):
        return
    if word & 15 == SlotState.READY:
        entry = side.requests.find(lease.request_id)
        built = entry.ticket if entry is not None else None
        answered = node.engine.answers[lease.request_id].params
        if built is not None:
            yield Believed(
                lease.request_id,
                built[0].remote_num_tokens,
                built[0].remote_block_ids[0],
                True,
            )
        elif answered is not None:
            (blocks, *_) = answered["remote_block_ids"]
            yield Believed(
                lease.request_id, answered["remote_num_tokens"], tuple(blocks), True
            )
    tokens = progress & MAX_PROGRESS
    if not tokens or worker.description.stream_rows is None:
        return
    rows = rows_of(worker)
    for row in np.flatnonzero(rows.headers[:, 1] == header_word(Epoch(word >> 4))):
        whole = (
            tokens // BLOCK_TOKENS * BLOCK_TOKENS
            if word & 15 != SlotState.READY
            else tokens
        )
        ids = rows.ids[row][: -(-whole // BLOCK_TOKENS)]
        yield Believed(
            lease.request_id, whole, tuple(map(int, ids)), word & 15 == SlotState.READY
        )


def check_believed(node: Node, prompts: dict[str, list[int]]) -> list[Believed]:
    """Check every cell that somebody may believe; returns what that is."""
    settle(node)
    found = believed(node)
    for one in found:
        want = states_of(prompts[one.request_id][: one.num_tokens], node.window)
        cells = node.model.read_states(0, list(one.blocks), 0, one.num_tokens)
        wrong = [
            position
            for position in range(one.num_tokens)
            if cells[position] != want[position]
        ]
        assert not wrong, (
            f"{one}: the cells of tokens {wrong[0]} to {wrong[-1]} are not what they are said to be"
        )
    return found
