"""The writes of a probe: a layer's own cache write, called without an engine around it and without a trace.

They go to memory that looks like the layer's cache. The written values are known, and what they are in memory under
every supposition of how a cache is quantised.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connector.layout.block_layout import is_mla
from kvferry.protocol.errors import InvalidConfig

BLOCKS = 3
"""As many blocks as are needed to write one whole, one in part and one not at all."""

_GUARD_BYTES = 4096
_MAX_BYTES = 64 << 20
"""Above this the gaps between blocks and between heads are made smaller than in the layer's cache."""


class Scratch:
    """A cache of `BLOCKS` blocks with the shape and the strides of a layer's, between guard bytes.

    Args:
        view: the layer's, `[B, H, N, C]`.
    """

    def __init__(self, view: torch.Tensor) -> None:
        item = view.element_size()
        shape = (BLOCKS, *view.shape[1:])
        strides = _strides(view, shape)
        size = _extent(shape, strides) * item + 2 * _GUARD_BYTES
        self.raw = torch.empty(size, dtype=torch.uint8, device=view.device)
        self._shape, self._strides = shape, strides
        self.view = self.as_view(self.raw, view.dtype)

    def image(self, fill: int) -> torch.Tensor:
        """What all of the memory would hold, filled with one byte."""
        return torch.full_like(self.raw, fill)

    def as_view(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The cache in an image of this memory, in elements of a type of the same size."""
        elements = raw.view(dtype)
        return elements.as_strided(self._shape, self._strides, _GUARD_BYTES // elements.element_size())


def _strides(view: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The view's own strides if that is affordable; else in the same order, with gaps where it has gaps."""
    strides = list(view.stride())
    if _extent(shape, strides) * view.element_size() <= _MAX_BYTES:
        return tuple(strides)
    dense_there = dense_here = 1
    for axis in sorted((axis for axis in range(4) if view.shape[axis] > 1), key=view.stride().__getitem__):
        has_gap = view.stride(axis) > dense_there
        strides[axis] = dense_here * (2 if has_gap else 1)
        dense_there, dense_here = view.stride(axis) * view.shape[axis], strides[axis] * shape[axis]
    return tuple(strides)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...] | list[int]) -> int:
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1


VALUES = torch.tensor(
    [sign * 2.0**exponent * (1 + m / 4) for sign in (1, -1) for exponent in range(-2, 4) for m in range(4)]
)
"""Numbers that every floating-point type down to float8 has exactly, each with a pattern of bits of its own."""

_FLOAT8 = {
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}

Scales = dict[str, tuple[float, ...]]
"""By kind the static scales of a layer on this worker: one, or one for each of its heads."""


def scales_of(layer: Any, layer_name: str, spec: Any) -> dict[str, Scales]:
    """The static scales of a float8 layer by where the layer keeps them; the backends differ in which they use.

    They are final: vLLM allocates caches after the weights have been loaded and processed.

    Raises:
        InvalidConfig: scales that change while the engine runs, or that are no scales.
    """
    if spec.kv_quant_mode.name != "FP8_PER_TENSOR":
        return {}
    where = f"cache of layer {layer_name}"
    if getattr(layer, "calculate_kv_scales", False):
        raise InvalidConfig(where, "calculate_kv_scales", "static scales: those of a running engine change")
    found: dict[str, Scales] = {}
    names = {"mla": "k"} if is_mla(spec) else {"k": "k", "v": "v"}
    for place, suffix in (("tensors", "_scale"), ("numbers", "_scale_float")):
        reported = {kind: getattr(layer, f"_{name}{suffix}", None) for kind, name in names.items()}
        if None in reported.values():
            continue
        scales = {kind: tuple(torch.as_tensor(value).flatten().tolist()) for kind, value in reported.items()}
        for kind, values in scales.items():
            if not values or not all(1e-30 <= value <= 1e30 for value in values):
                raise InvalidConfig(where, f"{kind} scales {list(values)[:4]}", "static scales between 1e-30 and 1e30")
        if not any(_are_equal(scales, others) for others in found.values()):
            found[place] = scales
    return found


def _are_equal(one: Scales, other: Scales) -> bool:
    return all({*values, *other[kind]} == {values[0]} for kind, values in one.items())


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a value is supposed to be kept. `dtype` is empty where the view's own says it.

    `bits` are those of every one of `VALUES`, as integers of their size.
    """

    dtype: str
    bits: torch.Tensor

    def stored(self, codes: torch.Tensor) -> torch.Tensor:
        """What elements hold for the `VALUES` of these codes, as integers."""
        return self.bits.to(codes.device)[codes]


def encodings_of(view: torch.Tensor, spec: Any) -> Iterator[Encoding]:
    """Every way in which values may be kept in a cache."""
    if spec.kv_quant_mode.name == "FP8_PER_TENSOR":
        if view.element_size() == 1:
            for name, dtype in _FLOAT8.items():
                yield Encoding(name, VALUES.to(dtype).view(torch.uint8))
    elif view.is_floating_point() and view.element_size() > 1:
        yield Encoding("", VALUES.to(view.dtype).view(integers_of(view)))


def integers_of(view: torch.Tensor) -> torch.dtype:
    """Integers of the size of a view's elements: every device can move and compare them."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]


def codes_of(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Indices into `VALUES`, random but always the same, without touching the generators of the engine."""
    count = math.prod(shape)
    source = torch.Generator().manual_seed(seed)
    return torch.randint(len(VALUES), (count,), generator=source).to(device).view(shape)


def values_of(codes: torch.Tensor, scales: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """What to give a backend so that it stores these codes under these scales, `[T, heads, elements]`."""
    heads = codes.shape[1]
    scale = torch.tensor(scales or (1.0,)).expand(heads)
    table = (VALUES[None, :] * scale[:, None]).to(dtype).to(codes.device)
    return table[torch.arange(heads, device=codes.device)[None, :, None], codes]


_MODES = ("NONE", "FP8_PER_TENSOR")


class CannotBeTried(Exception):
    """A backend that cannot be tried; the text says why."""


@dataclass(frozen=True, slots=True)
class Write:
    """What is written in one round: the blocks' tokens, and codes `[T, heads, elements]` of every kind."""

    blocks: torch.Tensor
    tokens: torch.Tensor
    codes: dict[str, torch.Tensor]


class Backend:
    """A layer's own cache write.

    Attributes:
        elements: by kind how many elements a token of a head has.
        heads: heads that are written.

    Raises:
        CannotBeTried: it has none that can be called.
    """

    def __init__(self, layer: Any, spec: Any, dtype: torch.dtype) -> None:
        impl: Any = getattr(layer, "impl", None)
        if spec.kv_quant_mode.name not in _MODES:
            raise CannotBeTried(f"quantisation {spec.kv_quant_mode.name} is not tried")
        if not hasattr(impl, "do_kv_cache_update"):
            raise CannotBeTried("it has no cache write of its own")
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise CannotBeTried("another layer writes its cache")
        # Writing must leave nothing behind: attributes that it sets go to copies, tensors that it fills as well.
        self._impl = copy.copy(impl)
        self._layer = _Borrowed(layer)
        self._dtype = dtype
        self._is_mla = is_mla(spec)
        self._latent = int(layer.kv_lora_rank) if self._is_mla else 0
        self.heads = int(spec.num_kv_heads)
        self.elements = (
            {"mla": int(spec.head_size)} if self._is_mla else {"k": int(spec.head_size), "v": int(spec.head_size_v)}
        )

    def write(self, scratch: Scratch, what: Write, fill: int, scales: Scales) -> torch.Tensor:
        """Fill the memory with a byte, write, and return all of it."""
        scratch.raw.fill_(fill)
        slots = what.blocks * scratch.view.shape[2] + what.tokens
        given = {kind: values_of(codes, scales.get(kind, ()), self._dtype) for kind, codes in what.codes.items()}
        if self._is_mla:
            rows = given["mla"]
            self._impl.do_kv_cache_update(
                rows[:, 0, : self._latent].contiguous(),
                rows[:, :, self._latent :].contiguous(),
                scratch.view.squeeze(1),
                slots,
                self._layer.kv_cache_dtype,
                self._layer._k_scale,
            )
        else:
            self._impl.do_kv_cache_update(self._layer, given["k"], given["v"], scratch.view, slots)
        return scratch.raw


class _Borrowed:
    """A layer to read from. What is set stays here, and tensors are copies."""

    def __init__(self, layer: Any) -> None:
        self.__dict__["_kvferry_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_kvferry_layer"], name)
        return value.clone() if isinstance(value, torch.Tensor) else value
