"""What a worker shows its peers, read and written in place at the addresses of its description.

Peers read it over RDMA. A test that writes it does what a producer could that lies.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.protocol.slots import PAGE_IDS
from kvferry.worker.worker import FerryWorker

Words = npt.NDArray[np.uint64]


class Slots(NamedTuple):
    """uint64 `[slots]` each: the first and the second words of a worker's lease slots."""

    words: Words
    progress: Words


class Rows(NamedTuple):
    """The rows of prompts that are read while they are computed.

    Attributes:
        headers: uint64 `[rows, 2]`.
        ids: uint32 `[rows, ids]`, whole pages.
    """

    headers: Words
    ids: npt.NDArray[np.uint32]


def slots_of(worker: FerryWorker) -> Slots:
    table = worker.description.lease_table
    words = (
        _memory_at(table.address, 2 * 8 * table.slots).view(np.uint64).reshape(-1, 2)
    )
    return Slots(words[:, 0], words[:, 1])


def rows_of(worker: FerryWorker) -> Rows:
    """Of a worker that has rows."""
    rows = worker.description.stream_rows
    assert rows is not None
    row_ids = rows.pages * PAGE_IDS
    headers = _memory_at(rows.headers, 2 * 8 * rows.rows).view(np.uint64)
    ids = _memory_at(rows.ids, 4 * row_ids * rows.rows).view(np.uint32)
    return Rows(headers.reshape(-1, 2), ids.reshape(-1, row_ids))


def _memory_at(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """It is the worker's: the test keeps the worker for as long."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
