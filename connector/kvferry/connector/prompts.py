"""A vLLM request as the thing that digests are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.protocol.digests import Media, Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request


def has_tokens(request: Request) -> bool:
    """Whether the prompt is one of tokens, not of embeddings."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def prompt_of(request: Request, num_tokens: int) -> Prompt | None:
    """Tokens and whatever else decides the request's KV cache; None when embeddings take the place of tokens.

    The tokens are the request's own, not a copy: they grow with it.

    Args:
        num_tokens: how many will be looked at. Those of the prompt alone are its list: to copy the beginning of another
            takes a sixth of the time in which digests are made.
    """
    prompt = request.prompt_token_ids
    if prompt is None or not has_tokens(request):
        return None
    return Prompt(
        tokens=prompt if num_tokens <= len(prompt) else request.all_token_ids,
        lora=request.lora_request.lora_name if request.lora_request is not None else None,
        salt=request.cache_salt,
        media=_media_of(request) if request.mm_features else (),
    )


def _media_of(request: Request) -> tuple[Media, ...]:
    return tuple(
        Media(feature.mm_position.offset, feature.mm_position.length, str(feature.identifier))
        for feature in request.mm_features
    )
