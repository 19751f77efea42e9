"""Small models of every kind that engines serve, with random weights that are always the same.

A few megabytes each, written in seconds into the cache directory when they are not there; no weights are kept in the
repository. They have no tokenizer: prompts are token ids below `VOCABULARY`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.accuracy.model import whole

VOCABULARY = 1024
FIRST_TOKEN = 3
"""Smaller ids have a meaning to engines (padding, begin, end)."""

_FORMAT = 2
"""Counts changes of how they are made: another number, another folder."""

# Untied embeddings and wide weights: otherwise all logits are nearly equal and rounding decides.
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Description of a model.

    Attributes:
        family: the prefix of transformers' classes `…Config` and `…ForCausalLM`.
        config: what differs from the settings that all have.
        config_class: where its name does not follow from the family.
        without: settings that the family does not know.
    """

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    config_class: str = ""
    without: frozenset[str] = frozenset()

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of its configuration."""
        return {
            key: value
            for key, value in {**_COMMON, **self.config}.items()
            if key not in self.without
        }


SMALL_MODELS: Mapping[str, SmallModel] = {
    # Llama-like, 4 and 8 KV heads
    "small-llama-4": SmallModel(
        "Llama", {"num_attention_heads": 8, "num_key_value_heads": 4}
    ),
    "small-llama-8": SmallModel(
        "Llama", {"num_attention_heads": 8, "num_key_value_heads": 8}
    ),
    # Llama-like, 30 layers, 1 KV head: thousands of blocks take little memory
    "small-deep": SmallModel(
        "Llama", {"num_hidden_layers": 30, "num_key_value_heads": 1}
    ),
    # Llama-like, one layer: drafts for the others
    "small-draft": SmallModel("Llama", {"num_hidden_layers": 1}),
    # DeepSeek-V2-like, MLA with dense layers; vLLM's CPU kernel wants rows of 512 + 64, its prefill on
    # GPUs knows a few sizes of heads, and (128, 64, 128) is one
    "small-mla": SmallModel(
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    # Gemma-3-like, a window of 128 tokens in three layers, full attention in the fourth
    "small-windowed": SmallModel(
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 128,
            "query_pre_attn_scalar": 32,
        },
        config_class="Gemma3TextConfig",
    ),
    # GraniteMoeHybrid-like, attention between two Mamba-2 layers
    "small-mamba2-hybrid": SmallModel(
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 128,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
            "position_embedding_type": "rope",
        },
        without=frozenset({"head_dim"}),
    ),
    # Falcon-H1-like, attention and Mamba-2 side by side in every layer
    "small-parallel-hybrid": SmallModel(
        "FalconH1",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
        },
    ),
    # Qwen3-Next-like, attention between two layers of gated delta net, with experts
    "small-gdn-hybrid": SmallModel(
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    # Mamba-2 alone
    "small-mamba2": SmallModel(
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 2,
            "expand": 2,
            "chunk_size": 64,
        },
        without=frozenset(
            {"num_attention_heads", "num_key_value_heads", "intermediate_size"}
        ),
    ),
    # Jamba-like, attention between two Mamba-1 layers
    "small-mamba1-hybrid": SmallModel(
        "Jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 100,
            "expert_layer_offset": 50,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 16,
        },
        without=frozenset({"head_dim"}),
    ),
}


def small_model(name: str, cache_dir: Path) -> Path:
    """The folder of one of `SMALL_MODELS`, made when it is not there.

    Raises:
        KeyError: there is none of that name.
    """
    return made_once(
        name, cache_dir, lambda folder: made_of(name).save_pretrained(folder)
    )


def made_once(name: str, cache_dir: Path, make: Callable[[Path], None]) -> Path:
    """The folder of a model that `make` fills when it is not there. Runs beside others may do so at the same time."""
    folder = cache_dir / "models" / f"{name}-{_FORMAT}"
    if not folder.exists():
        with whole(folder) as partial:
            make(partial)
    return folder


def made_of(name: str, **changed: Any) -> Any:
    """One of `SMALL_MODELS` as transformers has it, in float32, with these settings changed."""
    import torch
    import transformers

    logging: Any = transformers.logging
    logging.disable_progress_bar()
    model = SMALL_MODELS[name]
    of_family = getattr(transformers, model.config_class or f"{model.family}Config")
    model_class = getattr(transformers, f"{model.family}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(of_family(**model.settings | changed)).to(torch.float32)
