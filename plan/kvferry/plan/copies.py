"""Every single copy of a request, expanded from the descriptors for NIXL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvferry.plan.blocks import UnitPairs, descriptor_pairs
from kvferry.plan.descriptors import DescriptorTable, route_table
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Placing, Route


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of one route for one request.

    Attributes:
        src, dst: addresses on the producer's and on the consumer's worker, int64 `[n]`.
        num_bytes: int64 `[n]`.
        placing: how all of them are placed.
    """

    src: np.ndarray
    dst: np.ndarray
    num_bytes: np.ndarray
    placing: Placing


def route_copies(
    route: Route, units: Mapping[TokenMap, UnitPairs]
) -> tuple[Copies, ...]:
    """The copies of a route, one value per placing; staged copies go directly to their final place."""
    copies: list[Copies] = []
    for placing in Placing:
        table = route_table(route, 0, 0, placing)
        if table is not None:
            copies.append(_table_copies(table, units, placing))
    return tuple(copies)


def _table_copies(
    table: DescriptorTable, units: Mapping[TokenMap, UnitPairs], placing: Placing
) -> Copies:
    pairs = descriptor_pairs(table, units)
    dst, num_bytes = _addresses(table.local_rows, pairs.local)
    src, _ = _addresses(table.remote_rows, pairs.remote)
    return Copies(src, dst, num_bytes, placing)


def _addresses(rows: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Address and length of descriptors."""
    address, length, _, stride, count = rows.T
    # Descriptors are numbered row by row, `count` of each, `stride` apart.
    first_of_row = np.cumsum(count) - count
    row = np.searchsorted(first_of_row, indices, side="right") - 1
    number_in_row = indices - first_of_row[row]
    return address[row] + number_in_row * stride[row], length[row]
