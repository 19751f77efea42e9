"""Every single copy of a request, expanded from the descriptors for NIXL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.descriptors import DescriptorTable, descriptor_pairs, route_tables
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


def route_copies(route: Route, units: Mapping[TokenMap, UnitPairs]) -> tuple[Copies, ...]:
    """The copies of a route, one value per placing and table; staged copies go directly to their final place."""
    found = []
    for placing in Placing:
        for table in route_tables(route, 0, 0, placing):
            pairs = descriptor_pairs(table, units)
            found.append(Copies(*_expand(table, pairs.local, pairs.remote), placing))
    return tuple(found)


def _expand(
    table: DescriptorTable, local: np.ndarray, remote: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dst, lengths = _addresses(table.local_rows, local)
    src, _ = _addresses(table.remote_rows, remote)
    return src, dst, lengths


def _addresses(rows: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Address and length of descriptors: row by row, `count` of each, `stride` apart."""
    firsts = np.cumsum(rows[:, 4]) - rows[:, 4]
    row = np.searchsorted(firsts, indices, side="right") - 1
    return rows[row, 0] + (indices - firsts[row]) * rows[row, 3], rows[row, 1]
