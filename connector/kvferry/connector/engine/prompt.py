"""What a producer leaves out of a prompt, so that the consumer can go on from what it holds.

The consumer computes the prompt's last token itself, for its logits. An attention layer's keys and values of that
token may be there already; a recurrent state that has seen it may not, for it would see it twice. So a producer of a
model with states computes all tokens but the last one. The modules of a multi-token predictor each look one token
further ahead: what they would write from tokens that are not yet certain is left to the consumer too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvferry.protocol.digests import Media, Prompt
from kvferry.protocol.handshake import CacheGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def tokens_left_out(vllm_config: VllmConfig, groups: Iterable[CacheGroup]) -> int:
    """How many of a prompt's last tokens a producer does not compute."""
    has_states = any(group.policy == "state" for group in groups)
    return max(int(has_states), int(vllm_config.num_prefill_lookahead_tokens) - 1)


def leave_out(request: Request, num_tokens: int) -> bool:
    """Take the last tokens off a prompt that is to be decoded elsewhere, and let it be answered with one token.

    Must be called before the request is scheduled.

    Returns:
        Whether what it will hold can be used. If not, the request is as it was, to be served without a transfer: it is
        too short, wants log-probabilities of its prompt or more answers than one token, or ends within an image.
    """
    if not num_tokens:
        return True
    rest, params = request.num_prompt_tokens - num_tokens, request.sampling_params
    if rest <= 0 or request.prompt_token_ids is None or params is None or params.min_tokens > 1:
        return False
    if request.get_skip_reading_prefix_cache():
        return False
    if any(feature.mm_position.offset + feature.mm_position.length > rest for feature in request.mm_features):
        return False
    request.prompt_token_ids = request.prompt_token_ids[:rest]  # siblings may share the list
    del request._all_token_ids[rest:]
    request.num_prompt_tokens = rest
    request.max_tokens = 1
    # Full blocks were hashed with what is gone now; a block of one token is the least that there is.
    del request.block_hashes[max(0, len(request.block_hashes) - num_tokens) :]
    request.update_block_hashes()
    return True


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
