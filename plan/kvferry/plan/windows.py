"""Whether what a producer holds of a sequence reaches far enough to go on from."""

from __future__ import annotations

from kvferry.protocol.handshake import CacheGroup


def held_from(block_span: int, num_blocks: int, num_tokens: int) -> int:
    """The first token of a sequence of `num_tokens` that its last `num_blocks` scheduler blocks hold.

    Args:
        block_span: tokens that one block covers on all ranks together: its local slots × the ranks that share the
            tokens out.
    """
    return max(0, -(-num_tokens // block_span) - num_blocks) * block_span


def first_needed(group: CacheGroup, next_token: int) -> int:
    """The first token whose cache is needed to compute `next_token`.

    In a window those are the `window_tokens − 1` before it. In chunked attention it is those of its own chunk, so the
    first token of a chunk needs none.
    """
    if group.policy == "window":
        return max(0, next_token - group.window_tokens + 1)
    if group.policy == "chunk":
        return next_token // group.window_tokens * group.window_tokens
    return 0


def reaches_back(group: CacheGroup, block_span: int, first_held: int, num_tokens: int, prompt_tokens: int) -> bool:
    """Whether an engine can go on from the tokens `[first_held, num_tokens)` that a producer holds.

    Two things can be missing. When the sequence is the whole prompt, vLLM computes the prompt's last token once more
    for its logits: its window begins one token earlier, perhaps in a block that one of the two engines has given back,
    and a recurrent state has seen it already. And the first block that vLLM keeps of the sequence must be whole: vLLM
    takes it for the cache of all of its tokens, also for other prompts that begin alike. A window of one token needs no
    token before its own, so only what vLLM keeps must be held.

    Args:
        block_span: tokens of a scheduler block of the engine that goes on, see `held_from`.

    Example: window 32, blocks of 16, 47 tokens, blocks of the tokens 16 … 47. To go on with token 47 the tokens from 16
    on are needed: enough. To compute token 46 again, those from 15 on: not enough. Into blocks of 32 neither: the first
    one would be kept from token 0 on.
    """
    if group.policy == "full":
        return True
    if group.policy == "state":
        return prompt_tokens > num_tokens
    next_token = num_tokens if prompt_tokens > num_tokens else num_tokens - 1
    needed = range(first_needed(group, next_token), next_token)
    kept = range(first_needed(group, num_tokens) // block_span * block_span, num_tokens)
    return (not kept or first_held <= kept.start) and (not needed or kept.start <= needed.start)
