"""The engine of a short form: one allocation per worker at address 0, strides from the layout.

In a worker's allocation the cache groups follow one another (full attention, window, states), each with its own blocks.
In vLLM they share the same bytes, which makes no difference to a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan.short_form import DTYPE_BYTES, LAYOUTS, ShortForm
from kvferry.protocol.description_json import EngineJson, WorkerJson
from kvferry.protocol.geometry import (
    Format,
    Interleave,
    PagedTensor,
    Place,
    Range,
    Topology,
)
from kvferry.protocol.handshake import MAX_ENGINE_TENSORS, CacheGroup, ModelFacts

# Placeholder for facts about weights and activations, which a short form does not have.
UNKNOWN_MODEL = "short form"

MAX_BLOCK_PIECES = 1 << 20
MAX_CACHE_TOKENS = 1 << 31
MAX_WORKER_BYTES = 1 << 47


class _Part(NamedTuple):
    """The part of a worker's allocation that one cache group has.

    Attributes:
        kinds: the tensors of its first layer, without name and group, from address 0 on.
        layer_stride: bytes from one layer to the next.
        num_bytes: of all layers.
    """

    kinds: Sequence[PagedTensor]
    layer_stride: int
    num_bytes: int


class _Group(NamedTuple):
    """A cache group of the engine.

    Attributes:
        layers, names: its layers of the model, and their names with {} for the number.
        part: what so many of them have on the worker at a place.
    """

    group: CacheGroup
    layers: Sequence[int]
    names: str
    part: Callable[[ShortForm, int, Place], _Part]


def engine_of_form(form: ShortForm, engine_id: str) -> EngineJson:
    """Describe the engine.

    Raises:
        InvalidArgument: it would be too large to describe; the text names the value and its limit.
    """
    _check_sizes(form)
    full = CacheGroup(policy="full", block_tokens=form.block)
    window = replace(full, policy="window", window_tokens=form.window)
    state = replace(full, policy="state")
    groups = [
        _Group(full, form.full_layers, form.names, _attention),
        _Group(window, form.window_layers, form.names, _attention),
        _Group(state, form.state_layers, form.state_names, _states),
    ]
    groups = [of_layers for of_layers in groups if of_layers.layers]
    # In the order in which an engine numbers its workers.
    places = []
    for pp, pcp, tp in product(range(form.pp), range(form.pcp), range(form.tp)):
        # A group of decode context parallel ranks spans the prefill ranks first, then the tensor-parallel ones.
        dcp = (tp * form.pcp + pcp) % form.dcp
        places.append(Place(pp=pp, pcp=pcp, tp=tp, dcp=dcp))
    return EngineJson(
        engine_id=engine_id,
        facts=ModelFacts(
            model=UNKNOWN_MODEL,
            fingerprint=UNKNOWN_MODEL,
            dtype=UNKNOWN_MODEL,
            cache_dtype=form.dtype,
            quantization="none",
            max_model_tokens=form.blocks * form.block,
        ),
        topology=Topology(pp=form.pp, pcp=form.pcp, tp=form.tp, dcp=form.dcp),
        groups=tuple(of_layers.group for of_layers in groups),
        workers=tuple(_worker(form, groups, place) for place in places),
    )


def _worker(form: ShortForm, groups: Sequence[_Group], place: Place) -> WorkerJson:
    first_layer = sum(form.stages[: place.pp])
    stage = range(first_layer, first_layer + form.stages[place.pp])
    tensors: list[PagedTensor] = []
    base = 0
    for index, of_layers in enumerate(groups):
        layers = [layer for layer in of_layers.layers if layer in stage]
        part = of_layers.part(form, len(layers), place)
        for position, layer in enumerate(layers):
            name = of_layers.names.format(layer)
            offset = base + position * part.layer_stride
            for kind in part.kinds:
                own_base = kind.base + offset
                tensors.append(replace(kind, layer=name, group=index, base=own_base))
        base += part.num_bytes
    if base > MAX_WORKER_BYTES:
        expected = f"fewer: a worker's cache has {base} bytes, more than 2**47"
        raise InvalidArgument("blocks", form.blocks, expected)
    # Only vLLM's attention on CPUs has this layout.
    memory = "DRAM" if form.layout == "CPU" else "VRAM"
    return WorkerJson(place=place, memory=memory, tensors=tuple(tensors))


def _attention(form: ShortForm, num_layers: int, place: Place) -> _Part:
    """The layers with attention of a worker."""
    item = DTYPE_BYTES[form.dtype]
    heads = Range(0, 1)
    if not form.mla:
        # The ranks of one context parallel group hold the same heads.
        span = max(1, form.dcp // form.pcp)
        heads = _heads_of_rank(form.heads, form.tp // span, place.tp // span)
    is_packed = form.kv == "packed" and not form.mla
    cell = (form.mla or form.dim) * item
    tokens = form.kernel_block
    sizes = {
        "L": num_layers,
        "B": form.blocks * (form.block // tokens),
        "H": len(heads),
        "N": tokens,
        "C": 2 * cell if is_packed else cell,
    }
    # The stride in bytes of each axis, from the innermost one, and at last the size of all.
    strides = {}
    total = 1
    for axis in reversed(LAYOUTS[form.layout]):
        strides[axis] = total
        total *= sizes[axis]
    interleave = Interleave()
    if form.dcp > 1:
        run_tokens = form.interleave
        interleave = Interleave(ranks=form.dcp, rank=place.dcp, run_tokens=run_tokens)
    k = PagedTensor(
        layer="",
        kind="mla" if form.mla else "k",
        group=0,
        base=0,
        blocks=sizes["B"],
        block_tokens=tokens,
        block_stride=strides["B"],
        heads=heads,
        head_stride=strides["H"],
        tile_tokens=1,
        tile_stride=strides["N"],
        cell_bytes=cell,
        interleave=interleave,
        **_format(form.dtype),
    )
    if form.mla:
        return _Part([k], strides["L"], total)
    v = replace(k, kind="v", base=cell)
    if form.layout == "CPU":
        # In a (block, head): K as [dim, tokens], behind it V as [tokens, dim].
        v = replace(v, base=tokens * cell, tile_stride=cell)
        k = replace(
            k, tile_stride=item, element_bytes=item, element_stride=tokens * item
        )
    elif not is_packed:
        v = replace(v, base=total)
        total *= 2
    return _Part([k, v], strides["L"], total)


def _states(form: ShortForm, num_layers: int, place: Place) -> _Part:
    """The recurrent layers of a worker: a page per layer and block, the convolution state before the temporal one."""
    item = DTYPE_BYTES[form.state_dtype]
    channels = {}
    for part in form.conv:
        ranks = 1 if part.replicated else form.tp
        channels[part.name] = _heads_of_rank(part.channels, ranks, place.tp % ranks)
    channel_bytes = form.conv_width * item
    conv_bytes = sum(map(len, channels.values())) * channel_bytes
    heads = Range(0, 0)
    if form.ssm:
        heads = _heads_of_rank(form.ssm[0], form.tp, place.tp)
    head_bytes = math.prod(form.ssm[1:]) * item
    page = conv_bytes + len(heads) * head_bytes
    ssm = PagedTensor(
        layer="",
        kind="ssm",
        group=0,
        base=conv_bytes,
        blocks=form.blocks,
        block_tokens=form.block,
        block_stride=page,
        heads=heads,
        head_stride=head_bytes,
        tile_tokens=form.block,
        tile_stride=0,
        cell_bytes=head_bytes,
        **_format(form.state_dtype),
    )
    conv = replace(ssm, head_stride=channel_bytes, cell_bytes=channel_bytes)
    if form.conv_layout == "SD" and form.conv_width > 1:
        # Channels innermost: the elements of one channel are apart.
        apart = conv_bytes // form.conv_width
        conv = replace(conv, head_stride=item, element_bytes=item, element_stride=apart)
    kinds = []
    base = 0
    for name, held in channels.items():
        kinds.append(replace(conv, kind=f"conv.{name}", base=base, heads=held))
        base += len(held) * conv.head_stride
    if form.ssm:
        kinds.append(ssm)
    layer_bytes = page * form.blocks
    return _Part(kinds, layer_bytes, layer_bytes * num_layers)


def _heads_of_rank(heads: int, ranks: int, rank: int) -> Range:
    """The heads of a rank: split evenly, the first ranks have one more; one each if there are more ranks than heads.

    Example: 5 heads on 2 ranks: [0, 3) and [3, 5). 2 heads on 4 ranks: [0, 1), [0, 1), [1, 2), [1, 2).
    """
    if ranks > heads:
        first = rank * heads // ranks
        return Range(first, first + 1)
    size, rest = divmod(heads, ranks)
    first = rank * size + min(rank, rest)
    return Range(first, first + size + (rank < rest))


def _format(dtype: str) -> dict[str, Any]:
    """The format and the scales of a tensor; the static scales of a float8 cache are always 1 in a short form."""
    if DTYPE_BYTES[dtype] > 1:
        return {"format": Format(dtype=dtype)}
    float8 = Format(dtype=dtype, quantization="fp8_per_tensor")
    return {"format": float8, "scales": (1.0,)}


def _check_sizes(form: ShortForm) -> None:
    """Check the sizes before anything is built: a few characters can ask for more tensors than memory has."""
    num_states = len(form.state_layers)
    of_attention = (form.layers - num_states) * (1 if form.mla else 2)
    of_states = num_states * (len(form.conv) + bool(form.ssm))
    tensors = form.pcp * form.tp * (of_attention + of_states)
    what = f"layers·tp·pcp makes {tensors} paged tensors"
    _check_size("layers", form.layers, tensors, MAX_ENGINE_TENSORS, what)
    tokens = form.blocks * form.block
    what = f"blocks·block is {tokens} tokens"
    _check_size("blocks", form.blocks, tokens, MAX_CACHE_TOKENS - 1, what)
    pieces = math.ceil(form.heads / form.tp) * form.kernel_block
    if form.layout == "CPU":
        # Every element of its K is a piece of its own.
        pieces *= form.dim
    what = f"a block has {pieces} heads·tokens·elements"
    _check_size("kernel_block", form.kernel_block, pieces, MAX_BLOCK_PIECES, what)
    for part in form.conv:
        ranks = 1 if part.replicated else form.tp
        elements = math.ceil(part.channels / ranks) * form.conv_width
        named = f"{part.name}{part.channels}"
        what = f"a state has {elements} elements"
        _check_size("conv", named, elements, MAX_BLOCK_PIECES, what)


def _check_size(key: str, value: object, size: int, limit: int, what: str) -> None:
    if size > limit:
        raise InvalidArgument(key, value, f"fewer: {what}, more than {limit}")
