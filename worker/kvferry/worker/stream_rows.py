"""A producer worker's rows, which list the blocks of prompts that are being computed (`kvferry.protocol.stream_rows`).

A row belongs to the lease whose first epoch is in its header. Ids are written with the orders of the step that computes
their blocks, the tokens into the lease's slot when that step has ended. A row of which orders were lost would make
consumers read wrong blocks, so each order must continue exactly where the one before it ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.ids import EMPTY, Epoch
from kvferry.protocol.orders import LeaseProgress
from kvferry.protocol.stream_rows import (
    ID_BYTES,
    PAGE_IDS,
    ROW_HEADER_BYTES,
    STREAM_ROWS,
    StreamRows,
    header_word,
)
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.port import MemoryKind, Region


@dataclass(slots=True)
class ServedStream:
    """The published part of one lease's prompt under its present epoch.

    Attributes:
        origin: the first epoch of the lease; only of use with a row.
        row: None before the first order for it.
        ids: per cache group the number of ids in the row.
        steps: the steps that have not ended, oldest first: the leading tokens that are complete then, and the step's
            mark.
    """

    origin: Epoch
    row: int | None = None
    ids: tuple[int, ...] = ()
    steps: deque[tuple[int, DeviceMark]] = field(default_factory=deque)

    def take_tokens(self) -> int:
        """The tokens that are complete since the last call; 0 if no step has ended."""
        complete = 0
        while self.steps:
            tokens, mark = self.steps[0]
            if not mark.reached():
                break
            complete = tokens
            self.steps.popleft()
        return complete


_HEADERS_BYTES = STREAM_ROWS * ROW_HEADER_BYTES


def bytes_of_rows(blocks: tuple[int, ...]) -> int:
    """Bytes of the headers, and of the ids behind them, with room for so many blocks of each cache group."""
    pages = -(-sum(blocks) // PAGE_IDS)
    return _HEADERS_BYTES + STREAM_ROWS * pages * PAGE_IDS * ID_BYTES


class StreamRowTable:
    """`STREAM_ROWS` rows at fixed addresses.

    Args:
        blocks: per cache group the most blocks of one prompt; empty if no prompt can be read before it is complete.
        memory: where the rows are, `bytes_of_rows`, zeroed, aligned to 16; None for memory of its own.

    Attributes:
        headers: uint64 `[rows, 2]`.
        ids: uint32 `[rows, ids]`, whole pages.
    """

    def __init__(
        self, blocks: tuple[int, ...] = (), memory: NDArray[np.uint8] | None = None
    ) -> None:
        if memory is None:
            memory = np.zeros(bytes_of_rows(blocks), dtype=np.uint8)
        self.headers = memory[:_HEADERS_BYTES].view(np.uint64).reshape(STREAM_ROWS, 2)
        self.headers[:] = EMPTY
        self.ids = memory[_HEADERS_BYTES:].view(np.uint32).reshape(STREAM_ROWS, -1)
        self._blocks = blocks

    @property
    def address(self) -> StreamRows | None:
        """Their location, for consumers."""
        if not self._blocks:
            return None
        return StreamRows(
            headers=int(self.headers.ctypes.data),
            ids=int(self.ids.ctypes.data),
            rows=STREAM_ROWS,
            blocks=self._blocks,
        )

    def regions(self) -> list[Region]:
        """The memory to register."""
        if not self._blocks:
            return []
        return [
            Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)
            for memory in (self.headers, self.ids)
        ]

    def name(self, row: int, stream: ServedStream, epoch: Epoch) -> None:
        """The row is a lease's from now on, under its present epoch."""
        stream.row = row
        # The origin tells consumers that this is still the lease of their ticket, whatever its present epoch is.
        self.headers[row] = (header_word(stream.origin), header_word(epoch))

    def free(self, stream: ServedStream) -> None:
        """The lease is over, if it has a row. A row that another lease has taken meanwhile stays that lease's."""
        if stream.row is None:
            return
        if self.headers[stream.row, 0] == header_word(stream.origin):
            self.headers[stream.row] = EMPTY

    def extend(self, stream: ServedStream, order: LeaseProgress, epoch: Epoch) -> None:
        """Write an order's ids and name the row.

        Raises:
            LocalProtocolError: the order does not continue the row, or would leave it; nothing has been written.
        """
        listed = stream.ids or (0,) * len(self._blocks)
        stops = tuple(
            first + len(ids)
            for first, ids in zip(order.first_blocks, order.blocks, strict=False)
        )
        # `all` stops at the shorter of both, so the number of groups is compared first.
        has_room = len(order.blocks) == len(self._blocks) and all(
            stop <= room for stop, room in zip(stops, self._blocks, strict=False)
        )
        continues = order.first_blocks == listed and stream.row in (None, order.row)
        if not has_room or not continues:
            raise LocalProtocolError(
                f"row {order.row}, ids {order.first_blocks} to {stops} after ids {listed} "
                f"of row {stream.row}, which has room for {self._blocks}"
            )
        group_begins = 0
        for first, ids, room in zip(
            order.first_blocks, order.blocks, self._blocks, strict=True
        ):
            begin = group_begins + first
            self.ids[order.row, begin : begin + len(ids)] = ids
            group_begins += room
        stream.ids = stops
        self.name(order.row, stream, epoch)

    def snapshot(self) -> dict[int, tuple[int, int]]:
        """The headers that are not empty, by row: the words of origin and present epoch."""
        rows = np.flatnonzero(self.headers.any(axis=1)).tolist()
        return {row: tuple(self.headers[row].tolist()) for row in rows}
