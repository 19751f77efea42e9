"""A model whose tokens show what is in the cache: an attention in miniature.

What it writes for a token depends on what it *reads* for the token before, and it samples from what it read last. So a
block that holds other bytes than it should gives other tokens, as in a real engine, and `expected_tokens` says what
the right ones are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch

from tests.engine_core.driver import BLOCK_TOKENS, Engine

_MODULUS = 65521


def next_state(state: int, token: int) -> int:
    return (31 * state + token + 1) % _MODULUS


def sampled_from(state: int) -> int:
    return state % 997 + 1


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the toy model answers when its cache is right."""
    state = 0
    for token in prompt:
        state = next_state(state, token)
    answer = []
    for _ in range(count):
        answer.append(sampled_from(state))
        state = next_state(state, answer[-1])
    return answer


class ToyModel:
    """Reads and writes the caches of one engine: one `[blocks, heads, tokens, elements]` float32 view per worker.

    `forward` samples as it goes, so a step may be run before the one before it was answered.
    """

    def __init__(self, engine: Engine, shards: Sequence[torch.Tensor]) -> None:
        self._engine, self._shards = engine, list(shards)
        self._samples: defaultdict[str, deque[int]] = defaultdict(deque)
        self._ahead: dict[tuple[str, int], int] = {}

    def forward(self, output: Any) -> None:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            request = self._engine.scheduler.requests[name]
            blocks = self._engine.block_ids(name)
            state = self._read(blocks, starts[name] - 1) if starts[name] else 0
            for position in range(starts[name], starts[name] + count):
                known = position < request.num_tokens
                token = request.all_token_ids[position] if known else self._ahead[name, position]
                state = next_state(state, token)
                self._write(blocks, position, state)
            if not request.is_prefill_chunk:
                token = sampled_from(self._read(blocks, position))
                self._samples[name].append(token)
                self._ahead[name, position + 1] = token

    def sample(self, request_id: str) -> int:
        """The token of the oldest step that has not been asked for."""
        return self._samples[request_id].popleft()

    def poison(self) -> None:
        """Overwrite the whole cache, as if every block had been given to somebody else."""
        for shard in self._shards:
            shard.fill_(9999.0)

    def _read(self, blocks: list[int], position: int) -> int:
        where = blocks[position // BLOCK_TOKENS], slice(None), position % BLOCK_TOKENS
        cells = torch.cat([shard[where].flatten() for shard in self._shards])
        return int(cells[0]) if bool((cells == cells[0]).all()) else -1

    def _write(self, blocks: list[int], position: int, state: int) -> None:
        for shard in self._shards:
            shard[blocks[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS] = float(state)
