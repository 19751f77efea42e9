"""Three operations of the earlier design, as special cases; the expected results follow from their definitions.

The fourth, `copy_kv_blocks`, is the host buffer's: tests/worker/engines/test_host_buffer.py.

Caches are `[block, head, token, dim]` (HND) or `[block, token, head, dim]` (NHD); the elements are two bytes.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.worker.relayout.shape import Axis, Shape
from kvferry.worker.relayout.wave_table import WaveTable
from tests.worker.relayout.cases import Case
from tests.worker.relayout.runners import Runner

HEADS, DIM, ELEMENT = 3, 8, 2
POISON = 0x5A5A
Values = NDArray[np.uint16]


def received(tokens: int) -> Values:
    """The producer's values, `[token, head, dim]`."""
    return np.random.default_rng(tokens).integers(0, 0x5000, (tokens, HEADS, DIM)).astype(np.uint16)


def in_blocks(values: Values, block_tokens: int) -> Values:
    """As `[block, token, head, dim]`."""
    return values.reshape(-1, block_tokens, HEADS, DIM)


def strides(order: str, block_tokens: int) -> tuple[int, int]:
    """Bytes from head to head and from token to token."""
    cell = DIM * ELEMENT
    return (block_tokens * cell, cell) if order == "HND" else (cell, HEADS * cell)


def received_in(
    run: Runner, source: Values, remote: tuple[str, int], local: tuple[str, int], blocks: list[int]
) -> Values:
    """The local cache of 8 blocks after the relayout of a source in the remote order and block size."""
    (_, theirs), (order, ours) = remote, local
    unit = min(theirs, ours)
    here, there = strides(*remote), strides(*local)
    block_bytes = HEADS * DIM * ELEMENT
    shape = Shape.of(
        [Axis(HEADS, here[0], there[0]), Axis(unit, here[1], there[1])],
        DIM * ELEMENT,
        source_unit_stride=(theirs * block_bytes, unit * here[1]),
        destination_unit_stride=(ours * block_bytes, unit * there[1]),
    )
    starts = range(0, source.size // (HEADS * DIM), unit)
    units = [(t // theirs, t % theirs // unit, blocks[t // ours], t % ours // unit) for t in starts]
    table = WaveTable.of([shape], [(0, 0, 0, 0, len(units), 0)], units)
    cache = np.full(8 * ours * HEADS * DIM, POISON, dtype=np.uint16)
    found = run(Case(table, np.ascontiguousarray(source).reshape(-1).view(np.uint8), cache.view(np.uint8)))
    assert found.launches == 1
    sizes = (8, HEADS, ours, DIM) if order == "HND" else (8, ours, HEADS, DIM)
    return found.destination.view(np.uint16).reshape(sizes)


def in_order(values: Values, order: str, block_tokens: int) -> Values:
    blocks = in_blocks(values, block_tokens)
    return blocks.swapaxes(1, 2) if order == "HND" else blocks


@pytest.mark.parametrize(
    ("remote", "local", "blocks"),
    [
        (("HND", 12), ("HND", 4), [5, 1, 7, 0, 2, 3]),  # kv_postprocess_blksize_on_receive
        (("HND", 4), ("HND", 12), [6, 2]),
        (("HND", 4), ("NHD", 4), [4, 0, 6, 1, 2, 7]),  # kv_postprocess_layout_on_receive
        (("NHD", 4), ("HND", 4), [0, 1, 2, 3, 4, 5]),
        (("HND", 12), ("NHD", 4), [3, 0, 7, 2, 1, 5]),  # kv_postprocess_blksize_and_layout_on_receive
        (("NHD", 12), ("HND", 4), [3, 0, 7, 2, 1, 5]),
        (("HND", 4), ("NHD", 12), [4, 1]),
        (("NHD", 4), ("HND", 12), [4, 1]),
    ],
)
def test_another_block_size_and_another_order_on_receive(
    run: Runner, remote: tuple[str, int], local: tuple[str, int], blocks: list[int]
) -> None:
    """A remote block of 12 tokens is 3 local blocks of 4, and the other way round."""
    values = received(24)
    cache = received_in(run, in_order(values, *remote), remote, local, blocks)
    assert (cache[blocks] == in_order(values, *local)).all()
    others = [block for block in range(len(cache)) if block not in blocks]
    assert (cache[others] == POISON).all(), "no other block is touched"


def test_kv_postprocess_blksize_on_receive_of_a_block_that_is_not_full(run: Runner) -> None:
    """2 remote blocks of 4 tokens fill two thirds of a local block of 12; its last 4 tokens stay as they were."""
    values = received(8)
    cache = received_in(run, in_blocks(values, 4).swapaxes(1, 2), ("HND", 4), ("HND", 12), [6])
    assert (cache[6][:, :8] == values.swapaxes(0, 1)).all()
    assert (cache[6][:, 8:] == POISON).all()
