"""FlashAttention 3 in torch, as vLLM calls it: prompts one after the other, or a cache of blocks."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch

from tests.gpu_emulation.emulation.aten import register


def install(_module: ModuleType) -> None:
    """Take the place of its kernels."""
    register("_vllm_fa3_C", "fwd", _forward)
    register("_vllm_fa3_C", "get_scheduler_metadata", _no_metadata)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_new: None,
    value_new: None,
    query_value: None,
    out: torch.Tensor | None,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor | None,
    key_new_starts: None,
    query_lengths: None,
    key_lengths: torch.Tensor | None,
    longest_query: int,
    longest_key: int,
    block_table: torch.Tensor | None,
    *rest: Any,
) -> list[torch.Tensor]:
    """Attention of each sequence by itself; the output and the logarithms of the softmax' sums."""
    scale, causal, left, right, softcap = rest[8:13]
    if query_value is not None or softcap or rest[18] is not None:
        raise NotImplementedError("of FlashAttention 3: q_v, softcap, s_aux")
    if out is None:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    sums = torch.empty(query.shape[1], query.shape[0])
    for number, (start, end) in enumerate(_spans(query_starts)):
        if block_table is None:
            if key_starts is None:
                raise NotImplementedError(
                    "of FlashAttention 3: keys without a table or starts"
                )
            first, last = _spans(key_starts)[number]
            keys = key[first:last]
            values = value[first:last]
        else:
            if key_lengths is None:
                raise NotImplementedError(
                    "of FlashAttention 3: a table without lengths"
                )
            blocks = block_table[number].long().clamp(0, key.shape[0] - 1)
            length = int(key_lengths[number])
            keys = key[blocks].flatten(0, 1)[:length]
            values = value[blocks].flatten(0, 1)[:length]
        mask = _mask(end - start, len(keys), causal=causal, left=left, right=right)
        out[start:end], sums[:, start:end] = _attention(
            query[start:end], keys, values, scale, mask
        )
    empty = torch.empty(0)
    return [out, sums, empty, empty]


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence; several heads of the query share one of the keys."""
    shared = query.shape[1] // keys.shape[1]
    wide_keys = keys.float().repeat_interleave(shared, 1)
    wide_values = values.float().repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide_keys) * scale
    scores.masked_fill_(~mask, -torch.inf)
    sums = scores.logsumexp(-1)
    weights = (scores - sums[..., None]).exp().nan_to_num()  # no key at all: zeros
    return torch.einsum("hqk,khd->qhd", weights, wide_values).to(query.dtype), sums


def _mask(
    queries: int, keys: int, *, causal: bool, left: int, right: int
) -> torch.Tensor:
    """Which keys each query sees; both end at the same token. A side of -1 has no bound."""
    distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        right = 0
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    return seen


def _spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    numbers = starts.tolist()
    return list(itertools.pairwise(numbers))


def _no_metadata(*_arguments: Any) -> torch.Tensor:
    """How a GPU shares the work out; nothing here reads it."""
    return torch.zeros(16, dtype=torch.int32)
