"""A vLLM request as the thing that digests are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.protocol.digests import Media, Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prompt_of(request: Request) -> Prompt | None:
    """Tokens and whatever else decides the request's KV cache; None when embeddings take the place of tokens."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    return Prompt(
        tokens=list(request.all_token_ids),
        lora=request.lora_request.lora_name if request.lora_request is not None else None,
        salt=request.cache_salt,
        media=tuple(
            Media(feature.mm_position.offset, feature.mm_position.length, str(feature.identifier))
            for feature in request.mm_features
        ),
    )
