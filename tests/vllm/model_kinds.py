"""Models of every kind, how their engines are started, and what a prompt takes in their caches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scripts.accuracy.model import default_cache_dir
from tests.vllm.forked_engine_child import EngineSpec
from tests.vllm.small_models import small_model

CORES = {1: "0", 2: "0|1"}

K_AND_V = 2 * 2 * 32 * 4
"""Bytes of a token in one attention layer: K and V of 2 heads of 32 numbers in float32."""


@dataclass(frozen=True)
class Kind:
    """A model, how its engines are started, and what one of its prompts takes in their caches.

    Attributes:
        block_size: None for the engine's own choice.
        block_tokens, block_bytes: of an attention block, all layers that keep every token.
        windowed_bytes: of an attention block, all layers that keep 128 tokens.
        state_bytes: of a prompt's states. They have seen all tokens but the last; so have the attention layers then.
        copied: every rank holds all of it.
        whole_bytes: of small states two ranks read all of this each, which is cheaper than their many pieces.
    """

    model: str
    block_size: int | None = None
    block_tokens: int = 128
    block_bytes: int = 0
    windowed_bytes: int = 0
    state_bytes: int = 0
    copied: bool = False
    whole_bytes: int = 0
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_hybrid(self) -> bool:
        """Whether a part of its cache holds every token, and a part does not."""
        return bool(self.block_bytes and (self.windowed_bytes or self.state_bytes))

    def spec(
        self, name: str, tp: int = 1, cores: str = "", **engine_args: Any
    ) -> EngineSpec:
        return EngineSpec(
            f"{self.model}-{name}",
            str(small_model(self.model, default_cache_dir())),
            "kv_both",
            tp=tp,
            block_size=self.block_size,
            cores=cores or CORES[tp],
            engine_args={"max_model_len": 512, **self.engine_args, **engine_args},
        )

    def needed(self, prompt: Sequence[int], ranks: int = 1) -> int:
        """Bytes that a decoder reads of a prompt."""
        blocks = math.ceil((len(prompt) - (self.state_bytes > 0)) / self.block_tokens)
        left = max(0, len(prompt) - 128 + 1) // self.block_tokens
        bytes_of_tokens = (
            blocks * self.block_bytes + (blocks - left) * self.windowed_bytes
        )
        if self.copied:
            return ranks * bytes_of_tokens
        return bytes_of_tokens + self.state_bytes + (ranks - 1) * self.whole_bytes


MAMBA2 = 4 * (8 * 32 * 16 + 3 * (256 + 2 * 2 * 16))
"""Bytes of one layer's states: 8 heads of 32 × 16 numbers, and 3 columns of x, B and C."""

PARALLEL_MAMBA2 = 4 * (8 * 16 * 16 + 3 * (128 + 2 * 2 * 16))
GDN_COLUMNS = 3 * (2 * 2 * 64 + 4 * 64)

FLOAT32_MLA = {
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "attention_backend": "CPU_MLA",
}
"""vLLM's rotation on CPU takes keys for contiguous that are not, those of MLA's prefill: it answers otherwise on two
ranks than on one, and otherwise than transformers. Its plain PyTorch rotation is right. And on processors with AMX it
would choose a backend that knows no float32."""

LLAMA = Kind("small-llama-4", 128, block_bytes=128 * 2 * 2 * K_AND_V)
DRAFTED = Kind("small-llama-4", 128, block_bytes=128 * (2 * 2 + 1) * K_AND_V)
EXACT = (
    Kind("small-llama-8", 128, block_bytes=128 * 2 * 4 * K_AND_V),
    Kind(
        "small-windowed",
        128,
        block_bytes=128 * K_AND_V,
        windowed_bytes=128 * 3 * K_AND_V,
    ),
    Kind(
        "small-mla",
        block_tokens=16,
        block_bytes=16 * 2 * (512 + 64) * 4,
        copied=True,
        engine_args=FLOAT32_MLA,
    ),
    Kind("small-mamba2", state_bytes=2 * MAMBA2, whole_bytes=2 * MAMBA2),
    Kind(
        "small-mamba2-hybrid",
        block_bytes=128 * K_AND_V,
        state_bytes=2 * MAMBA2,
        whole_bytes=2 * MAMBA2,
    ),
    Kind(
        "small-parallel-hybrid",
        block_bytes=128 * 2 * K_AND_V,
        state_bytes=2 * PARALLEL_MAMBA2,
        whole_bytes=2 * PARALLEL_MAMBA2,
    ),
)
GDN_STATE_BYTES, GDN_BLOCK = (
    (4, 384) if torch.cpu._is_avx512_bf16_supported() else (2, 256)
)
"""With AVX-512 for bfloat16, vLLM keeps temporal states in float32, and an attention block is as large as a state."""
GDN = Kind(
    "small-gdn-hybrid",
    block_tokens=GDN_BLOCK,
    block_bytes=GDN_BLOCK * K_AND_V // 2,
    state_bytes=2 * (GDN_STATE_BYTES * 4 * 64 * 64 + 2 * GDN_COLUMNS),
    whole_bytes=2 * 2 * GDN_COLUMNS,
    engine_args={"dtype": "bfloat16"},
)
"""vLLM's kernels for it on CPU know no other type."""
