"""The policy of a cache group, from its cache spec: the tokens in its blocks, or why they cannot be transferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.protocol.errors import InvalidConfig

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

STATIC_SCALES = ("NONE", "FP8_PER_TENSOR")
"""Quantisation modes whose scales belong to the weights; others keep scales beside the cache, or change them."""

_EXPECTED = (
    "full attention, MLA, sliding-window or chunked local attention, or the state of a Mamba, a gated delta net, "
    "a short convolution or linear attention"
)
_REASONS = {
    "CircularBufferSpec": "a ring buffer of keys that are not compressed yet",
    "RSWASpec": "a window over answers only, whose gaps are freed",
    "HiddenStateCacheSpec": "hidden states, which no decoder reads",
    "CrossAttentionSpec": "keys of an encoder, which belong to no token of the prompt",
    "EncoderOnlyAttentionSpec": "an encoder's layer, which has no cache",
    "HiSparseHotSpec": "a replica of pages in host memory",
    "HiSparseResidentSpec": "a replica of pages in host memory",
}


def policy_of(layer: str, spec: KVCacheSpec) -> tuple[str, int]:
    """A `CacheGroup`'s policy and window for one layer's cache.

    A window that vLLM keeps as full attention (without the hybrid cache manager) holds every token. Blocks of sinks
    belong to the engine, not to a request.

    Raises:
        InvalidConfig: names the layer and why its cache cannot be transferred.
    """
    from vllm.v1 import kv_cache_interface as specs

    kind: Any = type(spec)
    if kind is specs.MambaSpec:
        return ("state", 0)
    if kind in (specs.FullAttentionSpec, specs.MLAAttentionSpec, specs.SinkFullAttentionSpec):
        policy = ("full", 0)
    elif kind in (specs.SlidingWindowSpec, specs.SlidingWindowMLASpec) and not spec.prefix_replay_tokens:
        # With `prefix_replay_tokens`, a multi-token predictor needs further windows before the last one.
        policy = ("window", spec.sliding_window + spec.extra_retained_tokens)
    elif kind is specs.ChunkedLocalAttentionSpec:
        policy = ("chunk", spec.attention_chunk_size)
    else:
        reason = "a window that is computed again after a load" if spec.prefix_replay_tokens else ""
        reason = _REASONS.get(kind.__name__, reason)
        raise InvalidConfig(_where(layer), f"{kind.__name__}: {reason}" if reason else kind.__name__, _EXPECTED)
    _check_states_and_scales(layer, spec)
    return policy


def _check_states_and_scales(layer: str, spec: Any) -> None:
    """Refuse caches without one state per token, or with scales that do not belong to the weights."""
    if spec.tokens_per_state != 1:
        raise InvalidConfig(_where(layer), f"{spec.tokens_per_state} tokens a state", "one token a state")
    mode = spec.kv_quant_mode.name
    if mode not in STATIC_SCALES:
        raise InvalidConfig(_where(layer), f"quantisation {mode}", f"one of {', '.join(STATIC_SCALES)}")


def _where(layer: str) -> str:
    return f"cache of layer {layer}"
