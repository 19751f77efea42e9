"""What vLLM's own attention backends say of context parallelism, in the attributes that are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

from kvferry.worker.context_parallel.compatibility import AttentionRefused, check_attention_cp_compatibility


def layers_of(backend: Any, merged: bool = False) -> dict[str, object]:
    """One layer with a backend's own implementation, which has not been built for any number of ranks."""
    impl = backend.get_impl_cls()
    built = SimpleNamespace(need_to_return_lse_for_decode=merged and impl.can_return_lse_for_decode)
    return {"layers.0": SimpleNamespace(get_attn_backend=lambda: backend, impl=built)}


def test_attention_of_heads_cannot_share_out_a_prompt() -> None:
    with pytest.raises(AttentionRefused, match=r"CPU_ATTN of layers\.0 cannot do prefill context parallelism"):
        check_attention_cp_compatibility(layers_of(CPUAttentionBackend), pcp=2)


def test_latent_attention_can() -> None:
    check_attention_cp_compatibility(layers_of(TritonMLABackend), pcp=2)


def test_latent_attention_without_log_sum_exp_cannot_share_out_a_cache() -> None:
    check_attention_cp_compatibility(layers_of(TritonMLABackend, merged=True), dcp=2)
    with pytest.raises(AttentionRefused, match=r"CPU_MLA of layers\.0 cannot do decode context parallelism"):
        check_attention_cp_compatibility(layers_of(CPUMLABackend, merged=True), dcp=2)
