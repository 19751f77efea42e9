"""The small multimodal model: BLIP-2-like, an image is 8 tokens at the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.small_models import FIRST_TOKEN, IMAGE_PIXELS, VOCABULARY, whole

IMAGE_TOKENS = 8
IMAGE_TOKEN = FIRST_TOKEN
PAD = "<pad>"
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


def make_multimodal(folder: Path) -> None:
    """Weights, tokenizer and a processor that needs no torchvision."""
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
    with whole(folder) as partial:
        model.save_pretrained(partial)
        processor.save_pretrained(partial)


def _config(of: Any) -> Any:
    return of.Blip2Config(
        vision_config=of.Blip2VisionConfig(**_TOWER, image_size=IMAGE_PIXELS, patch_size=7).to_dict(),
        qformer_config=of.Blip2QFormerConfig(
            **_TOWER, vocab_size=VOCABULARY, encoder_hidden_size=64, cross_attention_frequency=1
        ).to_dict(),
        text_config=of.OPTConfig(**_TEXT).to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
