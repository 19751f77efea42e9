"""The brute-force model itself, on numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry.protocol.geometry import Format, Interleave, PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription
from tests.geometry.cells import Cells, Memory, byte_addresses, byte_names, cells_of, spell, token_of
from tests.geometry.drawn import Drawn
from tests.geometry.effects import CopyList, check_copies, number_names, produced, wanted
from tests.geometry.feasibility import feasible
from tests.geometry.handmade import attention, latent, pair, side
from tests.geometry.models import Model
from tests.geometry.requests import Request
from tests.geometry.shards import split_heads

TENSOR = PagedTensor(
    layer="layers.0",
    kind="k",
    group=0,
    base=1000,
    blocks=4,
    block_tokens=4,
    block_stride=100,
    heads=Range(2, 4),
    head_stride=40,
    tile_tokens=2,
    tile_stride=16,
    cell_bytes=4,
    format=Format(dtype="bfloat16"),
)


def test_slots_of_a_rank_hold_the_tokens_of_its_runs() -> None:
    tokens = token_of(np.arange(8), Interleave(ranks=2, rank=1, run_tokens=4))
    assert tokens.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


def test_a_byte_is_where_the_definition_says() -> None:
    cell = Cells(np.array([3]), np.array([1]), np.array([[6, 7]]))
    assert byte_addresses(TENSOR, cell)[0, 1].tolist() == [1356, 1357, 1358, 1359]
    apart = msgspec.structs.replace(TENSOR, element_bytes=2, element_stride=10)
    assert byte_addresses(apart, cell)[0, 1].tolist() == [1356, 1357, 1366, 1367]


def test_a_byte_is_called_what_it_is() -> None:
    numbers = {("layers.0", "k"): 7}
    names = byte_names(TENSOR, Cells(np.array([3]), np.array([1]), np.array([[6, 7]])), numbers)
    assert spell(int(names[0, 1, 2]), numbers) == "layers.0/k head 3 tokens 6…7 byte 2"


def test_null_blocks_have_no_cells_and_the_others_keep_their_tokens() -> None:
    cells = cells_of(TENSOR, "full", [0, 1], leading=2, block_tokens=8)
    assert cells.blocks.tolist() == [2, 2, 3, 3]
    assert cells.tiles.tolist() == [0, 1, 0, 1]
    assert cells.tokens.tolist() == [[24, 25], [26, 27], [28, 29], [30, 31]]


@pytest.mark.parametrize(
    ("heads", "ranks", "rule", "expected"),
    [
        (5, 2, "even", [(0, 3), (3, 5)]),
        (2, 3, "even", [(0, 1), (0, 1), (1, 2)]),
        (2, 3, "ceil", [(0, 1), (1, 2), (2, 2)]),
        (5, 4, "ceil", [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (6, 2, "overlap", [(0, 4), (2, 6)]),
    ],
)
def test_heads_are_split_as_the_examples_say(
    heads: int, ranks: int, rule: str, expected: list[tuple[int, int]]
) -> None:
    found = [split_heads(heads, ranks, rank, rule) for rank in range(ranks)]
    assert [(one.start, one.stop) for one in found] == expected


def test_memory_refuses_what_lies_outside_of_it() -> None:
    memory = Memory([5000, 1000], [10, 20])
    assert memory.index(np.array([1000, 1019, 5000, 5009])).tolist() == [0, 19, 20, 29]
    for address in (999, 1020, 4999, 5010):
        with pytest.raises(IndexError):
            memory.index(np.array([address]))


def one_layer() -> Drawn:
    """Two engines of one worker, blocks of 4 tokens; the request's block is 3 on the producer and 2 on the consumer."""
    model = attention(layers=1, heads=1, size=2)
    return Drawn(pair(model, side(model, block=4, blocks=4), side(model, block=4, blocks=3), tokens=3))


def check(case: Drawn, copies: list[tuple[int, int, int]]) -> None:
    """Check copies given as `(producer, consumer, bytes)`, counted from the first byte of either cache."""
    consumer, producer = case.consumer, case.producer
    numbers = number_names(consumer.description)
    ours, theirs = (x.description.workers[0].tensors for x in (consumer, producer))
    starts = [min(tensor.base for tensor in tensors) for tensors in (theirs, ours)]
    src, dst, sizes = (np.array(column, np.int64) for column in zip(*copies, strict=True))
    check_copies(
        [CopyList(0, src + starts[0], dst + starts[1], sizes)],
        [produced(theirs, producer.description.groups, producer.memories()[0], case.request, numbers)],
        producer.memories(),
        wanted(ours, consumer.description.groups, consumer.memories()[0], case.request, numbers),
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
        ([(96, 64, 24), (96, 64, 1)], "token 0 byte 0 is not written exactly once; 1 bytes"),
        ([(96, 64, 24), (120, 88, 8), (120, 88, 8)], "a byte is written twice"),
        ([(104, 64, 24)], "where layers.0/k head 0 token 0 byte 0 belongs is layers.0/k head 0 token 1 byte 0"),
        ([(100, 64, 24)], "where layers.0/k head 0 token 0 byte 0 belongs is layers.0/v head 0 token 0 byte 0"),
        ([(96, 64, 24), (96, 56, 8)], "8 bytes of others are written"),
        ([(96, 64, 24), (96, 96, 8)], "8 bytes of others are written"),
        ([(88, 56, 40)], "bytes are read that are not the request's"),
        ([(96, 64, 24), (128, 88, 8)], "bytes are read that are not the request's"),
    ],
)
def test_every_wrong_copy_is_seen(copies: list[tuple[int, int, int]], says: str) -> None:
    case = one_layer()
    with pytest.raises(AssertionError) as seen:
        check(case, copies)
    assert says in str(seen.value)


def test_what_is_here_already_must_not_be_written() -> None:
    model = attention(layers=1, heads=1, size=2)
    there, here = side(model, block=4, blocks=4), side(model, block=2, blocks=4)
    case = Drawn(pair(model, there, here, tokens=3, first=2))
    assert case.request == Request(((3, 2),), ((3,),), 2, 3, 3)
    check(case, [(112, 32, 8)])
    with pytest.raises(AssertionError, match="16 bytes of others"):
        check(case, [(112, 32, 8), (96, 48, 16)])


def pair_of(model: Model, producer: dict[str, int], consumer: dict[str, int]) -> tuple[EngineDescription, ...]:
    made = Drawn(pair(model, side(model, **producer), side(model, **consumer), tokens=8))  # type: ignore[arg-type]
    return made.consumer.description, made.producer.description


def in_cells_of(model: Model, tile_tokens: int) -> Model:
    return replace(model, groups=tuple(replace(group, tile_tokens=tile_tokens) for group in model.groups))


@pytest.mark.parametrize(
    ("tile_tokens", "producer", "consumer", "expected"),
    [
        (1, {"tp": 3}, {"tp": 2}, True),
        (1, {"tp": 3, "dcp": 3, "run": 2}, {"tp": 2, "dcp": 2, "run": 4}, True),
        (4, {"block": 16}, {"block": 24}, True),
        (4, {}, {"tp": 2, "dcp": 2, "run": 4}, True),
        (4, {}, {"tp": 2, "dcp": 2, "run": 2}, False),
        (4, {"tp": 2, "dcp": 2, "run": 2}, {"tp": 2, "dcp": 2, "run": 2}, True),
        (4, {"tp": 4, "dcp": 4, "run": 2}, {"tp": 2, "dcp": 2, "run": 2}, False),
    ],
)
def test_cells_of_several_tokens_go_only_where_the_same_tokens_are_together(
    tile_tokens: int, producer: dict[str, int], consumer: dict[str, int], expected: bool
) -> None:
    assert feasible(*pair_of(in_cells_of(latent(), tile_tokens), producer, consumer)) is expected


def test_every_head_must_be_somewhere() -> None:
    consumer, producer = pair_of(attention(heads=4), {"tp": 2}, {"tp": 1})
    assert feasible(consumer, producer)
    assert not feasible(consumer, msgspec.structs.replace(producer, workers=producer.workers[:1]))
    assert feasible(producer, consumer)
