"""What a probe writes, and what that is in memory under every supposition of how a cache is quantised."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connector.arrangement import is_mla
from kvferry.protocol.errors import InvalidConfig

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
        told = {kind: getattr(layer, f"_{name}{suffix}", None) for kind, name in names.items()}
        if None in told.values():
            continue
        scales = {kind: tuple(torch.as_tensor(value).flatten().tolist()) for kind, value in told.items()}
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
