"""What a consumer may believe of a producer at this moment, and whether the caches hold it.

A consumer takes for good what a slot that says READY covers, and the tokens that a slot reports of a prompt that is
being computed, in the blocks that its row lists. Here both are read from a worker's memory, and compared with what the
toy model writes for these tokens (`states_of`): one wrong cell is one wrong answer that somebody may get.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvferry.protocol.ids import MAX_PROGRESS, SlotState, epoch_from_text
from kvferry.scheduler.producer.lease import LeaseState, ProducerLease
from tests.harness.core.configs import BLOCK_TOKENS
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.toy_model import states_of
from tests.harness.inside import memory_of, worker_of
from tests.harness.integrity import check_worker


class Believed(NamedTuple):
    """Leading tokens of a request that may be read, and their blocks."""

    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]
    is_ready: bool


def settle(node: Node) -> None:
    """Let the workers carry out what they were told: slots say all that they will say before the next orders."""
    for worker in node.workers:
        half = worker_of(ferry_of(worker).worker_side)
        check_worker(half)
        while memory_of(half).table.advance():
            pass


def believed(node: Node, stage: int = 0) -> list[Believed]:
    """All that may be read from one worker. Call `settle` before."""
    memory = memory_of(worker_of(ferry_of(node.workers[stage]).worker_side))
    side = ferry_of(node.engine.connector).scheduler_side
    leases = {lease.slot: lease for lease in side.leases.leases(*LeaseState) if lease.slot >= 0}
    return [
        found
        for slot, lease in leases.items()
        for found in _of(node, side, memory, slot, lease)
        if found.num_tokens
    ]


def _of(node: Node, side: Any, memory: Any, slot: int, lease: ProducerLease) -> Iterator[Believed]:
    word, progress = int(memory.table.words[slot]), int(memory.table.progress[slot])
    if word >> 4 != epoch_from_text(lease.name.epoch):
        return
    if word & 15 == SlotState.READY:
        entry = side.requests.find(lease.request_id)
        built = entry.ticket if entry is not None else None
        answered = node.engine.answers[lease.request_id].params
        if built is not None:
            yield Believed(
                lease.request_id, built[0].remote_num_tokens, built[0].remote_block_ids[0], True
            )
        elif answered is not None:
            (blocks, *_) = answered["remote_block_ids"]
            yield Believed(lease.request_id, answered["remote_num_tokens"], tuple(blocks), True)
    tokens = progress & MAX_PROGRESS
    stream = memory.table._leases[slot].stream
    if tokens and stream.row is not None:
        whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS if word & 15 != SlotState.READY else tokens
        ids = memory.rows.ids[stream.row][: -(-whole // BLOCK_TOKENS)]
        yield Believed(lease.request_id, whole, tuple(map(int, ids)), word & 15 == SlotState.READY)


def check_believed(node: Node, prompts: dict[str, list[int]]) -> list[Believed]:
    """Check every cell that somebody may believe; returns what that is."""
    settle(node)
    found = believed(node)
    for one in found:
        want = states_of(prompts[one.request_id][: one.num_tokens], node.window)
        cells = node.model.read_states(0, list(one.blocks), 0, one.num_tokens)
        wrong = [
            position for position in range(one.num_tokens) if cells[position] != want[position]
        ]
        assert not wrong, (
            f"{one}: the cells of tokens {wrong[0]} to {wrong[-1]} are not what they are said to be"
        )
    return found
