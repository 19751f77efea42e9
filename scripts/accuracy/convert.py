"""Makes the models that need no hub, each once, in a process of its own:

python -m scripts.accuracy.convert GGUF NAME FOLDER [NAME FOLDER …]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from scripts.accuracy.model import whole
from scripts.accuracy.settings import SMALL_MODELS, TINY_MODELS
from tests.vllm.small_models import made_of

_NOT_KEPT = {
    "architectures",
    "model_type",
    "_name_or_path",
    "quantization_config",
    "transformers_version",
}
_llama: Any = LlamaForCausalLM


def smollm2(gguf: Path, target: Path) -> None:
    """SmolLM2 as a plain Llama in float32."""
    folder, file = str(gguf.parent), gguf.name
    read: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    )
    # A model read from GGUF counts as quantised and cannot be saved; its twin without that mark can.
    kept = {
        key: value
        for key, value in read.config.to_dict().items()
        if key not in _NOT_KEPT
    }
    twin = _llama(LlamaConfig(**kept))
    twin.load_state_dict(read.state_dict())
    _save(twin, gguf, target)


def tiny_llama(gguf: Path, target: Path, kv_heads: int) -> None:
    """Random weights, always the same, with SmolLM2's tokenizer: 8 heads, for tensor parallel sizes up to 8.

    Weights are spread wide and embeddings untied: otherwise all logits are nearly equal and rounding decides.
    """
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    _save(_llama(shape), gguf, target)


def _save(model: Any, gguf: Path, target: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name
    )
    with whole(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    for name, folder in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        if name in TINY_MODELS:
            tiny_llama(Path(sys.argv[1]), Path(folder), TINY_MODELS[name])
        elif name in SMALL_MODELS:
            _save(
                made_of(name, vocab_size=49152, max_position_embeddings=8192),
                Path(sys.argv[1]),
                Path(folder),
            )
        else:
            smollm2(Path(sys.argv[1]), Path(folder))
