"""Where the bytes of staged reads are put, whatever the producer says of its cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_transfer
from kvferry.plan.runs import grid
from kvferry.plan.staged_layout import Placement, StagedSource
from kvferry.protocol.geometry import PagedTensor, Range
from tests.plan.samples import engine, tensor, unit_bytes

EVERYTHING_STAGED = Costs(reaches_caches=False)


def run_addresses(source: StagedSource) -> list[int]:
    """The producer's address of each run, which fills one chunk of the pool."""
    axes = source.bundle.axes
    addresses: list[int] = []
    for _, base in source.bundle.bases:
        for numbers in grid([axis.steps for axis in axes]).T.tolist():
            steps = zip(numbers, axes, strict=True)
            addresses.append(base + sum(n * axis.remote_stride for n, axis in steps))
    return addresses


def places(placement: Placement) -> Iterator[tuple[int, int, int]]:
    """Of every byte its run, its place in the run's chunk, and its address in the cache."""
    for piece in placement.pieces:
        for numbers in grid([axis.steps for axis in placement.axes]).T.tolist():
            in_chunk = piece.offset
            address = piece.local_base
            for number, axis in zip(numbers, placement.axes, strict=True):
                in_chunk += number * axis.remote_stride
                address += number * axis.local_stride
            for byte in range(placement.run):
                yield piece.run, in_chunk + byte, address + byte


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        pytest.param(
            tensor(heads=Range(0, 4), block_stride=128),
            tensor(heads=Range(0, 4), head_stride=16, tile_stride=16),
            id="token 1 of head 0 is token 0 of head 1",
        ),
        pytest.param(
            tensor(element_bytes=4, element_stride=64, block_stride=128),
            tensor(element_bytes=2, element_stride=0),
            id="all elements of a cell are one",
        ),
    ],
)
def test_cells_that_overlap_stay_in_their_chunks_and_in_their_places(
    local: PagedTensor, remote: PagedTensor
) -> None:
    plan = plan_transfer(
        engine(local, engine_id="C"), 0, engine(remote), EVERYTHING_STAGED
    )
    (source,) = plan.routes[0].sources
    runs = run_addresses(source)
    found: dict[int, int] = {}
    for placement in source.placements:
        for run, in_chunk, address in places(placement):
            assert in_chunk < source.bundle.run_bytes, "it is another run's chunk"
            found[address] = runs[run] + in_chunk
    here = unit_bytes(local, source.tokens, local.heads, 0, 0)
    there = unit_bytes(remote, source.tokens, local.heads, 0, 0)
    assert found == dict(zip(here, there, strict=True))
