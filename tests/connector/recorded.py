"""Models that the CPU engine may not run: the specs of their layers, and vLLM's configuration of them.

Every layer's cache spec is made with vLLM's classes and calculators as that model's layers make it, small. Groups,
pages of one size, the allocation and the views are vLLM's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from tests.connector.state_models import STATE_MODELS, StateModel

Specs = dict[str, Any]
HEAD_SIZE, HEADS, BLOCK = 8, 4, 32


@dataclass(frozen=True)
class Recorded:
    """A kind of model.

    Attributes:
        specs: by layer the cache spec of one rank of `tp`; attention has `HEADS` heads on all ranks together.
        packings: by layer, where the cache is not CPU attention's.
        states: of the layers with recurrent states.
    """

    specs: Callable[[int], Specs]
    packings: Mapping[str, str]
    states: Mapping[str, StateModel]


def attention(tp: int, kind: Any = FullAttentionSpec, **changed: Any) -> Any:
    usual = {"block_size": BLOCK, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    return kind(**{**usual, "num_kv_heads": max(1, HEADS // tp), **changed})


def latent(**changed: Any) -> Any:
    usual = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 24,
        "dtype": torch.bfloat16,
    }
    return MLAAttentionSpec(**{**usual, **changed})


def _model(
    specs: Callable[[int], Specs],
    packings: Mapping[str, str] | None = None,
    states: Mapping[str, StateModel] | None = None,
) -> Recorded:
    return Recorded(specs, packings or {}, states or {})


def hybrid(name: str, pattern: str, **changed: Any) -> Recorded:
    """Attention (`a`) and states (`s`) in this order.

    As vLLM's platforms do, attention gets blocks so large that a page holds a state, and the page of a state is padded
    to it: blocks and pages depend on the ranks.
    """
    model = STATE_MODELS[name]
    layers = [
        f"layers.{index}.{'attn' if what == 'a' else 'mixer'}"
        for index, what in enumerate(pattern)
    ]

    def specs(tp: int) -> Specs:
        one = attention(tp)
        state = model.spec(tp, **changed)
        tokens = BLOCK * math.ceil(state.state_content_size_bytes / one.page_size_bytes)
        page = attention(tp, block_size=tokens).page_size_bytes
        if state.mamba_cache_mode == "align":
            state = replace(state, block_size=tokens)
        padded = replace(state, page_size_padded=page)
        return {
            layer: attention(tp, block_size=tokens) if "attn" in layer else padded
            for layer in layers
        }

    return _model(specs, states={layer: model for layer in layers if "mixer" in layer})


def _layers(count: int, of: Callable[[int, int], Any]) -> Callable[[int], Specs]:
    return lambda tp: {f"layers.{index}.attn": of(index, tp) for index in range(count)}


def _gemma(index: int, tp: int) -> Any:
    return (
        attention(tp)
        if index % 3 == 2
        else attention(tp, SlidingWindowSpec, sliding_window=40)
    )


def _llama4(index: int, tp: int) -> Any:
    return (
        attention(tp)
        if index % 4 == 3
        else attention(tp, ChunkedLocalAttentionSpec, attention_chunk_size=64)
    )


def _deepseek(tp: int) -> Specs:
    indexer = latent(
        head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    layers = ("layers.0", "layers.1")
    return {
        name: spec
        for at in layers
        for name, spec in ((f"{at}.mla", latent()), (f"{at}.indexer.k_cache", indexer))
    }


def _with_draft(tp: int) -> Specs:
    """A drafter's layer comes last, and its heads may be wider."""
    return {
        **_layers(2, lambda _, tp: attention(tp))(tp),
        "draft.layers.2.attn": attention(tp, head_size=16),
    }


RECORDED = {
    "Llama": _model(_layers(3, lambda _, tp: attention(tp))),
    "DeepSeek-V3.2": _model(
        _deepseek,
        packings={
            f"layers.{at}.{name}": packing
            for at in (0, 1)
            for name, packing in (
                ("mla", "cpu_mla"),
                ("indexer.k_cache", "deepseek_v32_indexer"),
            )
        },
    ),
    "Gemma-3": _model(_layers(6, _gemma)),
    "Llama-4": _model(_layers(4, _llama4)),
    "Jamba": hybrid("Mamba-1", "ssas"),
    "Nemotron-H": hybrid("Mamba-2", "sassas"),
    "Granite, one group": hybrid("Mamba-2, one group", "ssas"),
    "Qwen3-Next": hybrid("gated delta net", "sssa"),
    "LFM2": hybrid("short convolution", "ssas"),
    "MiniMax": hybrid("linear attention", "ssas"),
    "Qwen3-Next, prefix caching and drafts": hybrid(
        "gated delta net", "sssa", mamba_cache_mode="align", num_speculative_blocks=2
    ),
    "Llama with a drafter": _model(_with_draft),
}
