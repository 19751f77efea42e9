"""The engine of a short form: the address of every byte, and the heads, layers and tokens of every worker."""

from __future__ import annotations

import itertools
import math
from collections import Counter

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
    cells = geometry.Cells(block, tile, tokens=tile[:, None])
    found = geometry.byte_addresses(one, cells)
    shape = (one.blocks, one.tiles, len(one.heads), one.cell_bytes)
    return found.reshape(shape).transpose(0, 2, 1, 3)


@given(short_forms())
@settings(max_examples=draws(150))
def test_every_drawn_form_is_a_valid_description_whose_bytes_fill_one_allocation_exactly(
    text: str,
) -> None:
    engine_json = engine(text)
    check_description(from_engine_json(engine_json))
    assert decode_engine_json(encode_engine_json(engine_json)) == engine_json
    for worker in engine_json.workers:
        addresses = np.empty(0, np.int64)
        for one in worker.tensors:
            addresses = np.append(addresses, byte_addresses(one))
        assert np.array_equal(np.sort(addresses), np.arange(len(addresses)))


@given(short_forms())
@settings(max_examples=draws(100))
def test_every_head_of_every_layer_is_held_for_every_token_by_each_group_of_ranks(
    text: str,
) -> None:
    form = read_form(text)
    held: dict[tuple[str, str], Counter[tuple[int, int]]] = {}
    for worker in engine(text).workers:
        for one in worker.tensors:
            share = one.interleave
            assert share.rank == (worker.place.dcp if share.ranks > 1 else 0)
            for head in range(one.heads.start, one.heads.stop):
                held.setdefault(one.name, Counter())[head, share.rank] += 1
    for name, cells in held.items():
        is_state = name[1].startswith(("ssm", "conv"))
        ranks = range(1 if is_state else form.dcp)
        heads = range(max(head for head, _ in cells) + 1)
        assert set(cells) == set(itertools.product(heads, ranks)), name
    for layer in form.full_layers:
        kind = "mla" if form.mla else "k"
        cells = held[f"model.layers.{layer}.self_attn.attn", kind]
        assert {head for head, _ in cells} == set(range(1 if form.mla else form.heads))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "CPU"])
@pytest.mark.parametrize("kv", ["packed", "apart"])
def test_a_layouts_name_is_the_order_of_its_axes(layout: str, kv: str) -> None:
    """The oracle is numpy: an array with the axes in the name's order and consecutive values."""
    sizes = {"L": 3, "B": 4, "H": 2, "N": 5, "C": 8 * 2 * (2 if kv == "packed" else 1)}
    order = LAYOUTS[layout]
    whole = np.arange(math.prod(sizes.values())).reshape([sizes[a] for a in order])
    cells = np.transpose(whole, [order.index(axis) for axis in "LBHNC"])
    form = f"layers=3,heads=2,dim=8,block=5,blocks=4,layout={layout},kv={kv}"
    (worker,) = engine(form).workers
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.attn"
        k = byte_addresses(tensor(worker, "k", name))
        v = byte_addresses(tensor(worker, "v", name))
        if kv == "packed":
            assert np.array_equal(np.concatenate([k, v], axis=3), cells[layer])
        else:
            assert np.array_equal(k, cells[layer])
            assert np.array_equal(v, cells[layer] + whole.size)


def test_on_the_cpu_k_lies_by_elements_and_v_by_tokens() -> None:
    form = "layers=1,heads=2,dim=3,block=4,blocks=2,layout=CPU,dtype=bfloat16"
    (worker,) = engine(form).workers
    # By block, head, K or V, and byte.
    cells = np.arange(2 * 2 * 2 * 24).reshape(2, 2, 2, 24)
    by_element = cells[:, :, 0].reshape(2, 2, 3, 4, 2)
    k = by_element.transpose(0, 1, 3, 2, 4).reshape(2, 2, 4, 6)
    v = cells[:, :, 1].reshape(2, 2, 4, 6)
    assert np.array_equal(byte_addresses(tensor(worker, "k")), k)
    assert np.array_equal(byte_addresses(tensor(worker, "v")), v)
    assert worker.memory == "DRAM"


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_convolution_state_has_its_channels_innermost_or_outermost(
    layout: str,
) -> None:
    form = (
        "layers=1,state_layers=0,conv=x4+B2*,conv_width=3,tp=2,blocks=2,dtype=float32"
    )
    # By block, element of the page, and byte. A rank has 2 channels of x and 2 of B.
    page = np.arange(2 * 12 * 4).reshape(2, 12, 4)
    grid = page.reshape(2, 4, 3, 4)
    if layout == "SD":
        grid = page.reshape(2, 3, 4, 4).transpose(0, 2, 1, 3)
    channels = grid.reshape(2, 4, 1, 12)
    for worker in engine(f"{form},conv_layout={layout}").workers:
        x, b = (tensor(worker, f"conv.{name}", "model.layers.0.mixer") for name in "xB")
        assert np.array_equal(byte_addresses(x), channels[:, :2])
        assert np.array_equal(byte_addresses(b), channels[:, 2:])
        first = 2 * worker.place.tp
        assert (x.heads, b.heads) == (Range(first, first + 2), Range(0, 2))


def test_context_parallel_ranks_span_prefill_ranks_before_tensor_parallel_ones() -> (
    None
):
    workers = engine("layers=1,heads=2,dim=8,tp=2,pcp=2,dcp=2").workers
    places = [(at.pcp, at.tp, at.dcp) for at in (worker.place for worker in workers)]
    assert places == [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)]
    heads = [tensor(worker, "k").heads.start for worker in workers]
    assert heads == [0, 1, 0, 1]


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
