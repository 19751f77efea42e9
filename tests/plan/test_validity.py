"""Descriptions that contradict themselves are refused before any arithmetic believes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.descriptors import route_table
from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import PlanRefused, check_description
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import Interleave, Place, Range
from kvferry.protocol.handshake import (
    CacheGroup,
    EngineDescription,
    decode_reply,
    encode,
)
from tests.plan.samples import engine, tensor, worker

LAYER = "workers[0].layers.0/kv"
HALF = Interleave(ranks=2, rank=1, run_tokens=2)


STATE, LONG_STATE = (
    CacheGroup(policy="state", block_tokens=tokens) for tokens in (4, 1 << 20)
)
HONEST = {
    "two ranks": engine(workers=[worker(place=Place(tp=0)), worker(place=Place(tp=1))]),
    "ends at the last address": engine(tensor(base=2**63 - 8 * 64)),
    "two states of a layer": engine(tensor(kind="k"), tensor(kind="v")),
    "holds no head": engine(tensor(heads=Range(2, 2))),
    "elements apart": engine(tensor(element_bytes=2, element_stride=64)),
    "a share of the tokens": engine(tensor(interleave=HALF)),
    "a scale per head": engine(tensor(scales=(0.5, 0.25))),
    "one scale": engine(tensor(scales=(0.5,))),
    "one rank's runs have no meaning": engine(
        tensor(), tensor(layer="layers.1", interleave=Interleave(run_tokens=7))
    ),
    "a state's block has no tokens": engine(
        tensor(block_tokens=7, tile_tokens=7),
        groups=(CacheGroup(policy="state", block_tokens=4),),
    ),
    "a state's table has one block for the longest sequence": engine(
        tensor(block_tokens=1),
        groups=(CacheGroup(policy="state", block_tokens=1 << 20),),
    ),
}


@pytest.mark.parametrize("honest", HONEST.values(), ids=HONEST.keys())
def test_an_honest_description_passes(honest: EngineDescription) -> None:
    check_description(honest)


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (engine(workers=[worker(), worker()]), "workers"),
        (engine(tensor(), tensor(base=1 << 20)), "workers[0].tensors"),
        (engine(tensor(group=1)), f"{LAYER}.group"),
        (engine(tensor(heads=Range(5, 2))), f"{LAYER}.heads"),
        (engine(tensor(tile_tokens=3)), f"{LAYER}.tile_tokens"),
        (engine(tensor(tile_tokens=8)), f"{LAYER}.tile_tokens"),
        (
            engine(tensor(interleave=Interleave(ranks=2, rank=2))),
            f"{LAYER}.interleave.rank",
        ),
        (
            engine(tensor(interleave=Interleave(ranks=2, run_tokens=3))),
            f"{LAYER}.interleave.run_tokens",
        ),
        (
            engine(tensor(interleave=Interleave(ranks=2, run_tokens=8))),
            f"{LAYER}.interleave.run_tokens",
        ),
        (engine(tensor(scales=(0.5, 0.5, 0.5))), f"{LAYER}.scales"),
        (engine(tensor(element_bytes=3)), f"{LAYER}.element_bytes"),
        (engine(tensor(element_bytes=16)), f"{LAYER}.element_bytes"),
        (engine(tensor(heads=Range(0, 1 << 23))), f"{LAYER}.heads"),
        (
            engine(tensor(cell_bytes=1 << 24, element_bytes=1, element_stride=1)),
            f"{LAYER}.heads",
        ),
        (engine(tensor(block_tokens=3)), f"{LAYER}.block_tokens"),
        (
            engine(tensor(), groups=(CacheGroup(policy="full", block_tokens=65540),)),
            "groups[0].block_tokens",
        ),
        (engine(tensor(block_tokens=8)), f"{LAYER}.block_tokens"),
        (engine(tensor(blocks=1 << 29)), f"{LAYER}.blocks"),
        (engine(tensor(base=2**63 - 64)), f"{LAYER}.base"),
        (engine(tensor(blocks=1 << 28, block_stride=(1 << 48) - 1)), f"{LAYER}.base"),
        (
            engine(tensor(heads=Range(0, 1 << 17), head_stride=(1 << 48) - 1)),
            f"{LAYER}.base",
        ),
        (
            engine(
                tensor(
                    base=2**62,
                    heads=Range(0, 1),
                    cell_bytes=1 << 17,
                    element_bytes=1,
                    element_stride=1 << 47,
                )
            ),
            f"{LAYER}.base",
        ),
        (
            engine(
                workers=[
                    worker(place=Place(tp=0)),
                    worker([tensor(group=7)], Place(tp=1)),
                ]
            ),
            "workers[1]",
        ),
        (
            engine(tensor(), tensor(layer="layers.1", blocks=7)),
            "workers[0].layers.1/kv.blocks",
        ),
        (
            engine(tensor(), tensor(layer="layers.1", block_tokens=2)),
            "workers[0].layers.1/kv.blocks",
        ),
        (
            engine(tensor(), tensor(layer="layers.1", interleave=HALF)),
            "workers[0].layers.1/kv.blocks",
        ),
    ],
)
def test_a_contradiction_is_refused_by_the_name_of_its_field(
    broken: EngineDescription, field: str
) -> None:
    with pytest.raises(InvalidMessage) as refused:
        check_description(broken)
    assert refused.value.field.startswith(field)


_INTEGERS = st.one_of(
    st.integers(0, 9),
    st.integers(0, 2**63),
    st.sampled_from([2**n for n in (16, 20, 31, 40, 48)]),
)
_PLACES = {
    "base": 2**63 - 1,
    "blocks": 2**40,
    "block_stride": 2**48 - 1,
    "head_stride": 2**48 - 1,
    "tile_stride": 2**48,
    "element_stride": 2**48 - 1,
}
_SIZES = ("group", "block_tokens", "tile_tokens", "cell_bytes", "element_bytes")
_ELSEWHERE = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(st.just(most), st.integers(0, most))
        for name, most in _PLACES.items()
    },
)
_ANYTHING = st.dictionaries(st.sampled_from((*_PLACES, *_SIZES)), _INTEGERS, max_size=4)


@given(
    st.one_of(_ELSEWHERE, _ANYTHING),
    st.one_of(st.just((0, 2)), st.tuples(_INTEGERS, _INTEGERS)),
    st.one_of(st.none(), st.tuples(_INTEGERS, _INTEGERS, _INTEGERS)),
)
def test_any_numbers_are_planned_or_refused_and_nothing_else_happens(
    numbers: dict[str, Any], heads: tuple[int, int], share: tuple[int, int, int] | None
) -> None:
    """Whatever passes the decoder, from the frame on: no overflow, no crash, no numbers that wrap around."""
    ours = engine(engine_id="D")
    interleave = (
        Interleave()
        if share is None
        else Interleave(ranks=share[0], rank=share[1], run_tokens=share[2])
    )
    frame = encode(
        engine(tensor(heads=Range(*heads), interleave=interleave, **numbers))
    )
    try:
        theirs = decode_reply(frame)
        assert isinstance(theirs, EngineDescription)
        plan = plan_transfer(ours, 0, theirs)
    except (InvalidMessage, PlanRefused):
        return
    for route in plan.routes:
        table = route_table(route, 0, 0)
        if table is None:
            continue
        for rows in (table.local_rows, table.remote_rows):
            first, length, stride, count = (
                rows[:, column].astype(object) for column in (0, 1, 3, 4)
            )
            assert (rows >= 0).all()
            assert max(first + stride * (count - 1) + length) <= 2**63
            assert int(count.sum()) < 1 << 31
        for index in table.indices:
            assert min(index.local_starts.min(), index.remote_starts.min()) >= 0
            assert np.int64(index.remote_starts.max()) < table.remote_rows[:, 4].sum()
