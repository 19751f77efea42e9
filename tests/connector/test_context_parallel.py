"""The check with vLLM's own configuration, layers, backends and implementations. Its oracle is vLLM's function.

No process group is made: a stand-in for it gives implementations their number of decode context parallel ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.config import ParallelConfig, SpeculativeConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.worker import cp_utils

from kvferry.connector.context_parallel import (
    AttentionRefused,
    check_attention_cp_compatibility,
)
from tests.harness.core.configs import HEAD_SIZE, HEADS, vllm_config

SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4))
"""Ranks of prefill and of decode context parallelism, with 2 tensor parallel ranks."""
BACKENDS = (
    CPUAttentionBackend,
    CPUMLABackend,
    TritonMLABackend,
    FlashMLASparseBackend,
    Mamba2AttentionBackend,
)
DRAFT = "draft.0.attn"


class Layer(AttentionLayerBase):  # type: ignore[misc]
    """A layer of any backend. Its implementation is vLLM's, made without weights; a recurrent state has none."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        if backend is not Mamba2AttentionBackend:
            made = backend.get_impl_cls()
            self.impl = made.__new__(made)

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        raise NotImplementedError


def configured(
    *backends: Any,
    pcp: int = 1,
    dcp: int = 1,
    interleave: int = 1,
    drafts: bool = False,
    draft_ranks: int = 1,
) -> Any:
    """vLLM's configuration with the layers `layers.0` … of these backends, and with a drafter's.

    vLLM's CPU platform refuses prefill context parallelism as a whole, so the sizes are set when the rest is made.

    Args:
        draft_ranks: decode context parallel ranks of the drafter's layer, which is CPU_ATTN's.
    """
    config = vllm_config("NixlConnector", module="kvferry.connector")
    if drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=2,
            prompt_lookup_max=3,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    config.parallel_config = ParallelConfig(
        tensor_parallel_size=2,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        distributed_executor_backend="mp",
    )
    layers = config.compilation_config.static_forward_context
    layers.update(
        {
            f"layers.{index}": _built(config, dcp, Layer, backend)
            for index, backend in enumerate(backends)
        }
    )
    if drafts:
        layers[DRAFT] = _built(config, draft_ranks, Layer, CPUAttentionBackend)
    return config


def _built(
    config: Any, ranks: int, make: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """The implementation made in a process that is one of `dcp` decode context parallel ranks."""
    group = SimpleNamespace(world_size=ranks, rank_in_group=0) if ranks > 1 else None
    with (
        set_current_vllm_config(config),
        mock.patch.object(parallel_state, "_DCP", group),
    ):
        return make(*arguments, **named)


def reasons(config: Any, target: Container[str] | None = None) -> list[str]:
    with pytest.raises(AttentionRefused) as caught:
        check_attention_cp_compatibility(config, target)
    return [str(reason) for reason in caught.value.reasons]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: str(backend.__name__))
def test_what_vllm_refuses_is_refused_and_nothing_else(
    backend: Any, drafts: bool
) -> None:
    seen = set()
    targets: tuple[set[str] | None, ...] = (None, {"layers.0"}, {DRAFT})
    for (pcp, dcp), interleave, target in itertools.product(SIZES, (1, 16), targets):
        for draft_ranks in {1, dcp}:
            config = configured(
                backend,
                pcp=pcp,
                dcp=dcp,
                interleave=interleave,
                drafts=drafts,
                draft_ranks=draft_ranks,
            )
            refused = []
            for check, error in (
                (cp_utils.check_attention_cp_compatibility, AssertionError),
                (check_attention_cp_compatibility, AttentionRefused),
            ):
                try:
                    check(config, target)
                    refused.append(False)
                except error:
                    refused.append(True)
            assert refused[0] == refused[1], (pcp, dcp, interleave, target, draft_ranks)
            seen.add(refused[0])
    never = not drafts and backend in (FlashMLASparseBackend, TritonMLABackend)
    assert seen == ({False} if never else {False, True})


def test_attention_of_heads_that_vllm_built_cannot_be_context_parallel() -> None:
    config = configured(pcp=2, dcp=2)
    heads: Mapping[str, Any] = {
        "num_kv_heads": HEADS,
        "cache_config": config.cache_config,
        "prefix": "layers.7.attn",
    }
    _built(config, 2, Attention, HEADS, HEAD_SIZE, 1.0, **heads)
    assert reasons(config) == [
        "CPU_ATTN of layers.7.attn cannot do prefill context parallelism (supports_pcp is False, not True)",
        "CPU_ATTN of layers.7.attn cannot do decode context parallelism "
        "(need_to_return_lse_for_decode is False, not True)",
    ]
    with pytest.raises(
        AttentionRefused,
        match=re.escape("context parallelism of pcp=2, dcp=2, interleave=1: CPU_ATTN"),
    ):
        check_attention_cp_compatibility(config)
