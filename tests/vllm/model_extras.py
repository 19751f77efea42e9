"""A multimodal model and a LoRA adapter of random weights, kept beside the models of `small_models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.accuracy.model import default_cache_dir
from tests.vllm.small_models import FIRST_TOKEN, SMALL_MODELS, VOCABULARY, made_once

IMAGE_PIXELS = 28
IMAGE_TOKENS = 8
IMAGE_TOKEN = FIRST_TOKEN
PAD = "<pad>"
_RANK = 8
_SPECIAL = {"pad_token": PAD, "bos_token": "<s>", "eos_token": "</s>"}
_TOWER: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "init_std": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def multimodal() -> Path:
    """A BLIP-2-like model: prompts begin with the 8 tokens of an image. Its processor needs no torchvision; its
    tokenizer has words `w4` to `w1023`, each its own id."""
    return made_once("small-multimodal", default_cache_dir(), _make_multimodal)


def adapter() -> Path:
    """A LoRA adapter of random weights for `small-llama-4`."""
    return made_once("small-adapter", default_cache_dir(), _make_adapter)


def _make_multimodal(folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    of: Any = transformers
    of.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = of.Blip2ForConditionalGeneration(_config(of)).to(torch.float32)
        model.query_tokens.data.normal_()  # zeroes from the start
    words = {PAD: 0, "<s>": 1, "</s>": 2, "<image>": IMAGE_TOKEN}
    words |= {f"w{word}": word for word in range(IMAGE_TOKEN + 1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = of.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        extra_special_tokens={"image_token": "<image>"},
        **_SPECIAL,
    )
    images: Any = BlipImageProcessorPil
    processor = of.Blip2Processor(
        image_processor=images(size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}),
        tokenizer=fast,
        num_query_tokens=IMAGE_TOKENS,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _make_adapter(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    settings = SMALL_MODELS["small-llama-4"].settings
    heads = {
        "q_proj": settings["num_attention_heads"],
        "v_proj": settings["num_key_value_heads"],
    }
    numbers = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(settings["num_hidden_layers"]):
        for projection, count in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{at}.lora_A.weight"] = 0.2 * torch.randn(
                _RANK, settings["hidden_size"], generator=numbers
            )
            rows = count * settings["head_dim"]
            weights[f"{at}.lora_B.weight"] = 0.2 * torch.randn(
                rows, _RANK, generator=numbers
            )
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": list(heads),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _config(of: Any) -> Any:
    return of.Blip2Config(
        vision_config=of.Blip2VisionConfig(
            **_TOWER, image_size=IMAGE_PIXELS, patch_size=7
        ).to_dict(),
        qformer_config=of.Blip2QFormerConfig(
            **_TOWER,
            vocab_size=VOCABULARY,
            encoder_hidden_size=64,
            cross_attention_frequency=1,
        ).to_dict(),
        text_config=of.OPTConfig(**_TEXT).to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
