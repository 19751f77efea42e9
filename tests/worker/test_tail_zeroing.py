"""The zeroed bytes of loaded blocks: those after the last token and before the window, and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.blocks import Gap, RequestBlocks, UnitPairs, gaps, pair_units
from kvferry.plan.tokens import TokenMap, TokenSide
from kvferry.protocol.geometry import Interleave
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import HOST, Device, DeviceMark
from kvferry.worker.loads.load import TailZeroing
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.wave_table import WaveTable
from kvferry.worker.staging.buffer import relayout_for
from tests.fakes.cuda import FakeCuda
from tests.fakes.cuda_memory import kernels
from tests.harness.caches import CacheShape, ToyCaches

WARM_UP_BYTES = 1536
"""Size of the table with which the kernel is compiled."""


def loaded(
    group: CacheGroup, tokens: TokenMap, blocks: list[int], stop: int
) -> tuple[dict[TokenMap, UnitPairs], RequestBlocks]:
    request = RequestBlocks(
        local=[blocks], remote=[blocks], first_token=0, stop_token=stop, num_tokens=stop
    )
    return {tokens: pair_units(tokens, group, group, request)}, request


def zero(
    tail_zeroing: TailZeroing, shape: CacheShape, blocks: list[int], stop: int
) -> DeviceMark | None:
    """Zero what these blocks hold after the last token; both sides have the same blocks."""
    side = TokenSide(shape.block_tokens, shape.blocks, Interleave())
    units, request = loaded(
        shape.group, TokenMap(0, shape.block_tokens, side, side), blocks, stop
    )
    return tail_zeroing.zero(units, (shape.group,), request)


@st.composite
def shapes(draw: st.DrawFn) -> CacheShape:
    tile_tokens = draw(st.sampled_from((1, 1, 2)))
    return CacheShape(
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        blocks=draw(st.integers(2, 6)),
        block_tokens=tile_tokens * draw(st.integers(1, 4)),
        tile_tokens=tile_tokens,
        cell_bytes=draw(st.integers(1, 9)),
        axes="".join(draw(st.permutations("bht"))),
        gap_bytes=draw(st.sampled_from((0, 0, 5))),
        one_storage=draw(st.booleans()),
    )


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeCuda]:
    """A device whose kernel runs in numpy, with exactly the room for a table that `room_for` computes."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patched, kernels():
        patched.setattr(
            "kvferry.worker.relayout.triton_relayout._MIN_TABLE_BYTES", WARM_UP_BYTES
        )
        yield FakeCuda()


@given(shape=shapes(), draw=st.data())
def test_exactly_the_cells_after_the_last_token_are_zeroed_in_every_tensor(
    shape: CacheShape, draw: st.DataObject
) -> None:
    check_the_tail(shape, draw, HOST)


@given(shape=shapes(), draw=st.data())
def test_the_table_of_a_device_names_exactly_these_cells_and_has_room(
    shape: CacheShape, draw: st.DataObject
) -> None:
    with fake_gpu() as cuda:
        check_the_tail(shape, draw, cuda.device)


def test_there_is_room_for_the_table_of_a_window_and_a_tail() -> None:
    """The largest that there is: all cells of two blocks but one."""
    shape = CacheShape(
        layers=2, blocks=3, block_tokens=256, cell_bytes=15, one_storage=False
    )
    group = CacheGroup(policy="window", block_tokens=256, window_tokens=2)
    # The producer has given back all blocks of one token before token 255.
    tokens = TokenMap(
        0, 1, TokenSide(256, 3, Interleave()), TokenSide(1, 20, Interleave())
    )
    request = RequestBlocks(
        [[1, 2]], [[9, 10]], first_token=0, stop_token=257, num_tokens=257
    )
    there = CacheGroup(policy="window", block_tokens=1, window_tokens=2)
    units = {tokens: pair_units(tokens, group, there, request)}
    assert list(gaps(units, (group,), request)) == [
        Gap(0, 1, 0, 255),
        Gap(0, 2, 1, 256),
    ]
    with fake_gpu() as cuda:
        caches = ToyCaches(shape, 0xA5, cuda.device)
        assert TailZeroing(caches.kv).zero(units, (group,), request) is not None
    for layer in range(shape.layers):
        assert not caches.cells(layer)[1, :, :255].any()
        assert not caches.cells(layer)[2, :, 1:].any()
        assert (caches.cells(layer)[1, :, 255] == 0xA5).all()


def check_the_tail(shape: CacheShape, draw: st.DataObject, device: Device) -> None:
    caches = ToyCaches(shape, 0xA5, device)
    stop = draw.draw(
        st.integers(1, (shape.blocks - 1) * shape.block_tokens), label="stop"
    )
    count = -(-stop // shape.block_tokens)
    blocks = list(
        draw.draw(st.permutations(range(1, shape.blocks)), label="blocks")[:count]
    )
    last, used = (
        blocks[-1],
        -(-(stop - (count - 1) * shape.block_tokens) // shape.tile_tokens),
    )
    expected = caches.snapshot()
    for layer in range(shape.layers):
        for head in range(shape.heads):
            for tile in range(used, shape.tiles):
                caches.cells(layer, expected)[last, head, tile] = 0
    mark = zero(TailZeroing(caches.kv), shape, blocks, stop)
    for found, wanted in zip(caches.memory, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    # On the host it is done when `zero` returns.
    assert (mark is None) == (used == shape.tiles or device is HOST)
    assert mark is None or mark.reached()


def test_what_lies_before_a_window_is_zeroed_and_what_lies_before_the_first_token_is_not() -> (
    None
):
    group = CacheGroup(policy="window", block_tokens=8, window_tokens=6)
    side, other = TokenSide(8, 9, Interleave()), TokenSide(2, 40, Interleave())
    tokens = TokenMap(0, 2, side, other)
    there = CacheGroup(policy="window", block_tokens=2, window_tokens=6)
    # 21 tokens; the producer has given back all blocks before token 14, the consumer's window begins in its block 1.
    request = RequestBlocks(
        [[0, 5, 6]], [[9, 10, 11, 12]], first_token=0, stop_token=21, num_tokens=21
    )
    units = {tokens: pair_units(tokens, group, there, request)}
    assert list(units[tokens].local_block) == [5, 6, 6, 6]
    assert list(gaps(units, (group,), request)) == [Gap(0, 5, 0, 6), Gap(0, 6, 5, 8)]
    partial = RequestBlocks(
        [[0, 5, 6]], [[9, 10, 11, 12]], first_token=12, stop_token=21, num_tokens=21
    )
    assert next(
        iter(
            gaps({tokens: pair_units(tokens, group, there, partial)}, (group,), partial)
        )
    ) == Gap(0, 5, 4, 6)


def test_the_tail_of_an_interleaved_rank_is_counted_in_its_own_slots() -> None:
    share = Interleave(ranks=2, rank=1, run_tokens=2)
    group = CacheGroup(policy="full", block_tokens=4)
    tokens = TokenMap(0, 4, TokenSide(4, 9, share), TokenSide(4, 9, share))
    # Of 13 tokens rank 1 holds 2, 3, 6, 7, 10, 11: six slots, two of them in its second block.
    units, request = loaded(group, tokens, [7, 3], 13)
    assert list(gaps(units, (group,), request)) == [Gap(0, 3, 2, 4)]


def test_a_tensor_outside_all_allocations_is_refused_by_name() -> None:
    caches = ToyCaches(CacheShape(layers=1), poison=0)
    astray = msgspec.structs.replace(
        caches.kv.tensors[0], base=caches.kv.tensors[0].base + 10**6
    )
    with pytest.raises(ValueError, match=r"layers\.0/kv"):
        TailZeroing(KvCaches(caches.kv.storages, (astray,), HOST))


class FullRelayout:
    """A relayout, of whose tables none is free while it is full."""

    def __init__(self, inner: Relayout) -> None:
        self._inner = inner
        self.is_full = True

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        if self.is_full:
            return None
        return self._inner.try_start(table)

    def mark(self) -> DeviceMark:
        return self._inner.mark()


def test_where_no_table_is_free_asking_the_mark_starts_the_zeroing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = CacheShape(layers=2)
    made: list[FullRelayout] = []

    def full(*parts: Any) -> FullRelayout:
        made.append(FullRelayout(relayout_for(*parts)))
        return made[-1]

    monkeypatch.setattr("kvferry.worker.loads.load.relayout_for", full)
    with fake_gpu() as cuda:
        caches = ToyCaches(shape, 0xA5, cuda.device)
        tail_zeroing = TailZeroing(caches.kv)
        (relayout,) = made
        cuda.calls = []
        mark = zero(tail_zeroing, shape, [3], 2)
        assert mark is not None
        assert not mark.reached()
        assert all((memory == 0xA5).all() for memory in caches.memory)
        relayout.is_full = False
        assert mark.reached()
        assert mark.reached()
    assert cuda.names().count("launch") == 1
    assert not any(caches.cells(layer)[3, :, 2:].any() for layer in range(shape.layers))


def test_groups_that_were_not_loaded_keep_their_bytes() -> None:
    shape = CacheShape(layers=2)
    caches = ToyCaches(shape, poison=0xA5)
    first, second = caches.kv.tensors
    kv = KvCaches(
        caches.kv.storages, (first, msgspec.structs.replace(second, group=1)), HOST
    )
    assert zero(TailZeroing(kv), shape, [3], 2) is None, "it is done already"
    assert not caches.cells(0)[3, :, 2:].any()
    assert (caches.memory[1] == 0xA5).all()


def test_layers_that_share_a_cache_are_zeroed_and_the_others_too() -> None:
    caches = ToyCaches(CacheShape(layers=3), poison=0xA5)
    first, second, third = caches.kv.tensors
    twin = msgspec.structs.replace(first, layer="layers.9")
    kv = KvCaches(caches.kv.storages, (first, twin, second, third), HOST)
    zero(TailZeroing(kv), CacheShape(layers=3), [3], 2)
    for layer in range(3):
        assert not caches.cells(layer)[3, :, 2:].any()
        assert (caches.cells(layer)[3, :, :2] == 0xA5).all()
