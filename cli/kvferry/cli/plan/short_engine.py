"""The engine of a short form: one allocation per worker at address 0, strides from the layout.

In a worker's allocation the cache groups follow one another (full attention, window, states), each with its own blocks.
In vLLM they share the same bytes, which makes no difference to a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

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
        kinds: the tensors of its first layer, without a name, from address 0 on.
        layer_stride: bytes from one layer to the next.
        num_bytes: of all layers.
    """

    kinds: tuple[PagedTensor, ...]
    layer_stride: int
    num_bytes: int


def engine_of_form(form: ShortForm, engine_id: str) -> EngineJson:
    """Describe the engine.

    Raises:
        InvalidArgument: it would be too large to describe; the text names the value and its limit.
    """
    _check_sizes(form)
    full = CacheGroup(policy="full", block_tokens=form.block)
    window = replace(full, policy="window", window_tokens=form.window)
    state = replace(full, policy="state")
    groups = [(full, form.full_layers), (window, form.window_layers)]
    groups.append((state, form.state_layers))
    groups = [(group, layers) for group, layers in groups if layers]
    # In the order in which an engine numbers its workers.
    places = itertools.product(range(form.pp), range(form.pcp), range(form.tp))
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
        groups=tuple(group for group, _ in groups),
        workers=tuple(_worker(form, groups, pp, pcp, tp) for pp, pcp, tp in places),
    )


def _worker(
    form: ShortForm,
    groups: Sequence[tuple[CacheGroup, tuple[int, ...]]],
    pp: int,
    pcp: int,
    tp: int,
) -> WorkerJson:
    # A group of decode context parallel ranks spans the prefill ranks first, then the tensor-parallel ones.
    place = Place(pp=pp, pcp=pcp, tp=tp, dcp=(tp * form.pcp + pcp) % form.dcp)
    first_layer = sum(form.stages[:pp])
    stage = range(first_layer, first_layer + form.stages[pp])
    tensors: list[PagedTensor] = []
    base = 0
    for index, (group, all_layers) in enumerate(groups):
        layers = [layer for layer in all_layers if layer in stage]
        if group.policy == "state":
            part = _states(form, index, len(layers), place)
            names = form.state_names
        else:
            part = _attention(form, index, len(layers), place)
            names = form.names
        for position, layer in enumerate(layers):
            offset = base + position * part.layer_stride
            for kind in part.kinds:
                name = names.format(layer)
                tensors.append(replace(kind, layer=name, base=kind.base + offset))
        base += part.num_bytes
    if base > MAX_WORKER_BYTES:
        expected = f"fewer: a worker's cache has {base} bytes, more than 2**47"
        raise InvalidArgument("blocks", form.blocks, expected)
    # Only vLLM's attention on CPUs has this layout.
    memory = "DRAM" if form.layout == "CPU" else "VRAM"
    return WorkerJson(place=place, memory=memory, tensors=tuple(tensors))


def _attention(form: ShortForm, group: int, num_layers: int, place: Place) -> _Part:
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
        interleave = Interleave(
            ranks=form.dcp, rank=place.dcp, run_tokens=form.interleave
        )
    k = PagedTensor(
        layer="",
        kind="mla" if form.mla else "k",
        group=group,
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
        format=_format(form.dtype),
        scales=_scales(form.dtype),
    )
    if form.mla:
        return _Part((k,), strides["L"], total)
    v = replace(k, kind="v", base=cell)
    if form.layout == "CPU":
        # In a (block, head): K as [dim, tokens], behind it V as [tokens, dim].
        by_element = {"element_bytes": item, "element_stride": tokens * item}
        v = replace(v, base=tokens * cell, tile_stride=cell)
        k = replace(k, tile_stride=item, **by_element)
    elif not is_packed:
        v = replace(v, base=total)
        total *= 2
    return _Part((k, v), strides["L"], total)


def _states(form: ShortForm, group: int, num_layers: int, place: Place) -> _Part:
    """The recurrent layers of a worker: a page per layer and block, the convolution state before the temporal one."""
    item = DTYPE_BYTES[form.state_dtype]
    held_by_part = []
    for part in form.conv:
        held = Range(0, part.channels)
        if not part.replicated:
            held = _heads_of_rank(part.channels, form.tp, place.tp)
        held_by_part.append(held)
    all_channels = sum(map(len, held_by_part))
    channel_bytes = form.conv_width * item
    heads = Range(0, 0)
    if form.ssm:
        heads = _heads_of_rank(form.ssm[0], form.tp, place.tp)
    head_bytes = math.prod(form.ssm[1:]) * item
    page = all_channels * channel_bytes + len(heads) * head_bytes
    ssm = PagedTensor(
        layer="",
        kind="ssm",
        group=group,
        base=all_channels * channel_bytes,
        blocks=form.blocks,
        block_tokens=form.block,
        block_stride=page,
        heads=heads,
        head_stride=head_bytes,
        tile_tokens=form.block,
        tile_stride=0,
        cell_bytes=head_bytes,
        format=_format(form.state_dtype),
        scales=_scales(form.state_dtype),
    )
    kinds = []
    stride = channel_bytes
    by_element = {}
    if form.conv_layout == "SD" and form.conv_width > 1:
        # Channels innermost: the elements of one channel are apart.
        stride = item
        by_element = {"element_bytes": item, "element_stride": all_channels * item}
    base = 0
    for part, held in zip(form.conv, held_by_part, strict=True):
        conv = replace(
            ssm,
            kind=f"conv.{part.name}",
            base=base,
            heads=held,
            head_stride=stride,
            cell_bytes=channel_bytes,
            **by_element,
        )
        kinds.append(conv)
        base += len(held) * stride
    if form.ssm:
        kinds.append(ssm)
    layer_bytes = page * form.blocks
    return _Part(tuple(kinds), layer_bytes, layer_bytes * num_layers)


def _heads_of_rank(heads: int, ranks: int, rank: int) -> Range:
    """The heads of a rank: split evenly, the first ranks have one more; one each if there are more ranks than heads.

    Example: 5 heads on 2 ranks: [0, 3) and [3, 5). 2 heads on 4 ranks: [0, 1), [0, 1), [1, 2), [1, 2).
    """
    if ranks > heads:
        first = rank * heads // ranks
        return Range(first, first + 1)
    size, rest = divmod(heads, ranks)
    first = rank * size + min(rank, rest)
    if rank < rest:
        size += 1
    return Range(first, first + size)


def _format(dtype: str) -> Format:
    is_float8 = DTYPE_BYTES[dtype] == 1
    return Format(dtype=dtype, quantization="fp8_per_tensor" if is_float8 else "none")


def _scales(dtype: str) -> tuple[float, ...]:
    """The static scales of a float8 cache: always 1 in a short form."""
    return (1.0,) if DTYPE_BYTES[dtype] == 1 else ()


def _check_sizes(form: ShortForm) -> None:
    """Check the sizes before anything is built: a few characters can ask for more tensors than memory has."""
    num_states = len(form.state_layers)
    of_attention = (form.layers - num_states) * (1 if form.mla else 2)
    of_states = num_states * (len(form.conv) + bool(form.ssm))
    num_tensors = form.pcp * form.tp * (of_attention + of_states)
    num_tokens = form.blocks * form.block
    num_pieces = math.ceil(form.heads / form.tp) * form.kernel_block
    if form.layout == "CPU":
        # Every element of its K is a piece of its own.
        num_pieces *= form.dim
    tensors = f"layers·tp·pcp makes {num_tensors} paged tensors"
    tokens = f"blocks·block is {num_tokens} tokens"
    pieces = f"a block has {num_pieces} heads·tokens·elements"
    sizes: list[tuple[str, object, str, int, int]] = [
        ("layers", form.layers, tensors, num_tensors, MAX_ENGINE_TENSORS),
        ("blocks", form.blocks, tokens, num_tokens, MAX_CACHE_TOKENS - 1),
        ("kernel_block", form.kernel_block, pieces, num_pieces, MAX_BLOCK_PIECES),
    ]
    for part in form.conv:
        ranks = 1 if part.replicated else form.tp
        elements = math.ceil(part.channels / ranks) * form.conv_width
        named = f"{part.name}{part.channels}"
        what = f"a state has {elements} elements"
        sizes.append(("conv", named, what, elements, MAX_BLOCK_PIECES))
    for key, value, what, size, limit in sizes:
        if size > limit:
            expected = f"fewer: {what}, more than {limit}"
            raise InvalidArgument(key, value, expected)
