"""Prompts and the tokens that a producer leaves out of them, so that the consumer can continue from the loaded cache.

The consumer computes the prompt's last token itself, for its logits. It does not matter if the keys and values of that
token are loaded too. But a recurrent state must not include it, or the token would be applied twice. So the producer of
a model with states computes all tokens but the last. Each module of a multi-token predictor looks one token further
ahead; the entries that depend on tokens not yet certain are left to the consumer too.
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
    """The number of a prompt's last tokens that a producer does not compute."""
    has_states = any(group.policy == "state" for group in groups)
    return max(int(has_states), int(vllm_config.num_prefill_lookahead_tokens) - 1)


def leave_out(request: Request, num_tokens: int) -> bool:
    """Remove the last tokens of a prompt that will be decoded elsewhere, and limit its answer to one token.

    Must be called before the request is scheduled.

    Returns:
        Whether its cache will be usable. If not, the request is unchanged and is served without a transfer: it is too
        short, requests log-probabilities of its prompt or at least two tokens, or ends within an image.
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
    # Drop hashes that include removed tokens: at most `num_tokens`, since a block has at least one token.
    del request.block_hashes[max(0, len(request.block_hashes) - num_tokens) :]
    request.update_block_hashes()
    return True


def has_tokens(request: Request) -> bool:
    """Whether the prompt consists of tokens, not of embeddings."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def prompt_of(request: Request, num_tokens: int) -> Prompt | None:
    """The tokens and everything else that determines the request's KV cache; None for a prompt of embeddings.

    The tokens are the request's own list, not a copy: they grow with it.

    Args:
        num_tokens: number of tokens that will be read. If the prompt has as many, its list is used: copying the
            beginning of all tokens would take a sixth of the time of making digests.
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
