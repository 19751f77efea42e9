"""The engine of a short form: one allocation per worker at address 0, strides from the layout.

In a worker's allocation the cache groups follow one another (full attention, window, states), each with its own blocks.
In vLLM they share the same bytes, which makes no difference to a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from msgspec.structs import replace

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan.short_form import DTYPE_BYTES, LAYOUTS, ConvPart, ShortForm
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


def groups_of_form(form: ShortForm) -> _Groups:
    """The cache groups with their layers: full attention, window, states; only those that have layers."""
    groups = [
        (CacheGroup(policy="full", block_tokens=form.block), form.full_layers),
        (
            CacheGroup(
                policy="window", block_tokens=form.block, window_tokens=form.window
            ),
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
    if rank < rest:
        size += 1
    return Range(first, first + size)


def _worker(form: ShortForm, groups: _Groups, pp: int, pcp: int, tp: int) -> WorkerJson:
    """One worker."""
    # A group of decode context parallel ranks spans the prefill ranks first, then the tensor-parallel ones.
    place = Place(pp=pp, pcp=pcp, tp=tp, dcp=(tp * form.pcp + pcp) % form.dcp)
    first_layer = sum(form.stages[:pp])
    stage = range(first_layer, first_layer + form.stages[pp])
    tensors: list[PagedTensor] = []
    base = 0
    for index, (group, layers) in enumerate(groups):
        own_layers = [layer for layer in layers if layer in stage]
        build = _state_tensors if group.policy == "state" else _attention_tensors
        built, num_bytes = build(form, index, own_layers, place, base)
        tensors += built
        base += num_bytes
    if base > MAX_WORKER_BYTES:
        expected = f"fewer: a worker's cache has {base} bytes, more than 2**47"
        raise InvalidArgument("blocks", form.blocks, expected)
    # Only vLLM's attention on CPUs has this layout.
    memory = "DRAM" if form.layout == "CPU" else "VRAM"
    return WorkerJson(place=place, memory=memory, tensors=tuple(tensors))


def _attention_tensors(
    form: ShortForm, group: int, layers: Sequence[int], place: Place, base: int
) -> tuple[list[PagedTensor], int]:
    """The tensors of attention layers from address `base` on, and their size in bytes."""
    item = DTYPE_BYTES[form.dtype]
    heads = _kv_heads(form, place)
    is_packed = form.kv == "packed" and not form.mla
    cell = (form.mla or form.dim) * item
    blocks = form.blocks * (form.block // form.kernel_block)
    tokens = form.kernel_block
    sizes = {
        "L": len(layers),
        "B": blocks,
        "H": len(heads),
        "N": tokens,
        "C": 2 * cell if is_packed else cell,
    }
    strides, total = strides_of(LAYOUTS[form.layout], sizes)
    interleave = Interleave()
    if form.dcp > 1:
        interleave = Interleave(
            ranks=form.dcp, rank=place.dcp, run_tokens=form.interleave
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
    v = replace(k, kind="v", base=base + (cell if is_packed else total))
    if form.layout == "CPU":
        # In a (block, head): K as [dim, tokens], behind it V as [tokens, dim].
        k = replace(
            k, tile_stride=item, element_bytes=item, element_stride=tokens * item
        )
        v = replace(v, base=base + tokens * cell, tile_stride=cell)
    kinds = (k,) if form.mla else (k, v)
    tensors = []
    for position, layer in enumerate(layers):
        name = form.names.format(layer)
        offset = position * strides["L"]
        tensors += [
            replace(kind, layer=name, base=kind.base + offset) for kind in kinds
        ]
    if not is_packed:
        total *= len(kinds)
    return tensors, total


def _is_float8(dtype: str) -> bool:
    return DTYPE_BYTES[dtype] == 1


def _format(dtype: str) -> Format:
    quantization = "fp8_per_tensor" if _is_float8(dtype) else "none"
    return Format(dtype=dtype, quantization=quantization)


def _scales(dtype: str) -> tuple[float, ...]:
    """The static scales of a float8 cache: always 1 in a short form."""
    return (1.0,) if _is_float8(dtype) else ()


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
    held_by_part = [_held_channels(form, part, place) for part in form.conv]
    all_channels = sum(len(held) for held in held_by_part)
    conv_bytes = all_channels * form.conv_width * item
    heads = Range(0, 0)
    if form.ssm:
        heads = heads_of_rank(form.ssm[0], form.tp, place.tp)
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
    channels_before = 0
    cell_bytes = form.conv_width * item
    for part, held in zip(form.conv, held_by_part, strict=True):
        conv = replace(ssm, kind=f"conv.{part.name}", heads=held, cell_bytes=cell_bytes)
        if form.conv_layout == "SD" and form.conv_width > 1:
            # Channels innermost: the elements of one channel are apart.
            conv = replace(
                conv,
                base=base + channels_before * item,
                head_stride=item,
                element_bytes=item,
                element_stride=all_channels * item,
            )
        else:
            conv = replace(
                conv, base=base + channels_before * cell_bytes, head_stride=cell_bytes
            )
        kinds.append(conv)
        channels_before += len(held)
    if form.ssm:
        kinds.append(ssm)
    layer_bytes = page * form.blocks
    tensors = []
    for position, layer in enumerate(layers):
        name = form.state_names.format(layer)
        offset = position * layer_bytes
        tensors += [
            replace(kind, layer=name, base=kind.base + offset) for kind in kinds
        ]
    return tensors, layer_bytes * len(layers)


def _held_channels(form: ShortForm, part: ConvPart, place: Place) -> Range:
    if part.replicated:
        return Range(0, part.channels)
    return heads_of_rank(part.channels, form.tp, place.tp)


def _check_sizes(form: ShortForm) -> None:
    """Check the sizes before anything is built: a few characters can ask for more tensors than memory has."""
    num_states = len(form.state_layers)
    num_attention = form.layers - num_states
    tensors_of_attention = 1 if form.mla else 2
    tensors_of_state = len(form.conv)
    if form.ssm:
        tensors_of_state += 1
    per_rank = num_attention * tensors_of_attention + num_states * tensors_of_state
    num_tensors = form.pcp * form.tp * per_rank
    if num_tensors > MAX_ENGINE_TENSORS:
        what = f"layers·tp·pcp makes {num_tensors} paged tensors"
        raise _too_large("layers", form.layers, what, MAX_ENGINE_TENSORS)
    num_tokens = form.blocks * form.block
    if num_tokens >= MAX_CACHE_TOKENS:
        what = f"blocks·block is {num_tokens} tokens"
        raise _too_large("blocks", form.blocks, what, MAX_CACHE_TOKENS - 1)
    num_pieces = math.ceil(form.heads / form.tp) * form.kernel_block
    if form.layout == "CPU":
        # Every element of its K is a piece of its own.
        num_pieces *= form.dim
    if num_pieces > MAX_BLOCK_PIECES:
        what = f"a block has {num_pieces} heads·tokens·elements"
        raise _too_large("kernel_block", form.kernel_block, what, MAX_BLOCK_PIECES)
    for part in form.conv:
        channels = part.channels
        if not part.replicated:
            channels = math.ceil(part.channels / form.tp)
        num_elements = channels * form.conv_width
        if num_elements > MAX_BLOCK_PIECES:
            what = f"a state has {num_elements} elements"
            raise _too_large(
                "conv", f"{part.name}{part.channels}", what, MAX_BLOCK_PIECES
            )


def _too_large(key: str, value: object, what: str, limit: int) -> InvalidArgument:
    return InvalidArgument(key, value, f"fewer: {what}, more than {limit}")
