"""Backends with different cache writes, and layers that have them, as input of the probe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from kvferry.connector.layout.block_layout import BlockLayout
from kvferry.connector.layout.probe import block_layouts_of
from tests.connector.caches import config_of, group, views_of

HEADS, TOKENS, WIDTH = 2, 16, 8
LAYER = "layers.1"


class Rows:
    """The usual one: a row `[k | v]` for a (head, token). Every other backend here changes one thing about it."""

    def __init__(self) -> None:
        self.calls = 0

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        self.calls += 1
        blocks, tokens = (
            slot_mapping // kv_cache.shape[2],
            slot_mapping % kv_cache.shape[2],
        )
        self.put(
            layer, kv_cache, blocks, tokens, *self.stored(layer, kv_cache, key, value)
        )

    def stored(
        self, layer: Any, kv_cache: Any, key: Any, value: Any
    ) -> tuple[Any, Any]:
        return key.to(kv_cache.dtype), value.to(kv_cache.dtype)

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        cache[blocks, :, tokens, : key.shape[2]] = key
        cache[blocks, :, tokens, key.shape[2] :] = value


class OneTokenElsewhere(Rows):
    """Wrong for the last two tokens of a block only."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        last = cache.shape[2] - 1
        swapped = torch.where(
            tokens == last, last - 1, torch.where(tokens == last - 1, last, tokens)
        )
        super().put(layer, cache, blocks, swapped, key, value)


class HeadsExchanged(Rows):
    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        super().put(layer, cache, blocks, tokens, key.flip(1), value.flip(1))


class OneElementRounded(Rows):
    """The last element of V of one token of one head is wrong."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        super().put(layer, cache, blocks, tokens, key, value)
        cache[blocks[:1], -1, tokens[:1], -1] *= 1.5


class WritesOutside(Rows):
    """Writes into the last block, which has none of the slots."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        super().put(layer, cache, blocks, tokens, key, value)
        cache[0, 0, 0, 0] = 0


class WritesWhatWasThere(Rows):
    """Fills memory outside the slots with a byte that the probe may have put there itself."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        super().put(layer, cache, blocks, tokens, key, value)
        cache.view(torch.uint8)[:, -1, -1, -1] = 0x55
        super().put(layer, cache, blocks, tokens, key, value)


class WritesNothing(Rows):
    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        pass


class Raises(Rows):
    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        raise RuntimeError("no kernel image is available\nfor execution on the device")


class Interleaved(Rows):
    """K and V of a head in an order that no pattern has, but each head by itself."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        cache[blocks, :, tokens, 0::2] = key
        cache[blocks, :, tokens, 1::2] = value


class Constant(Rows):
    """Every head stores the same values, whatever its input."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        cache[blocks, :, tokens] = 1


class NotedInAll(Interleaved):
    """Every head keeps a sum of all heads' keys in place of its first value."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        super().put(layer, cache, blocks, tokens, key, value)
        cache[blocks, :, tokens, 1] = key.sum(dim=(1, 2)).to(cache.dtype)[:, None]


class TurnedByHead(Interleaved):
    """The same, but the position of a token depends on its head."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        for head in range(cache.shape[1]):
            there = (tokens + head) % cache.shape[2]
            cache[blocks, head, there, 0::2] = key[:, head]
            cache[blocks, head, there, 1::2] = value[:, head]


class Planes(Rows):
    """K and V in two slots in place of heads."""

    def put(
        self, layer: Any, cache: Any, blocks: Any, tokens: Any, key: Any, value: Any
    ) -> None:
        cache[blocks, 0, tokens] = key.flatten(1)
        cache[blocks, 1, tokens] = value.flatten(1)


class Float8(Rows):
    """Rows of float8 in bytes. `use` names what it takes the scales from."""

    def __init__(self, dtype: torch.dtype, use: str = "_scale") -> None:
        super().__init__()
        self.dtype, self.use = dtype, use

    def stored(
        self, layer: Any, kv_cache: Any, key: Any, value: Any
    ) -> tuple[Any, Any]:
        return self._cast(key, layer, "k", kv_cache), self._cast(
            value, layer, "v", kv_cache
        )

    def _cast(self, values: Any, layer: Any, kind: str, kv_cache: Any) -> Any:
        scale = (
            torch.as_tensor(getattr(layer, f"_{kind}{self.use}"))
            if self.use
            else torch.ones(1)
        )
        scaled = values.float() / scale.reshape(1, -1, 1)
        return scaled.to(self.dtype).view(kv_cache.dtype)


def layer_of(impl: Any, name: str = "SOME_BACKEND", **attributes: Any) -> Any:
    """The attributes of vLLM's attention layer that the probe reads."""
    backend = SimpleNamespace(get_name=lambda: name)
    return SimpleNamespace(impl=impl, get_attn_backend=lambda: backend, **attributes)


def float8_layer(
    impl: Any, k_scale: Any, v_scale: Any, cache_dtype: str = "fp8"
) -> Any:
    """A layer with static scales, stored as in vLLM: as tensors, and as a number, which is the largest of them."""
    tensors = [torch.tensor(scale, dtype=torch.float32) for scale in (k_scale, v_scale)]
    return layer_of(
        impl,
        kv_cache_dtype=cache_dtype,
        _k_scale=tensors[0],
        _v_scale=tensors[1],
        _k_scale_float=tensors[0].max().item(),
        _v_scale_float=tensors[1].max().item(),
    )


def spec_of(cache_dtype: str = "auto", **changed: Any) -> Any:
    usual: dict[str, Any] = {
        "block_size": TOKENS,
        "num_kv_heads": HEADS,
        "head_size": WIDTH,
        "dtype": torch.bfloat16,
    }
    if cache_dtype != "auto":
        usual |= {"dtype": torch.uint8, "kv_quant_mode": get_kv_quant_mode(cache_dtype)}
    return FullAttentionSpec(**{**usual, **changed})


class Written:
    """The caches of two layers of one kind, and the probe's results for them."""

    def __init__(
        self,
        layer: Any,
        spec: Any = None,
        layout: str = "LBHNC",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layer, self.spec, self.dtype = layer, spec or spec_of(), dtype
        self.config = config_of(group(self.spec), layout=layout)
        self.views = views_of(self.config, layout)
        self.view = self.views[LAYER]

    def block_layout(self) -> BlockLayout:
        found = block_layouts_of(
            dict.fromkeys(self.views, self.layer), self.views, self.config, self.dtype
        )
        assert len({repr(one) for one in found.values()}) == 1
        return found[LAYER]
