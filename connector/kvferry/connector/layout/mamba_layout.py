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

from kvferry.connector.layout.block_layout import TensorLayout
from kvferry.connector.layout.sharding import Sharding
from kvferry.connector.vllm.attention import has_convolution_channels_first
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import PagedTensor, Range

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

_NAMES_OF_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
"""Names in models' configurations of the number of groups that share B and C."""


_HAS_CONVOLUTION_AND_TEMPORAL = {
    "MAMBA1": (True, True),
    "MAMBA2": (True, True),
    "GDN_ATTN": (True, True),
    "SHORT_CONV": (True, False),
    "LINEAR": (False, True),
}
"""By kind of state, whether there is a convolution state, and whether there is a temporal state."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """Channels of the convolution that belong together.

    Attributes:
        width: the channels on this rank.
        is_copied: whether every rank has the same ones.
    """

    kind: str
    width: int
    is_copied: bool = False
    packing: str = "plain"


def groups_of_heads(config: Mapping[str, Any]) -> int | None:
    """The number of groups that share B and C in a Mamba-2 model; None if its configuration does not give it."""
    numbers: set[int] = set()
    for name in _NAMES_OF_GROUPS:
        number = config.get(name)
        if isinstance(number, int):
            numbers.add(number)
    # Two names with different numbers: at least one of them is about something else.
    if len(numbers) != 1:
        return None
    return numbers.pop()


def describe_mamba_layout(
    layer: str,
    group: int,
    spec: MambaSpec,
    view: torch.Tensor,
    *,
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
    has_convolution, has_temporal = _states_of(where, spec)
    layouts: list[TensorLayout] = []
    if has_convolution:
        layouts += _convolution(where, spec, sharding, head_groups)
    if has_temporal:
        layouts.append(_temporal(spec, sharding, after_convolution=has_convolution))
    page_bytes = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        page_bytes += _bytes_of(shape, dtype)
    has_shape = tuple(view.shape) == (num_blocks, 1, 1, page_bytes)
    if not has_shape or view.element_size() != 1 or view.stride(3) != 1:
        raise InvalidConfig(
            where,
            f"shape {list(view.shape)} of {view.dtype}",
            f"a view of bytes [{num_blocks}, 1, 1, {page_bytes}]",
        )
    return [
        layout.paged_tensor(layer, group, view, block_tokens=1) for layout in layouts
    ]


def _convolution(
    where: str, spec: MambaSpec, sharding: Sharding, head_groups: int | None
) -> Iterator[TensorLayout]:
    """The convolution state, by projection; a cell holds the columns of one channel.

    Raises:
        InvalidConfig: the channels are not those of this kind's projections.
    """
    dtype = spec.dtypes[0]
    item = dtype.itemsize
    # The two sides may store it differently (`VLLM_SSM_CONV_STATE_LAYOUT`): the strides say how.
    is_by_channel = has_convolution_channels_first()
    if is_by_channel:
        channels, columns = spec.shapes[0]
        channel_stride = columns * item
        element_bytes = 0
        element_stride = 0
    else:
        columns, channels = spec.shapes[0]
        channel_stride = item
        element_bytes = item
        element_stride = channels * item
    first_channel = 0
    for projection in _projections(where, spec, channels, sharding, head_groups):
        is_replicated = projection.is_copied or spec.tp_replicated
        yield TensorLayout(
            kind=projection.kind,
            heads=_held_range(projection.width, sharding, is_replicated=is_replicated),
            head_stride=channel_stride,
            cell_bytes=columns * item,
            dtype=_dtype_name(dtype),
            packing=projection.packing,
            offset=first_channel * channel_stride,
            element_bytes=element_bytes,
            element_stride=element_stride,
        )
        first_channel += projection.width


def _temporal(
    spec: MambaSpec, sharding: Sharding, *, after_convolution: bool
) -> TensorLayout:
    """The temporal state, by head; it follows the convolution state."""
    heads, *inner_shape = spec.shapes[-1]
    dtype = spec.dtypes[-1]
    head_bytes = math.prod(inner_shape) * dtype.itemsize
    offset = 0
    if after_convolution:
        offset = _bytes_of(spec.shapes[0], spec.dtypes[0])
    return TensorLayout(
        kind="ssm",
        heads=_held_range(heads, sharding, is_replicated=spec.tp_replicated),
        head_stride=head_bytes,
        cell_bytes=head_bytes,
        dtype=_dtype_name(dtype),
        offset=offset,
    )


def _states_of(where: str, spec: MambaSpec) -> tuple[bool, bool]:
    """Whether there is a convolution state, and whether there is a temporal state.

    Raises:
        InvalidConfig: the kind or the number of states is unknown.
    """
    kinds = _HAS_CONVOLUTION_AND_TEMPORAL
    name = spec.mamba_type.name
    if name not in kinds:
        raise InvalidConfig(
            where, f"a state of {name}", f"a state of one of {', '.join(kinds)}"
        )
    num_states = sum(kinds[name])
    if len(spec.shapes) != num_states or len(spec.dtypes) != num_states:
        raise InvalidConfig(
            where,
            f"{len(spec.shapes)} states",
            f"{num_states} of {name}: rings and records of replayed tokens are not described",
        )
    return kinds[name]


def _projections(
    where: str,
    spec: MambaSpec,
    channels: int,
    sharding: Sharding,
    head_groups: int | None,
) -> list[_Projection]:
    """The projections that the channels of a convolution belong to, in memory order.

    Raises:
        InvalidConfig: the channels are not those of this kind's projections.
    """
    kind = spec.mamba_type.name
    if kind in ("MAMBA1", "SHORT_CONV"):
        return [_Projection("conv.x", channels)]
    # x of Mamba-2, or v of a gated delta net, is as wide as the temporal state. The other two share the rest.
    heads, head_width = spec.shapes[1][:2]
    wide = heads * head_width
    narrow, odd = divmod(channels - wide, 2)
    if narrow <= 0 or odd:
        raise InvalidConfig(
            where,
            f"{channels} channels of a convolution",
            f"{wide} and two equal projections more",
        )
    if kind == "GDN_ATTN":
        return [
            _Projection("conv.q", narrow),
            _Projection("conv.k", narrow),
            _Projection("conv.v", wide),
        ]
    state_width = spec.shapes[1][2]
    is_copied, packing = _sharding_of_b_and_c(
        narrow // state_width, sharding, head_groups
    )
    return [
        _Projection("conv.x", wide),
        _Projection("conv.B", narrow, is_copied, packing),
        _Projection("conv.C", narrow, is_copied, packing),
    ]


def _sharding_of_b_and_c(
    local_groups: int, sharding: Sharding, head_groups: int | None
) -> tuple[bool, str]:
    """Whether every rank has a copy of B and C, and the packing of their format.

    Args:
        local_groups: the groups of heads on this rank.
        head_groups: those of the model; None if they are not known.
    """
    # Several groups on a rank are a part of all groups. A single one is the rank's own, or a copy of the only one.
    if sharding.size == 1 or local_groups > 1:
        return False, "plain"
    if head_groups == 1:
        return True, "plain"
    if head_groups == sharding.size:
        return False, "plain"
    # Unknown: only equal tensor-parallel sizes are paired, which is right in both cases.
    return False, f"plain/tp{sharding.size}"


def _held_range(local: int, sharding: Sharding, *, is_replicated: bool) -> Range:
    """The global channels or heads of this rank, which has `local` of them."""
    if is_replicated:
        return Range(0, local)
    first = sharding.rank * local
    return Range(first, first + local)


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
