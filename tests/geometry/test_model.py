"""The brute-force model itself, on numbers that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.geometry.drawn import Drawn
from tests.geometry.effects import (
    CopyList,
    check_copies,
    number_names,
    produced,
    wanted,
)
from tests.geometry.handmade import attention, pair, side


def one_layer() -> Drawn:
    """Two engines of one worker, blocks of 4 tokens; the request's block is 3 on the producer and 2 on the consumer."""
    model = attention(layers=1, heads=1, size=2)
    return Drawn(
        pair(
            model,
            side(model, block=4, blocks=4),
            side(model, block=4, blocks=3),
            tokens=3,
        )
    )


def check(case: Drawn, copies: list[tuple[int, int, int]]) -> None:
    """Check copies given as `(producer, consumer, bytes)`, counted from the first byte of either cache."""
    consumer, producer = case.consumer, case.producer
    numbers = number_names(consumer.description)
    ours, theirs = (x.description.workers[0].tensors for x in (consumer, producer))
    starts = [min(tensor.base for tensor in tensors) for tensors in (theirs, ours)]
    src, dst, sizes = (
        np.array(column, np.int64) for column in zip(*copies, strict=True)
    )
    check_copies(
        [CopyList(0, src + starts[0], dst + starts[1], sizes)],
        [
            produced(
                theirs,
                producer.description.groups,
                producer.memories()[0],
                case.request,
                numbers,
            )
        ],
        producer.memories(),
        wanted(
            ours,
            consumer.description.groups,
            consumer.memories()[0],
            case.request,
            numbers,
        ),
        consumer.memories()[0],
        numbers,
    )


def test_the_right_copies_pass() -> None:
    """A block is 32 bytes: 4 tokens of K and V, 4 bytes each."""
    case = one_layer()
    check(case, [(96, 64, 24)])
    check(case, [(96, 64, 32)])
    check(case, [(96, 64, 8), (104, 72, 16)])


@pytest.mark.parametrize(
    ("copies", "says"),
    [
        ([(96, 64, 16)], "token 2 byte 0 is not written exactly once; 8 bytes in all"),
        (
            [(96, 64, 24), (96, 64, 1)],
            "token 0 byte 0 is not written exactly once; 1 bytes",
        ),
        ([(96, 64, 24), (120, 88, 8), (120, 88, 8)], "a byte is written twice"),
        (
            [(104, 64, 24)],
            "where layers.0/k head 0 token 0 byte 0 belongs is layers.0/k head 0 token 1 byte 0",
        ),
        (
            [(100, 64, 24)],
            "where layers.0/k head 0 token 0 byte 0 belongs is layers.0/v head 0 token 0 byte 0",
        ),
        ([(96, 64, 24), (96, 56, 8)], "8 bytes of others are written"),
        ([(96, 64, 24), (96, 96, 8)], "8 bytes of others are written"),
        ([(88, 56, 40)], "bytes are read that are not the request's"),
        ([(96, 64, 24), (128, 88, 8)], "bytes are read that are not the request's"),
    ],
)
def test_every_wrong_copy_is_seen(
    copies: list[tuple[int, int, int]], says: str
) -> None:
    case = one_layer()
    with pytest.raises(AssertionError) as seen:
        check(case, copies)
    assert says in str(seen.value)
