"""A producer worker's rows, which list the blocks of prompts that are being computed (`kvferry.protocol.stream_rows`).

A row belongs to the lease whose first epoch is in its header. Ids are written with the orders of the step that computes
their blocks, the tokens into the lease's slot when that step has ended. A row of which orders were lost would make
consumers read wrong blocks, so each order must continue exactly where the one before it ended.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.ids import EMPTY, Epoch
from kvferry.protocol.orders import LeaseProgress
from kvferry.protocol.stream_rows import PAGE_IDS, STREAM_ROWS, StreamRows, header_word
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
        tokens = 0
        while self.steps and self.steps[0][1].reached():
            tokens, _ = self.steps.popleft()
        return tokens


class StreamRowTable:
    """`STREAM_ROWS` rows at fixed addresses.

    Args:
        blocks: per cache group the most blocks of one prompt; empty if no prompt can be read before it is complete.

    Attributes:
        headers: uint64 `[rows, 2]`.
        ids: uint32 `[rows, ids]`, whole pages.
    """

    def __init__(self, blocks: tuple[int, ...] = ()) -> None:
        pages = -(-sum(blocks) // PAGE_IDS)
        self.headers = np.full((STREAM_ROWS, 2), EMPTY, dtype=np.uint64)
        self.ids = np.zeros((STREAM_ROWS, pages * PAGE_IDS), dtype=np.uint32)
        self._blocks = blocks

    @property
    def address(self) -> StreamRows | None:
        """Their location, for consumers."""
        if not self._blocks:
            return None
        headers, ids = int(self.headers.ctypes.data), int(self.ids.ctypes.data)
        return StreamRows(headers=headers, ids=ids, rows=STREAM_ROWS, blocks=self._blocks)

    def regions(self) -> list[Region]:
        """The memory to register."""
        parts = (self.headers, self.ids) if self._blocks else ()
        return [Region(part.ctypes.data, part.nbytes, MemoryKind.DRAM) for part in parts]

    def name(self, row: int, stream: ServedStream, epoch: Epoch) -> None:
        """The row is a lease's from now on, under its present epoch."""
        stream.row = row
        self.headers[row] = header_word(stream.origin), header_word(epoch)

    def free(self, stream: ServedStream) -> None:
        """The lease is over, if it has a row. A row that another lease has taken meanwhile stays that lease's."""
        if stream.row is not None and self.headers[stream.row, 0] == header_word(stream.origin):
            self.headers[stream.row] = EMPTY

    def extend(self, stream: ServedStream, order: LeaseProgress, epoch: Epoch) -> None:
        """Write an order's ids and name the row.

        Raises:
            LocalProtocolError: the order does not continue the row, or would leave it; nothing has been written.
        """
        stops = tuple(
            first + len(ids) for first, ids in zip(order.first_blocks, order.blocks, strict=False)
        )
        fits = len(order.blocks) == len(self._blocks) and all(map(operator.le, stops, self._blocks))
        listed = stream.ids or (0,) * len(self._blocks)
        if not fits or order.first_blocks != listed or stream.row not in (None, order.row):
            raise LocalProtocolError(
                f"row {order.row}, ids {order.first_blocks} to {stops} after ids {listed} of row {stream.row}, "
                f"which has room for {self._blocks}"
            )
        begin = 0
        for first, ids, most in zip(order.first_blocks, order.blocks, self._blocks, strict=True):
            self.ids[order.row, begin + first : begin + first + len(ids)] = ids
            begin += most
        stream.ids = stops
        self.name(order.row, stream, epoch)

    def errors(self, owners: Iterable[tuple[ServedStream, Epoch]]) -> list[str]:
        """Errors, if any: each header that is not empty is that of a lease that has the row.

        Args:
            owners: of all leases, with the present epoch.
        """
        known = {
            (stream.row, header_word(stream.origin), header_word(epoch)) for stream, epoch in owners
        }
        used = (
            (row, *self.headers[row].tolist())
            for row in np.flatnonzero(self.headers.any(axis=1)).tolist()
        )
        wrong = [header for header in used if header not in known]
        return [
            f"row {row} has the header {origin:#x}, {present:#x} of no lease"
            for row, origin, present in wrong
        ]
