"""Rows: where a producer's workers list the blocks of prompts that are being computed, for consumers to read.

Streamed read: both legs of a request at once. Its prompt is read step by step, while it is computed.

    router               producer                                                  consumer
      ├── prompt ───────►│                                                           │
      ├── the same prompt, NamedPrefill{remote_engine_id, …} ───────────────────────►│
      │                  │◄──────── Subscribe{queries: [PromptQuery{key, …}], …} ────┤
      │                  ├── Answers{answers: [Answer{progress: queued, …}], …} ────►│
      │                  │ schedules the first step                                  │
      │                  ├── Answers{answers: [Answer{progress: ticket, …}], …} ────►│ takes Ticket{stream_row, …}
      │                  │ lists its blocks in the row                               │
      │                  │ a step has ended: writes its tokens into the slot         │
      │                  │◄═════════════ reads slot, row's header, ids, blocks ══════╡ where LeaseTableAddress{…} and
      │                  │ … for each step but the last                              │ StreamRows{…} say
      │                  │ the last step has ended: the slot is READY                │
      │                  │◄═════════════════ reads slot, ids, blocks, slot again ════╡
      │                  │◄══ Done{slot, epoch, consumer, worker, expected} ═════════╡
      │◄── one token ────┤                                                           │
      │◄──────────────────────────────────────────────────────────────── tokens ─────┤

A row belongs to one lease, from the first step after a consumer has queried its prompt until the lease is over. It
has a header and block ids:

    header   word 0   `epoch << 4 | 1` of the lease's first epoch, which its consumers know; 0 in a free row
             word 1   the same of its present epoch, which is another one once the request was preempted
    ids      uint32: for each cache group in turn, room for the listed blocks of any prompt, in the order of the tokens

Ids are written before the progress word (`kvferry.protocol.ids`) that makes them valid. So a consumer reads the slot,
then the ids, then the blocks, each when the read before has ended. Of windows, chunks and states the blocks from the
ticket's `held_from` on are listed, shortly before the slot becomes READY.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import Address, Epoch

STREAM_ROWS = 64
"""Most prompts of one engine that are read while they are computed, at the same time."""
PAGE_IDS = 256
"""Block ids that one read of a row fetches; rows are padded to whole pages."""
ID_BYTES = 4
ROW_HEADER_BYTES = 16
MAX_ROW_GROUPS = 64

RowIndex = Annotated[int, Meta(ge=0, lt=STREAM_ROWS)]
RowBlocks = Annotated[int, Meta(ge=1, le=1 << 20)]


class StreamRows(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a worker's rows, in host memory.

    Attributes:
        headers: address of the headers, which follow each other.
        ids: address of the ids of row 0; those of the next rows follow.
        rows: number of rows.
        blocks: per cache group the most listed blocks of one prompt.
    """

    headers: Address
    ids: Address
    rows: Annotated[int, Meta(ge=1, le=STREAM_ROWS)]
    blocks: Annotated[
        tuple[RowBlocks, ...], Meta(min_length=1, max_length=MAX_ROW_GROUPS)
    ]

    @property
    def pages(self) -> int:
        """Pages of one row."""
        return -(-sum(self.blocks) // PAGE_IDS)


def header_word(epoch: Epoch) -> int:
    """A word of a row's header."""

    return epoch << 4 | 1
