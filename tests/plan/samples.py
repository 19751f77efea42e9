"""Descriptions of small engines, and paged tensors with any strides whose cells do not overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from kvferry.plan.tokens import TokenMap
from kvferry.protocol.geometry import (
    Format,
    Interleave,
    PagedTensor,
    Place,
    Range,
    Topology,
)
from kvferry.protocol.handshake import (
    CacheGroup,
    EngineDescription,
    LeaseTableAddress,
    ModelFacts,
    WorkerDescription,
)

FACTS = ModelFacts(
    model="toy",
    fingerprint="weights:1",
    dtype="bfloat16",
    cache_dtype="bfloat16",
    quantization="none",
    max_model_tokens=512,
)


def tensor(**changed: Any) -> PagedTensor:
    """Two heads of four tokens a block, heads outermost, one token a cell."""
    usual: dict[str, Any] = {
        "layer": "layers.0",
        "kind": "kv",
        "group": 0,
        "base": 4096,
        "blocks": 8,
        "block_tokens": 4,
        "block_stride": 64,
        "heads": Range(0, 2),
        "head_stride": 32,
        "tile_tokens": 1,
        "tile_stride": 8,
        "cell_bytes": 8,
        "format": Format(dtype="bfloat16", packing="k|v"),
    }
    return PagedTensor(**{**usual, **changed})


def worker(
    tensors: Sequence[PagedTensor] = (), place: Place | None = None
) -> WorkerDescription:
    return WorkerDescription(
        place=place or Place(),
        agent="agent",
        agent_metadata=b"metadata",
        memory="DRAM",
        device=0,
        lease_table=LeaseTableAddress(address=1 << 20, slots=16),
        tensors=tuple(tensors) or (tensor(),),
    )


def engine(
    *tensors: PagedTensor,
    workers: Sequence[WorkerDescription] = (),
    engine_id: str = "P",
    **changed: Any,
) -> EngineDescription:
    usual: dict[str, Any] = {
        "engine_id": engine_id,
        "boot": "0" * 32,
        "mac_key": b"k" * 32,
        "facts": FACTS,
        "topology": Topology(),
        "groups": (CacheGroup(policy="full", block_tokens=4),),
        "workers": tuple(workers) or (worker(tensors),),
    }
    return EngineDescription(**{**usual, **changed})


def other(value: Any, **changed: Any) -> Any:
    """The value with fields changed."""
    return msgspec.structs.replace(value, **changed)


@st.composite
def strides(
    draw: st.DrawFn,
    sizes: Sequence[int],
    cell_bytes: int,
    gaps: Sequence[int] = (0, 0, 0, 8),
) -> list[int]:
    """Strides of an array with these sizes in any order of its axes, dense or with gaps, whose cells do not overlap."""
    found = [0] * len(sizes)
    step = cell_bytes
    for axis in draw(st.permutations(range(len(sizes)))):
        step += draw(st.sampled_from(gaps))
        found[axis] = step
        step *= sizes[axis]
    return found


def tokens_of(share: Interleave, count: int) -> list[int]:
    """The tokens below `count` that a rank holds, in the order of its slots: runs are dealt out like cards."""
    return [
        token
        for token in range(count)
        if token // share.run_tokens % share.ranks == share.rank
    ]


def span(of: PagedTensor) -> int:
    """Bytes from the tensor's base to behind the last of its last block."""
    return (of.blocks - 1) * of.block_stride + of.block_extent


def cell_address(of: PagedTensor, block: int, head: int, tile: int) -> int:
    """The definition: everything else in the plan is compared with it. `head` counts the worker's own heads."""
    return (
        of.base
        + block * of.block_stride
        + head * of.head_stride
        + tile * of.tile_stride
    )


def cell_bytes(of: PagedTensor, block: int, head: int, tile: int) -> Iterator[int]:
    """The address of every byte of a cell, in the order of its bytes."""
    start = cell_address(of, block, head, tile)
    for byte in range(of.cell_bytes):
        piece, inside = divmod(byte, of.element_bytes or of.cell_bytes)
        yield start + piece * of.element_stride + inside


def unit_bytes(
    of: PagedTensor, tokens: TokenMap, heads: Range, block: int, position: int
) -> Iterator[int]:
    """The address of every byte of a unit, head by head, token by token, by the definition."""
    tiles = of.tiles if tokens.is_state else tokens.unit_tokens // of.tile_tokens
    for head in range(heads.start - of.heads.start, heads.stop - of.heads.start):
        for tile in range(position * tiles, (position + 1) * tiles):
            yield from cell_bytes(of, block, head, tile)
