"""An engine's description that lies, in values that the protocol permits."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.protocol.convert import as_type
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from tests.fuzz.mutation import INTEGERS, Source, mutate

_NUMBERS = (
    *(
        "base",
        "blocks",
        "block_tokens",
        "block_stride",
        "head_stride",
        "tile_tokens",
        "tile_stride",
        "cell_bytes",
    ),
    *("element_bytes", "element_stride", "group"),
)
_OTHERS = ("heads", "interleave", "scales", "format", "name")


def distorted(
    source: Source, description: EngineDescription
) -> EngineDescription | None:
    """The description with a few lies in it; None where the protocol refuses it already."""
    if source.number(8) == 7:
        changed = mutate(
            source,
            msgspec.to_builtins(description, builtin_types=(bytes,)),
            most_edits=3,
        )
    else:
        for _ in range(1 + source.number(3)):
            description = _lie(source, description)
        changed = msgspec.to_builtins(description, builtin_types=(bytes,))
    try:
        return as_type(changed, EngineDescription, InvalidMessage)
    except InvalidMessage:
        return None


def _lie(source: Source, description: EngineDescription) -> EngineDescription:
    what = source.number(8)
    if what == 0:
        groups = list(description.groups)
        at = source.number(len(groups))
        field = source.pick(("block_tokens", "window_tokens", "policy"))
        value = (
            source.pick(("full", "window", "chunk", "state"))
            if field == "policy"
            else _number(source, 16)
        )
        groups[at] = msgspec.structs.replace(groups[at], **{field: value})
        return msgspec.structs.replace(description, groups=tuple(groups))
    workers = list(description.workers)
    if what == 1:
        at = source.number(len(workers))
        kind = source.number(4)
        if kind == 0:
            workers.append(
                msgspec.structs.replace(
                    workers[at], place=workers[source.number(len(workers))].place
                )
            )
        elif kind == 1 and len(workers) > 1:
            workers.pop(at)
        elif kind == 2:
            table = msgspec.structs.replace(
                workers[at].lease_table, address=_number(source, 64)
            )
            workers[at] = msgspec.structs.replace(workers[at], lease_table=table)
        else:
            workers[at] = msgspec.structs.replace(
                workers[at], memory=source.pick(("VRAM", "DRAM", "x")), device=3
            )
        return msgspec.structs.replace(description, workers=tuple(workers))
    names = sorted({tensor.name for worker in workers for tensor in worker.tensors})
    name, field = source.pick(names), source.pick((*_NUMBERS, *_NUMBERS, *_OTHERS))
    only = source.number(2 * len(workers))
    decisions = source.take(8)
    for index, worker in enumerate(workers):
        if only >= len(workers) or index == only:
            workers[index] = _with_lie(worker, name, field, decisions)
    return msgspec.structs.replace(description, workers=tuple(workers))


def _with_lie(
    worker: WorkerDescription, name: tuple[str, str], field: str, decisions: bytes
) -> WorkerDescription:
    """Every worker tells the same lie, so that it may pass."""
    tensors = tuple(
        _changed(tensor, field, Source(decisions), worker.tensors)
        if tensor.name == name
        else tensor
        for tensor in worker.tensors
    )
    return msgspec.structs.replace(worker, tensors=tensors)


def _changed(
    tensor: PagedTensor, field: str, source: Source, siblings: tuple[PagedTensor, ...]
) -> PagedTensor:
    value: Any
    if field == "heads":
        start = max(0, tensor.heads.start + source.pick((0, 0, -1, 1, -(2**20))))
        stop = tensor.heads.stop + source.pick((0, 1, -1, 64, 2**20, 2**39))
        value = msgspec.structs.replace(tensor.heads, start=start, stop=max(0, stop))
    elif field == "interleave":
        part = source.pick(("ranks", "rank", "run_tokens"))
        value = msgspec.structs.replace(
            tensor.interleave,
            **{part: source.pick((0, 1, 2, 3, 4, 8, 16, 65535, 65536))},
        )
    elif field == "scales":
        value = source.pick(
            ((), (1.0,), (2.0,) * min(8, len(tensor.heads)), (1e30,), (1e-30, 1.0))
        )
    elif field == "format":
        part = source.pick(("dtype", "quantization", "packing"))
        text = source.pick(
            (
                "bfloat16",
                "float32",
                "float8_e4m3",
                "fp8_per_tensor",
                "none",
                "plain",
                "x",
            )
        )
        value = msgspec.structs.replace(tensor.format, **{part: text})
    elif field == "name":
        other = source.pick(siblings)
        return msgspec.structs.replace(tensor, layer=other.layer, kind=other.kind)
    else:
        value = _number(
            source, getattr(tensor, field), [getattr(one, field) for one in siblings]
        )
    return msgspec.structs.replace(tensor, **{field: value})


def _number(source: Source, value: int, others: list[int] | None = None) -> int:
    """Near the value, a part or a multiple of it, a sibling's, or at some bound."""
    near = (
        value + 1,
        value - 1,
        value * 2,
        value // 2,
        value * 3,
        value + 8,
        value * 1024,
        0,
    )
    return max(
        0,
        source.pick(
            (
                *near,
                *near,
                *near,
                *(others or [value])[:6],
                *(one for one in INTEGERS if one >= 0),
            )
        ),
    )
