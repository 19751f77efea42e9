"""The layout of recurrent states: pages of Mamba-1, Mamba-2, gated delta net, short convolution, linear attention.

vLLM registers a page of a state as plain bytes, `[B, 1, 1, C]`, with a layer's states one after another in `C`. The
convolution state is first. Its channels are those of several projections, one after another, and every tensor-parallel
rank has a part of each, so each projection is a separate paged tensor. The axes that vLLM shards:

| | convolution, `kernel − 1 (+ drafts)` columns of | temporal state, by heads |
| --- | --- | --- |
| Mamba-1 | `x` | channels, `[state]` |
| Mamba-2 | `x`, `B`, `C` | heads, `[head_dim, state]` |
| gated delta net | `q`, `k`, `v` | value heads, `[value_dim, key_dim]` |
| short convolution | `x` | – |
| linear attention | – | heads, `[head_dim, head_dim]` |

B and C of Mamba-2 belong to groups of heads. vLLM gives every rank `groups / ranks` groups, or a copy of a single one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvferry.connector.layout.block_layout import Part
from kvferry.connector.layout.sharding import Sharding
from kvferry.connector.vllm.attention import has_convolution_channels_first
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import PagedTensor, Range

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

_NAMES_OF_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
"""Names in models' configurations of the number of groups that share B and C."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """`width` channels of the convolution on this rank; `alike` if every rank has the same ones."""

    kind: str
    width: int
    alike: bool = False
    packing: str = "plain"


def groups_of_heads(config: Mapping[str, Any]) -> int | None:
    """The number of groups that share B and C in a Mamba-2 model; None if its configuration does not give it."""
    reported = {config[name] for name in _NAMES_OF_GROUPS if isinstance(config.get(name), int)}
    return reported.pop() if len(reported) == 1 else None


def describe_mamba_layout(
    layer: str,
    group: int,
    spec: MambaSpec,
    view: torch.Tensor,
    num_blocks: int,
    sharding: Sharding,
    head_groups: int | None,
) -> list[PagedTensor]:
    """The paged tensors of a layer's states.

    Args:
        view: `[B, 1, 1, C]`, bytes.
        head_groups: see `groups_of_heads`.

    Raises:
        InvalidConfig: names the layer and why it cannot be described.
    """
    where = f"cache of layer {layer}"
    has_convolution, has_temporal = _kind_of(where, spec)
    found = list(_of_convolution(where, spec, sharding, head_groups)) if has_convolution else []
    if has_temporal:
        found.append(_of_temporal(spec, sharding, after_convolution=has_convolution))
    size = sum(
        _bytes_of(shape, dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    if (
        tuple(view.shape) != (num_blocks, 1, 1, size)
        or view.element_size() != 1
        or view.stride(3) != 1
    ):
        expected = f"a view of bytes [{num_blocks}, 1, 1, {size}]"
        raise InvalidConfig(where, f"shape {list(view.shape)} of {view.dtype}", expected)
    return [part.tensor(layer, group, view, 1) for part in found]


def _of_convolution(
    where: str, spec: MambaSpec, sharding: Sharding, head_groups: int | None
) -> Iterator[Part]:
    """The convolution state, by projection; a cell holds the columns of one channel."""
    dtype, item = spec.dtypes[0], spec.dtypes[0].itemsize
    channels, columns, by_channel = _orientation(spec.shapes[0])
    first = 0
    for part in _projections(where, spec, channels, sharding, head_groups):
        heads = _ranks_part(part.width, sharding, alike=part.alike or spec.tp_replicated)
        cell_bytes = columns * item
        stride = cell_bytes if by_channel else item
        yield Part(
            part.kind,
            heads,
            stride,
            cell_bytes,
            _name(dtype),
            part.packing,
            offset=first * stride,
            element_bytes=0 if by_channel else item,
            element_stride=0 if by_channel else channels * item,
        )
        first += part.width


def _of_temporal(spec: MambaSpec, sharding: Sharding, *, after_convolution: bool) -> Part:
    """The temporal state, by head; it follows the convolution state."""
    (heads, *inner), dtype = spec.shapes[-1], spec.dtypes[-1]
    cell_bytes = math.prod(inner) * dtype.itemsize
    offset = _bytes_of(spec.shapes[0], spec.dtypes[0]) if after_convolution else 0
    held = _ranks_part(heads, sharding, alike=spec.tp_replicated)
    return Part("ssm", held, cell_bytes, cell_bytes, _name(dtype), offset=offset)


def _kind_of(where: str, spec: MambaSpec) -> tuple[bool, bool]:
    """Whether there is a convolution state, and whether there is a temporal state.

    Raises:
        InvalidConfig: the kind or the number of states is unknown.
    """
    kinds = {
        "MAMBA1": (True, True),
        "MAMBA2": (True, True),
        "GDN_ATTN": (True, True),
        "SHORT_CONV": (True, False),
        "LINEAR": (False, True),
    }
    name = spec.mamba_type.name
    if name not in kinds:
        raise InvalidConfig(where, f"a state of {name}", f"a state of one of {', '.join(kinds)}")
    expected = sum(kinds[name])
    if len(spec.shapes) != expected or len(spec.dtypes) != expected:
        text = f"{expected} of {name}: rings and records of replayed tokens are not described"
        raise InvalidConfig(where, f"{len(spec.shapes)} states", text)
    return kinds[name]


def _orientation(shape: tuple[int, ...]) -> tuple[int, int, bool]:
    """Channels and columns of a convolution state, and whether a channel's columns are contiguous."""
    first, second = shape
    if has_convolution_channels_first():
        return first, second, True
    return second, first, False


def _projections(
    where: str, spec: MambaSpec, channels: int, sharding: Sharding, head_groups: int | None
) -> list[_Projection]:
    """The projections that the channels of a convolution belong to, in memory order."""
    name = spec.mamba_type.name
    if name in ("MAMBA1", "SHORT_CONV"):
        return [_Projection("conv.x", channels)]
    heads, width = spec.shapes[1][0], spec.shapes[1][1]
    inner = heads * width  # of x, or of v
    pair, odd = divmod(channels - inner, 2)
    if pair <= 0 or odd:
        raise InvalidConfig(
            where,
            f"{channels} channels of a convolution",
            f"{inner} and two equal projections more",
        )
    if name == "GDN_ATTN":
        return [
            _Projection("conv.q", pair),
            _Projection("conv.k", pair),
            _Projection("conv.v", inner),
        ]
    alike, packing = _copied(pair // spec.shapes[1][2], sharding, head_groups)
    return [
        _Projection("conv.x", inner),
        _Projection("conv.B", pair, alike, packing),
        _Projection("conv.C", pair, alike, packing),
    ]


def _copied(local_groups: int, sharding: Sharding, head_groups: int | None) -> tuple[bool, str]:
    """Whether every rank has a copy of B and C, and the packing of their format.

    Several groups on a rank are a part of all groups. A single one is the rank's own or a copy of the only one. If the
    configuration does not give their number, only equal tensor-parallel sizes are paired, which is right in both cases.
    """
    if sharding.size == 1 or local_groups > 1:
        return False, "plain"
    if head_groups in (1, sharding.size):
        return head_groups == 1, "plain"
    return False, f"plain/tp{sharding.size}"


def _ranks_part(local: int, sharding: Sharding, *, alike: bool) -> Range:
    return Range(0, local) if alike else Range(sharding.rank * local, (sharding.rank + 1) * local)


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
