"""Descriptions that contradict themselves are refused before any arithmetic believes them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusal import PlanRefused
from kvferry.plan.validity import check_description
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import Place, Range
from kvferry.protocol.handshake import EngineDescription, decode_reply, encode
from tests.plan.samples import engine, tensor, worker

LAYER = "workers[0].layers.0/kv"


def test_an_honest_description_passes() -> None:
    check_description(engine(workers=[worker(place=Place(tp=0)), worker(place=Place(tp=1))]))


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (engine(workers=[worker(), worker()]), "workers"),
        (engine(tensor(), tensor(base=1 << 20)), "workers[0].tensors"),
        (engine(tensor(group=1)), f"{LAYER}.group"),
        (engine(tensor(heads=Range(2, 2))), f"{LAYER}.heads"),
        (engine(tensor(heads=Range(5, 2))), f"{LAYER}.heads"),
        (engine(tensor(tile_tokens=3)), f"{LAYER}.tile_tokens"),
        (engine(tensor(tile_tokens=8)), f"{LAYER}.tile_tokens"),
        (engine(tensor(heads=Range(0, 1 << 19))), f"{LAYER}.heads"),
        (engine(tensor(block_tokens=3)), f"{LAYER}.block_tokens"),
        (engine(tensor(block_tokens=8)), f"{LAYER}.block_tokens"),
        (engine(tensor(base=2**63 - 64)), f"{LAYER}.base"),
        (engine(tensor(blocks=1 << 40, block_stride=(1 << 48) - 1)), f"{LAYER}.base"),
        (engine(tensor(heads=Range(0, 1 << 17), head_stride=(1 << 48) - 1)), f"{LAYER}.base"),
        (engine(workers=[worker(place=Place(tp=0)), worker([tensor(group=7)], Place(tp=1))]), "workers[1]"),
        (engine(tensor(), tensor(layer="layers.1", blocks=7)), "workers[0].layers.1/kv.blocks"),
        (engine(tensor(), tensor(layer="layers.1", block_tokens=2)), "workers[0].layers.1/kv.blocks"),
    ],
)
def test_a_contradiction_is_refused_by_the_name_of_its_field(broken: EngineDescription, field: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        check_description(broken)
    assert refused.value.field.startswith(field)


def test_a_tensor_that_ends_at_the_last_address_passes() -> None:
    check_description(engine(tensor(base=2**63 - 8 * 64)))


def test_two_states_of_one_layer_are_two_tensors() -> None:
    check_description(engine(tensor(kind="k"), tensor(kind="v")))


_INTEGERS = st.one_of(st.integers(0, 9), st.integers(0, 2**63), st.sampled_from([2**n for n in (16, 20, 31, 40, 48)]))
_PLACES = {
    "base": 2**63 - 1,
    "blocks": 2**40,
    "block_stride": 2**48 - 1,
    "head_stride": 2**48 - 1,
    "tile_stride": 2**48,
}
_SIZES = ("group", "block_tokens", "tile_tokens", "cell_bytes")
_ELSEWHERE = st.fixed_dictionaries(
    {}, optional={name: st.one_of(st.just(most), st.integers(0, most)) for name, most in _PLACES.items()}
)
_ANYTHING = st.dictionaries(st.sampled_from((*_PLACES, *_SIZES)), _INTEGERS, max_size=4)


@given(st.one_of(_ELSEWHERE, _ANYTHING), st.one_of(st.just((0, 2)), st.tuples(_INTEGERS, _INTEGERS)))
def test_any_numbers_are_planned_or_refused_and_nothing_else_happens(
    numbers: dict[str, Any], heads: tuple[int, int]
) -> None:
    """Whatever passes the decoder, from the frame on: no overflow, no crash, no numbers that wrap around."""
    ours = engine(engine_id="D")
    frame = encode(engine(tensor(heads=Range(*heads), **numbers)))
    try:
        theirs = decode_reply(frame)
        assert isinstance(theirs, EngineDescription)
        plan = plan_transfer(ours, 0, theirs)
    except (InvalidMessage, PlanRefused):
        return
    for item in plan.routes[0].slices:
        remote = item.remote
        for run in item.runs:
            last = remote.base + (remote.blocks - 1) * remote.block_stride + run.remote_offset + run.length
            assert run.remote_offset >= 0
            assert last <= 2**63
