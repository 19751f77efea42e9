"""The writes of a probe: a layer's own cache write, called outside a forward pass and without side effects.

They go to scratch memory with the shape of the layer's cache. The written values are known, and so are their bytes
under every encoding that a cache may have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connector.layout.patterns import is_mla
from kvferry.connector.vllm.attention import scale_of
from kvferry.protocol.errors import InvalidConfig

BLOCKS = 3
"""Enough blocks to write one fully, one partly and one not at all."""

_GUARD_BYTES = 4096
_MAX_BYTES = 64 << 20
"""Above this size the gaps between blocks and between heads are smaller than in the layer's cache."""


class Scratch:
    """A cache of `BLOCKS` blocks with the shape and the strides of a layer's cache, between guard bytes.

    Args:
        view: the layer's cache, `[B, H, N, C]`.
    """

    def __init__(self, view: torch.Tensor) -> None:
        item = view.element_size()
        shape = (BLOCKS, *view.shape[1:])
        strides = _strides(view, shape)
        size = _extent(shape, strides) * item + 2 * _GUARD_BYTES
        self.raw = torch.empty(size, dtype=torch.uint8, device=view.device)
        self._shape = shape
        self._strides = strides
        self.view = self.as_view(self.raw, view.dtype)

    def image(self, fill: int) -> torch.Tensor:
        """A tensor of the memory's size, filled with one byte."""
        return torch.full_like(self.raw, fill)

    def as_view(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The cache's view of an image of this memory, in elements of a dtype of the same size."""
        elements = raw.view(dtype)
        return elements.as_strided(
            self._shape, self._strides, _GUARD_BYTES // elements.element_size()
        )


def _strides(view: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The view's own strides if they fit in `_MAX_BYTES`; else smaller ones in the same order, with the same gaps."""
    strides = list(view.stride())
    if _extent(shape, strides) * view.element_size() <= _MAX_BYTES:
        return tuple(strides)
    # From the innermost axis outwards: the strides that each axis would have without gaps, in the view and here.
    dense_in_view = 1
    dense_here = 1
    axes = [axis for axis in range(4) if view.shape[axis] > 1]
    axes.sort(key=view.stride().__getitem__)
    for axis in axes:
        has_gap = view.stride(axis) > dense_in_view
        strides[axis] = dense_here * 2 if has_gap else dense_here
        dense_in_view = view.stride(axis) * view.shape[axis]
        dense_here = strides[axis] * shape[axis]
    return tuple(strides)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...] | list[int]) -> int:
    """Elements from the first to the last one, both included."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1


VALUES = torch.tensor(
    [
        sign * 2.0**exponent * (1 + m / 4)
        for sign in (1, -1)
        for exponent in range(-2, 4)
        for m in range(4)
    ]
)
"""Numbers that every floating-point type down to float8 represents exactly, all with different bits."""

_FLOAT8 = {
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}

Scales = dict[str, tuple[float, ...]]
"""The static scales of a layer on this worker, by kind: one, or one for each of its heads."""


def scales_of(layer: Any, layer_name: str, spec: Any) -> dict[str, Scales]:
    """The static scales of a float8 layer, by their place in the layer; backends differ in the place they use.

    Raises:
        InvalidConfig: the scales change while the engine runs, or are invalid.
    """
    if spec.kv_quant_mode.name != "FP8_PER_TENSOR":
        return {}
    where = f"cache of layer {layer_name}"
    # What the layer holds now is final: vLLM allocates caches after the weights have been loaded and processed. Only
    # with this option it changes again.
    if getattr(layer, "calculate_kv_scales", False):
        raise InvalidConfig(
            where,
            "calculate_kv_scales",
            "static scales: those of a running engine change",
        )
    names = {"k": "k", "v": "v"}
    if is_mla(spec):
        names = {"mla": "k"}
    by_place: dict[str, Scales] = {}
    for place in ("tensors", "numbers"):
        scales = _read_scales(layer, where, names, is_number=place == "numbers")
        if scales is None:
            continue
        # Two places with equal scales are one hypothesis: it would be found to explain the writes twice.
        if not any(_are_equal(scales, known) for known in by_place.values()):
            by_place[place] = scales
    return by_place


def _read_scales(
    layer: Any, where: str, names: dict[str, str], *, is_number: bool
) -> Scales | None:
    """The scales in one place of a layer; None if one of them is not there.

    Args:
        names: by kind, the name of its scale in the layer.
        is_number: see `scale_of`.

    Raises:
        InvalidConfig: a value is no scale.
    """
    scales: Scales = {}
    for kind, name in names.items():
        value = scale_of(layer, name, is_number=is_number)
        if value is None:
            return None
        scales[kind] = tuple(torch.as_tensor(value).flatten().tolist())
    for kind, values in scales.items():
        if not values or not all(1e-30 <= value <= 1e30 for value in values):
            raise InvalidConfig(
                where,
                f"{kind} scales {list(values)[:4]}",
                "static scales between 1e-30 and 1e30",
            )
    return scales


def _are_equal(scales: Scales, others: Scales) -> bool:
    """Whether both have one value per kind, and the same."""
    return all(
        {*values, *others[kind]} == {values[0]} for kind, values in scales.items()
    )


@dataclass(frozen=True, slots=True)
class Encoding:
    """A hypothesis about the encoding of values. `dtype` is empty if it is the view's.

    `bits` are the encoded `VALUES`, as integers of the element's size.
    """

    dtype: str
    bits: torch.Tensor

    def stored(self, codes: torch.Tensor) -> torch.Tensor:
        """The encoded `VALUES` of these codes, as integers."""
        return self.bits.to(codes.device)[codes]


def encodings_of(view: torch.Tensor, spec: Any) -> Iterator[Encoding]:
    """Every possible encoding of values in a cache."""
    if spec.kv_quant_mode.name == "FP8_PER_TENSOR":
        # vLLM keeps float8 in a cache of bytes, so the view does not say which format it is.
        if view.element_size() == 1:
            for name, dtype in _FLOAT8.items():
                yield Encoding(name, VALUES.to(dtype).view(torch.uint8))
    elif view.is_floating_point() and view.element_size() > 1:
        yield Encoding("", VALUES.to(view.dtype).view(integers_of(view)))


def integers_of(view: torch.Tensor) -> torch.dtype:
    """The integer dtype of the size of a view's elements, which every device can move and compare."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]


def codes_of(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Random but reproducible indices into `VALUES`."""
    # A generator of its own: those of the engine must not be moved.
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(len(VALUES), (math.prod(shape),), generator=generator)
    return codes.to(device).view(shape)


def values_of(
    codes: torch.Tensor, scales: tuple[float, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The input that makes a backend store these codes under these scales, `[T, heads, elements]`."""
    heads = codes.shape[1]
    scale = torch.tensor(scales or (1.0,)).expand(heads)
    values_by_head = (VALUES[None, :] * scale[:, None]).to(dtype).to(codes.device)
    head = torch.arange(heads, device=codes.device)[None, :, None]
    return values_by_head[head, codes]


_MODES = ("NONE", "FP8_PER_TENSOR")
"""Quantisation modes whose stored bytes are known, see `encodings_of`."""


class CannotBeTried(Exception):
    """A backend that cannot be probed; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Write:
    """One write: block and token of each of `T` entries, and codes `[T, heads, elements]` by kind."""

    blocks: torch.Tensor
    tokens: torch.Tensor
    codes: dict[str, torch.Tensor]


class Backend:
    """A layer's own cache write.

    Attributes:
        elements: number of elements of a token of a head, by kind.
        heads: number of heads.

    Raises:
        CannotBeTried: the layer has no cache write that can be called.
    """

    def __init__(self, layer: Any, spec: Any, dtype: torch.dtype) -> None:
        impl: Any = getattr(layer, "impl", None)
        if spec.kv_quant_mode.name not in _MODES:
            raise CannotBeTried(f"quantisation {spec.kv_quant_mode.name} is not tried")
        if not hasattr(impl, "do_kv_cache_update"):
            raise CannotBeTried("it has no cache write of its own")
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise CannotBeTried("another layer writes its cache")
        # A write must have no side effects: it sets attributes and fills tensors of copies only.
        self._impl = copy.copy(impl)
        self._layer = _ReadOnlyLayer(layer)
        self._dtype = dtype
        self._is_mla = is_mla(spec)
        self._latent = 0
        self.heads = int(spec.num_kv_heads)
        self.elements = {"k": int(spec.head_size), "v": int(spec.head_size_v)}
        if self._is_mla:
            self._latent = int(layer.kv_lora_rank)
            self.elements = {"mla": int(spec.head_size)}

    def write(
        self, scratch: Scratch, write: Write, fill: int, scales: Scales
    ) -> torch.Tensor:
        """Fill the memory with a byte, write, and return the whole memory."""
        scratch.raw.fill_(fill)
        block_tokens = scratch.view.shape[2]
        slots = write.blocks * block_tokens + write.tokens
        values = {}
        for kind, codes in write.codes.items():
            values[kind] = values_of(codes, scales.get(kind, ()), self._dtype)
        if self._is_mla:
            rows = values["mla"]
            self._impl.do_kv_cache_update(
                rows[:, 0, : self._latent].contiguous(),
                rows[:, :, self._latent :].contiguous(),
                scratch.view.squeeze(1),
                slots,
                self._layer.kv_cache_dtype,
                scale_of(self._layer, "k"),
            )
        else:
            self._impl.do_kv_cache_update(
                self._layer, values["k"], values["v"], scratch.view, slots
            )
        return scratch.raw


class _ReadOnlyLayer:
    """A read-only proxy of a layer: attributes are set on the proxy only, and tensors are copies."""

    def __init__(self, layer: Any) -> None:
        self.__dict__["_kvferry_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_kvferry_layer"], name)
        if isinstance(value, torch.Tensor):
            return value.clone()
        return value
