"""vLLM configurations of engines that consist of a scheduler and a cache only."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK_TOKENS = 16
HEADS, HEAD_SIZE = 2, 32
WINDOW_LAYER = "model.layers.9.self_attn.attn"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}


def layer_of(stage: int) -> str:
    """The name of a stage's layer."""
    return f"model.layers.{stage}.self_attn.attn"


def state_layer(index: int) -> str:
    """The name of a layer with a recurrent state."""
    return f"model.layers.{20 + index}.mixer"


@functools.cache
def model_config(max_tokens: int = 512) -> Any:
    """The smallest model that vLLM's configuration accepts: a config.json, no weights."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-model-"))
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "max_position_embeddings": max(1024, max_tokens)})
    )
    init_none_hash(sha256)
    return ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=max_tokens,
    )


def tokens(count: int, seed: int = 1) -> list[int]:
    """`count` token ids; two seeds share no prefix."""
    return [(seed * 101 + 7 * index) % 1000 + 1 for index in range(count)]


def kv_cache_config(
    num_blocks: int,
    *,
    tp: int = 1,
    window: int = 0,
    stages: Sequence[int] = (0,),
    states: int = 0,
    match_tokens: int | None = None,
    keeps_checkpoints: bool = False,
) -> Any:
    """`num_blocks` blocks of `BLOCK_TOKENS` tokens, layer outermost, on one of `tp` workers.

    One group with a layer for each of the pipeline's `stages`; with a `window` a second group with a layer of its own,
    and `states` more groups with a recurrent state in vLLM's `align` mode.
    As always in vLLM, the groups lie on the same bytes: a block belongs to one of them at a time.

    Args:
        match_tokens: vLLM's `prefix_match_unit`, tokens of which it makes a hash; a block's by default.
        keeps_checkpoints: a forward pass keeps the state at the last block's end within it, as Mamba-2's does.
    """
    shape = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": HEADS // tp,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    full = FullAttentionSpec(**shape)
    groups = [KVCacheGroupSpec([layer_of(stage) for stage in stages], full)]
    if window:
        groups.append(
            KVCacheGroupSpec(
                [WINDOW_LAYER], SlidingWindowSpec(**shape, sliding_window=window)
            )
        )
    for index in range(states):
        state = MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=((HEADS // tp, HEAD_SIZE, HEAD_SIZE),),
            dtypes=(torch.float32,),
            page_size_padded=full.page_size_bytes,
            mamba_type=MambaAttentionBackendEnum.LINEAR,
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=int(keeps_checkpoints),
            prefill_checkpoint_alignment=1 if keeps_checkpoints else None,
        )
        groups.append(KVCacheGroupSpec([state_layer(index)], state))
    page, size = full.page_size_bytes, num_blocks * full.page_size_bytes * len(stages)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=size,
                layers=group.layer_names,
                layer_stride=num_blocks * page,
                block_stride=page,
            )
            for group in groups
        ],
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=match_tokens or BLOCK_TOKENS,
        cache_hit_alignment_tokens=match_tokens or BLOCK_TOKENS,
    )


def vllm_config(
    connector: str,
    *,
    module: str | None = None,
    role: str = "kv_both",
    policy: str = "recompute",
    extra: dict[str, Any] | None = None,
    engine_id: str = "engine-under-test",
    max_num_seqs: int = 8,
    num_blocks: int = 32,
    overlap: bool = False,
    scheduling: str = "fcfs",
    tp: int = 1,
    pp: int = 1,
    shutdown_timeout: int = 0,
    max_tokens: int = 512,
    max_step_tokens: int = 128,
    states: int = 0,
    watermark: float = 0.0,
    otlp_endpoint: str | None = None,
) -> Any:
    """The configuration that the command line would make, for the scheduler and for a worker."""
    config = VllmConfig(
        model_config=model_config(max_tokens),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_step_tokens,
            max_model_len=max_tokens,
            is_encoder_decoder=False,
            watermark=watermark,
            policy=scheduling,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=tp),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra or {},
            engine_id=engine_id,
        ),
        shutdown_timeout=shutdown_timeout,
    )
    config.observability_config.otlp_traces_endpoint = otlp_endpoint
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.kv_cache_layout = "LBHNC"  # as the engine core resolves it
    if states:
        config.cache_config.mamba_cache_mode = "align"
    config.parallel_config.pipeline_parallel_size = (
        pp  # not before: the model has one layer only
    )
    config.parallel_config.world_size = tp * pp
    config.scheduler_config.async_scheduling = (
        overlap  # the CPU platform switches it off while it validates
    )
    return config
