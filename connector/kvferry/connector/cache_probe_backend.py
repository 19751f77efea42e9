"""A layer's own cache write, called without an engine around it and without a trace."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connector.arrangement import is_mla
from kvferry.connector.cache_probe_scratch import Scratch
from kvferry.connector.cache_probe_values import Scales, values_of

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
