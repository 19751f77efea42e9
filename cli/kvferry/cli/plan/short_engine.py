"""The engine of a short form: one allocation per worker at address 0, strides from the layout.

In a worker's allocation the cache groups follow one another (full attention, window, states), each with its own blocks.
In vLLM they share the same bytes, which makes no difference to a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan.short_form import ShortForm
from kvferry.cli.plan.short_values import DTYPE_BYTES, LAYOUTS
from kvferry.protocol.description_json import EngineJson, WorkerJson
from kvferry.protocol.geometry import Format, Interleave, PagedTensor, Place, Range, Topology
from kvferry.protocol.handshake import MAX_ENGINE_TENSORS, CacheGroup, ModelFacts

UNKNOWN_MODEL = "short form"
"""Placeholder for facts about weights and activations, which a short form does not have."""

_Groups = list[tuple[CacheGroup, tuple[int, ...]]]

MAX_BLOCK_PIECES = 1 << 20
MAX_CACHE_TOKENS = 1 << 31
MAX_WORKER_BYTES = 1 << 47


def engine_of_form(form: ShortForm, engine_id: str) -> EngineJson:
    """Describe the engine.

    Raises:
        InvalidArgument: it would be too large to describe; the text names the value and its limit.
    """
    _check_sizes(form)
    groups = groups_of_form(form)
    places = [
        (pp, pcp, tp) for pp in range(form.pp) for pcp in range(form.pcp) for tp in range(form.tp)
    ]
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
        workers=tuple(_worker(form, groups, *place) for place in places),
    )


def groups_of_form(form: ShortForm) -> _Groups:
    """The cache groups with their layers: full attention, window, states; only those that have layers."""
    groups = [
        (CacheGroup(policy="full", block_tokens=form.block), form.full_layers),
        (
            CacheGroup(policy="window", block_tokens=form.block, window_tokens=form.window),
            form.window_layers,
        ),
        (CacheGroup(policy="state", block_tokens=form.block), form.state_layers),
    ]
    return [(group, layers) for group, layers in groups if layers]


def heads_of_rank(heads: int, ranks: int, rank: int) -> Range:
    """The heads of a rank: split evenly, the first ranks have one more; one each if there are more ranks than heads.

    Example: 5 heads on 2 ranks: [0, 3) and [3, 5). 2 heads on 4 ranks: [0, 1), [0, 1), [1, 2), [1, 2).
    """
    if ranks > heads:
        first = rank * heads // ranks
        return Range(first, first + 1)
    size, rest = divmod(heads, ranks)
    first = rank * size + min(rank, rest)
    return Range(first, first + size + (rank < rest))


def _worker(form: ShortForm, groups: _Groups, pp: int, pcp: int, tp: int) -> WorkerJson:
    """One worker. A group of context parallel ranks spans the prefill ranks first, then the tensor-parallel ones."""
    place = Place(pp=pp, pcp=pcp, tp=tp, dcp=(tp * form.pcp + pcp) % form.dcp)
    first = sum(form.stages[:pp])
    stage = range(first, first + form.stages[pp])
    tensors: list[PagedTensor] = []
    base = 0
    for index, (group, layers) in enumerate(groups):
        here = [layer for layer in layers if layer in stage]
        build = _state_tensors if group.policy == "state" else _attention_tensors
        built, num_bytes = build(form, index, here, place, base)
        tensors += built
        base += num_bytes
    if base > MAX_WORKER_BYTES:
        raise InvalidArgument(
            "blocks", form.blocks, f"fewer: a worker's cache has {base} bytes, more than 2**47"
        )
    return WorkerJson(
        place=place, memory="DRAM" if form.layout == "CPU" else "VRAM", tensors=tuple(tensors)
    )


def _attention_tensors(
    form: ShortForm, group: int, layers: Sequence[int], place: Place, base: int
) -> tuple[list[PagedTensor], int]:
    """The tensors of attention layers from address `base` on, and their size in bytes."""
    item = DTYPE_BYTES[form.dtype]
    heads = _kv_heads(form, place)
    packed = form.kv == "packed" and not form.mla
    cell = (form.mla or form.dim) * item
    blocks, tokens = form.blocks * (form.block // form.kernel_block), form.kernel_block
    sizes = {
        "L": len(layers),
        "B": blocks,
        "H": len(heads),
        "N": tokens,
        "C": cell * (2 if packed else 1),
    }
    strides, total = strides_of(LAYOUTS[form.layout], sizes)
    interleave = (
        Interleave(ranks=form.dcp, rank=place.dcp, run_tokens=form.interleave)
        if form.dcp > 1
        else Interleave()
    )
    k = PagedTensor(
        layer="",
        kind="mla" if form.mla else "k",
        group=group,
        base=base,
        blocks=blocks,
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
    v = replace(k, kind="v", base=base + (cell if packed else total))
    if form.layout == "CPU":  # in a (block, head): K as [dim, tokens], behind it V as [tokens, dim]
        k = replace(k, tile_stride=item, element_bytes=item, element_stride=tokens * item)
        v = replace(v, base=base + tokens * cell, tile_stride=cell)
    tensors = [
        replace(kind, layer=form.names.format(layer), base=kind.base + position * strides["L"])
        for position, layer in enumerate(layers)
        for kind in ((k,) if form.mla else (k, v))
    ]
    return tensors, total if packed or form.mla else 2 * total


def _format(dtype: str) -> Format:
    return Format(dtype=dtype, quantization="fp8_per_tensor" if DTYPE_BYTES[dtype] == 1 else "none")


def _scales(dtype: str) -> tuple[float, ...]:
    """The static scales of a float8 cache: always 1 in a short form."""
    return (1.0,) if DTYPE_BYTES[dtype] == 1 else ()


def strides_of(order: str, sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """The stride in bytes of each axis, and the total size; `order` names the axes from the outermost.

    Example: `LBHNC` of 1 layer, 10 blocks, 2 heads, 16 tokens, 512 bytes: N 512, H 8192, B 16384, L 163840.
    """
    strides = {}
    total = 1
    for axis in reversed(order):
        strides[axis] = total
        total *= sizes[axis]
    return strides, total


def _kv_heads(form: ShortForm, place: Place) -> Range:
    """The KV heads of a rank; the ranks of one context parallel group hold the same heads."""
    if form.mla:
        return Range(0, 1)
    span = max(1, form.dcp // form.pcp)
    return heads_of_rank(form.heads, form.tp // span, place.tp // span)


def _state_tensors(
    form: ShortForm, group: int, layers: Sequence[int], place: Place, base: int
) -> tuple[list[PagedTensor], int]:
    """The states of recurrent layers from address `base` on, and their size in bytes.

    There is one page per layer and block: the convolution state, then the temporal state.
    """
    item = DTYPE_BYTES[form.state_dtype]
    channels = [
        Range(0, part.channels)
        if part.replicated
        else heads_of_rank(part.channels, form.tp, place.tp)
        for part in form.conv
    ]
    all_channels = sum(len(held) for held in channels)
    conv_bytes = all_channels * form.conv_width * item
    heads = heads_of_rank(form.ssm[0], form.tp, place.tp) if form.ssm else Range(0, 0)
    head_bytes = math.prod(form.ssm[1:]) * item
    page = conv_bytes + len(heads) * head_bytes
    ssm = PagedTensor(
        layer="",
        kind="ssm",
        group=group,
        base=base + conv_bytes,
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
    before = 0
    for part, held in zip(form.conv, channels, strict=True):
        row = replace(ssm, kind=f"conv.{part.name}", heads=held, cell_bytes=form.conv_width * item)
        if form.conv_layout == "SD" and form.conv_width > 1:
            apart = {
                "head_stride": item,
                "element_bytes": item,
                "element_stride": all_channels * item,
            }
            kinds.append(replace(row, base=base + before * item, **apart))
        else:
            kinds.append(
                replace(row, base=base + before * row.cell_bytes, head_stride=row.cell_bytes)
            )
        before += len(held)
    kinds += [ssm] if form.ssm else []
    tensors = [
        replace(
            kind,
            layer=form.state_names.format(layer),
            base=kind.base + position * page * form.blocks,
        )
        for position, layer in enumerate(layers)
        for kind in kinds
    ]
    return tensors, page * form.blocks * len(layers)


def _check_sizes(form: ShortForm) -> None:
    states = len(form.state_layers)
    per_attention, per_state = 1 if form.mla else 2, len(form.conv) + bool(form.ssm)
    tensors = form.pcp * form.tp * ((form.layers - states) * per_attention + states * per_state)
    pieces = (
        math.ceil(form.heads / form.tp)
        * form.kernel_block
        * (form.dim if form.layout == "CPU" else 1)
    )
    limits: list[tuple[str, object, str, int, int]] = [
        (
            "layers",
            form.layers,
            "layers·tp·pcp makes {} paged tensors",
            tensors,
            MAX_ENGINE_TENSORS,
        ),
        (
            "blocks",
            form.blocks,
            "blocks·block is {} tokens",
            form.blocks * form.block,
            MAX_CACHE_TOKENS - 1,
        ),
        (
            "kernel_block",
            form.kernel_block,
            "a block has {} heads·tokens·elements",
            pieces,
            MAX_BLOCK_PIECES,
        ),
    ]
    for part in form.conv:
        channels = part.channels if part.replicated else math.ceil(part.channels / form.tp)
        shown, size = f"{part.name}{part.channels}", channels * form.conv_width
        limits.append(("conv", shown, "a state has {} elements", size, MAX_BLOCK_PIECES))
    for field, value, why, size, most in limits:
        if size > most:
            raise InvalidArgument(field, value, f"fewer: {why.format(size)}, more than {most}")
