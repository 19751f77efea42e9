"""The check of `kvferry.worker.context_parallel.compatibility` for a model that vLLM has built."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvferry.worker.context_parallel import compatibility

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_attention_cp_compatibility(vllm_config: VllmConfig, target_layer_names: Container[str] | None = None) -> None:
    """Refuse a model whose attention does not support the configured context-parallel sizes.

    It refuses the same models as vLLM's function of this name. Layers enter the configuration when the model is built:
    before that, nothing is refused.

    Args:
        vllm_config: has the layers, the parallel sizes, the interleave and the drafter, if any.
        target_layer_names: the layers that prefill context parallelism splits; None for all. See the worker's check.

    Raises:
        AttentionRefused: names the sizes and, for every backend, the missing features and its layers.
    """
    parallel = vllm_config.parallel_config
    compatibility.check_attention_cp_compatibility(
        get_layers_from_vllm_config(vllm_config, AttentionLayerBase),
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size,
        speculative=vllm_config.speculative_config is not None,
        pcp_layers=target_layer_names,
    )
