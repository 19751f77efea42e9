"""The engine of a short form: the address of every byte, and the heads, layers and tokens of every worker."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan.short_engine import engine_of_form
from kvferry.cli.plan.short_form import LAYOUTS
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import (
    EngineJson,
    WorkerJson,
    decode_engine_json,
    encode_engine_json,
    from_engine_json,
)
from kvferry.protocol.geometry import PagedTensor, Range
from tests.cli.plan.forms import read_form, short_forms
from tests.draws import draws
from tests.geometry import cells as geometry
from tests.geometry.cells import Ints


def engine(text: str) -> EngineJson:
    return engine_of_form(read_form(text), "producer")


def tensor(
    worker: WorkerJson, kind: str, layer: str = "model.layers.0.self_attn.attn"
) -> PagedTensor:
    (found,) = [one for one in worker.tensors if one.name == (layer, kind)]
    return found


def byte_addresses(one: PagedTensor) -> Ints:
    """Addresses of all bytes: int64, [blocks, heads, tiles, bytes]."""
    block, tile = (axis.ravel() for axis in np.indices((one.blocks, one.tiles)))
    found = geometry.byte_addresses(
        one, geometry.Cells(block, tile, tokens=tile[:, None])
    )
    return found.reshape(
        one.blocks, one.tiles, len(one.heads), one.cell_bytes
    ).transpose(0, 2, 1, 3)


@given(short_forms())
@settings(max_examples=draws(150))
def test_every_drawn_form_is_a_valid_description_whose_bytes_fill_one_allocation_exactly(
    text: str,
) -> None:
    engine_json = engine(text)
    check_description(from_engine_json(engine_json))
    assert decode_engine_json(encode_engine_json(engine_json)) == engine_json
    for worker in engine_json.workers:
        addresses = np.concatenate(
            [byte_addresses(one).ravel() for one in worker.tensors]
            or [np.empty(0, np.int64)]
        )
        assert np.array_equal(np.sort(addresses), np.arange(len(addresses)))


@given(short_forms())
@settings(max_examples=draws(100))
def test_every_head_of_every_layer_is_held_for_every_token_by_each_group_of_ranks(
    text: str,
) -> None:
    form, engine_json = read_form(text), engine(text)
    held: dict[tuple[str, str], Counter[tuple[int, int]]] = {}
    for worker, one in pairs_of(engine_json):
        assert one.interleave.rank == (
            worker.place.dcp if one.interleave.ranks > 1 else 0
        )
        for head in range(one.heads.start, one.heads.stop):
            held.setdefault(one.name, Counter())[head, one.interleave.rank] += 1
    for (name, kind), cells in held.items():
        is_state = kind == "ssm" or kind.startswith("conv")
        ranks = 1 if is_state else form.dcp
        heads = max(head for head, _ in cells) + 1
        assert set(cells) == set(itertools.product(range(heads), range(ranks))), (
            name,
            kind,
        )
    for layer in form.full_layers:
        kind = "mla" if form.mla else "k"
        cells = held[f"model.layers.{layer}.self_attn.attn", kind]
        assert {head for head, _ in cells} == set(range(1 if form.mla else form.heads))


def pairs_of(engine_json: EngineJson) -> Iterator[tuple[WorkerJson, PagedTensor]]:
    return ((worker, one) for worker in engine_json.workers for one in worker.tensors)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "CPU"])
@pytest.mark.parametrize("kv", ["packed", "apart"])
def test_a_layouts_name_is_the_order_of_its_axes(layout: str, kv: str) -> None:
    """The oracle is numpy: an array with the axes in the name's order and consecutive values."""
    sizes = {"L": 3, "B": 4, "H": 2, "N": 5, "C": 8 * 2 * (2 if kv == "packed" else 1)}
    order = LAYOUTS[layout]
    whole = np.arange(np.prod(list(sizes.values()))).reshape(
        [sizes[axis] for axis in order]
    )
    cells = np.transpose(whole, [order.index(axis) for axis in "LBHNC"])
    (worker,) = engine(
        f"layers=3,heads=2,dim=8,block=5,blocks=4,layout={layout},kv={kv}"
    ).workers
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.attn"
        k, v = (
            byte_addresses(tensor(worker, "k", name)),
            byte_addresses(tensor(worker, "v", name)),
        )
        if kv == "packed":
            assert np.array_equal(np.concatenate([k, v], axis=3), cells[layer])
        else:
            assert np.array_equal(k, cells[layer])
            assert np.array_equal(v, cells[layer] + whole.size)


def test_on_the_cpu_k_lies_by_elements_and_v_by_tokens() -> None:
    (worker,) = engine(
        "layers=1,heads=2,dim=3,block=4,blocks=2,layout=CPU,dtype=bfloat16"
    ).workers
    cells = np.arange(2 * 2 * 2 * 3 * 4 * 2).reshape(
        2, 2, 2, 24
    )  # block, head, K or V, bytes
    k = (
        cells[:, :, 0]
        .reshape(2, 2, 3, 4, 2)
        .transpose(0, 1, 3, 2, 4)
        .reshape(2, 2, 4, 6)
    )  # [dim, tokens] elements
    assert np.array_equal(byte_addresses(tensor(worker, "k")), k)
    assert np.array_equal(
        byte_addresses(tensor(worker, "v")), cells[:, :, 1].reshape(2, 2, 4, 6)
    )
    assert worker.memory == "DRAM"


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_convolution_state_has_its_channels_innermost_or_outermost(
    layout: str,
) -> None:
    text = f"layers=1,state_layers=0,conv=x4+B2*,conv_width=3,conv_layout={layout},tp=2,blocks=2,dtype=float32"
    engine_json = engine(text)
    page = np.arange(2 * 4 * 3 * 4).reshape(
        2, 12, 4
    )  # block, element of the page, byte; 2 of x and 2 of B on a rank
    grid = (
        page.reshape(2, 3, 4, 4).transpose(0, 2, 1, 3)
        if layout == "SD"
        else page.reshape(2, 4, 3, 4)
    )
    channels = grid.reshape(2, 4, 1, 12)
    for worker in engine_json.workers:
        x, b = (tensor(worker, f"conv.{name}", "model.layers.0.mixer") for name in "xB")
        assert np.array_equal(byte_addresses(x), channels[:, :2])
        assert np.array_equal(byte_addresses(b), channels[:, 2:])
        assert (x.heads, b.heads) == (
            Range(2 * worker.place.tp, 2 * worker.place.tp + 2),
            Range(0, 2),
        )


def test_context_parallel_ranks_span_the_prefill_ranks_before_the_tensor_parallel_ones() -> (
    None
):
    engine_json = engine("layers=1,heads=2,dim=8,tp=2,pcp=2,dcp=2")
    found = [
        (
            worker.place.pcp,
            worker.place.tp,
            worker.place.dcp,
            tensor(worker, "k").heads.start,
        )
        for worker in engine_json.workers
    ]
    assert found == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]


TOO_LARGE = {
    "layers=4096,heads=1,dim=1,tp=4096": "layers",
    "layers=1,heads=65536,dim=1,block=1024": "kernel_block",
    "layers=1,heads=8,dim=65536,block=1024,layout=CPU": "kernel_block",
    "layers=1,state_layers=0,conv=x999999,conv_width=4": "conv",
    "layers=4096,heads=128,dim=65536,blocks=134217727": "blocks",
    "layers=1,heads=1,dim=1,blocks=134217728,block=16": "blocks",
}


@pytest.mark.parametrize(
    ("text", "field"), TOO_LARGE.items(), ids=range(len(TOO_LARGE))
)
def test_an_engine_that_is_too_large_to_describe_is_refused_by_name(
    text: str, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        engine(text)
    assert refused.value.field == field
