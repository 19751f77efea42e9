"""vLLM's own kernels that the cases need, in torch, as its documentation and its `forward_native` define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

import torch

from tests.gpu_emulation.emulation.aten import register

_PLAIN = ("auto", "bfloat16", "float16", "float32")
"""Types of a cache whose numbers are the model's, without scales."""


def install(_module: ModuleType) -> None:
    """Take the place of vLLM's kernels."""
    for namespace, functions in _FUNCTIONS.items():
        for name, function in functions.items():
            register(namespace, name, function)


def _rms_norm(
    result: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
) -> None:
    normed = _normed(hidden.float(), epsilon).to(hidden.dtype)
    result.copy_(normed if weight is None else normed * weight)


def _fused_add_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
) -> None:
    total = hidden.float() + residual.float()
    residual.copy_(total)
    normed = _normed(total, epsilon).to(hidden.dtype)
    hidden.copy_(normed if weight is None else normed * weight)


def _normed(hidden: torch.Tensor, epsilon: float) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)


def _silu_and_mul(result: torch.Tensor, hidden: torch.Tensor) -> None:
    gate, up = hidden.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def _gelu_tanh_and_mul(result: torch.Tensor, hidden: torch.Tensor) -> None:
    gate, up = hidden.chunk(2, -1)
    result.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    table: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    if rope_dim_offset or inverse:
        raise NotImplementedError("of rotary_embedding: rope_dim_offset, inverse")
    cos, sin = (
        part[:, None] for part in table[positions.flatten()].float().chunk(2, -1)
    )
    size = 2 * cos.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        turned = states.view(positions.numel(), -1, head_size)[..., :size]
        # Pairs are (i, i + half) in NeoX's style, (2i, 2i + 1) in GPT-J's.
        first, second = (
            turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
        )
        one, other = first.float().clone(), second.float().clone()
        first.copy_(one * cos - other * sin)
        second.copy_(other * cos + one * sin)


def _reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    key_scale: torch.Tensor,
    value_scale: torch.Tensor,
) -> None:
    if kv_cache_dtype not in _PLAIN:
        raise NotImplementedError(f"of reshape_and_cache_flash: {kv_cache_dtype}")
    block_size = key_cache.shape[1]
    for states, cache in ((key, key_cache), (value, value_cache)):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // block_size, slot % block_size] = states[token].to(
                    cache.dtype
                )


def _concat_and_cache_mla(
    latent: torch.Tensor,
    rotary_key: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    if kv_cache_dtype not in _PLAIN:
        raise NotImplementedError(f"of concat_and_cache_mla: {kv_cache_dtype}")
    rows = torch.cat((latent, rotary_key.flatten(1)), -1)
    block_size = cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // block_size, slot % block_size] = rows[token].to(cache.dtype)


def _topk_softmax(
    weights: torch.Tensor,
    experts: torch.Tensor,
    rows: torch.Tensor,
    gating: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    if bias is not None:
        raise NotImplementedError("of topk_softmax: a bias")
    best, chosen = gating.float().softmax(-1).topk(weights.shape[-1], -1)
    if renormalize:
        best = best / best.sum(-1, keepdim=True)
    weights.copy_(best)
    experts.copy_(chosen)
    rows.copy_(torch.arange(rows.numel()).view(rows.shape[::-1]).t())


def _moe_align_block_size(
    experts: torch.Tensor,
    expert_count: int,
    block_size: int,
    sorted_rows: torch.Tensor,
    block_experts: torch.Tensor,
    row_count: torch.Tensor,
    expert_map: torch.Tensor | None,
    scatter: torch.Tensor | None = None,
) -> None:
    """The rows of each expert in blocks of its own, the last of which is filled with a number that is no row."""
    if expert_map is not None or scatter is not None:
        raise NotImplementedError(
            "of moe_align_block_size: a map of experts, scatter_idx"
        )
    flat = experts.flatten()
    sorted_rows.fill_(flat.numel())
    block_experts.zero_()
    start = 0
    for expert in range(expert_count):
        rows = (flat == expert).nonzero().flatten()
        blocks = -(-len(rows) // block_size)
        sorted_rows[start : start + len(rows)] = rows.to(sorted_rows.dtype)
        first = start // block_size
        block_experts[first : first + blocks] = expert
        start += blocks * block_size
    row_count.fill_(start)


def _moe_sum(
    outputs: torch.Tensor,
    result: torch.Tensor,
    experts: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    if expert_map is not None:
        raise NotImplementedError("of moe_sum: a map of experts")
    result.copy_(outputs.float().sum(1))


_FUNCTIONS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "_C": {
        "rms_norm": _rms_norm,
        "fused_add_rms_norm": _fused_add_rms_norm,
        "silu_and_mul": _silu_and_mul,
        "gelu_tanh_and_mul": _gelu_tanh_and_mul,
        "rotary_embedding": _rotary_embedding,
    },
    "_moe_C": {
        "topk_softmax": _topk_softmax,
        "moe_align_block_size": _moe_align_block_size,
        "moe_sum": _moe_sum,
    },
    "_C_cache_ops": {
        "concat_and_cache_mla": _concat_and_cache_mla,
        "reshape_and_cache_flash": _reshape_and_cache_flash,
    },
}
