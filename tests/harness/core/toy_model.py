"""A model whose tokens show the content of the cache: a miniature attention.

What it writes for a token depends on what it *reads* for all the tokens before, and a sliding-window layer adds what it
reads in its window. So any cell that holds other bytes than it should gives other tokens, as in a real engine, and
`expected_tokens` says what the right ones are.

    state[i] = 31·state[i-1] + token[i] + Σ state[j], j < i  + 3·Σ state[j], i - window < j < i    (mod 65521)
    token[i+1] = state[i] mod 997 + 1

Recurrent layers hold one number of all tokens so far, in the block of the last one only, which is kept as vLLM's first
model runner keeps it in `align` mode. With them the next token is that of `state[i] + recurrent[i]`:

    recurrent[i] = 17·recurrent[i-1] + token[i]    (mod 65521)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.mamba.checkpoint import (
    compute_mamba_prefill_checkpoints,
)
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from tests.harness.core.scheduler import SchedulerEngine

_MODULUS = 65521
_BROKEN = 1
"""Read where heads or elements of one cell differ: no good state is ever read as this one twice in a row."""


def next_state(states: Sequence[int], token: int, window: int) -> int:
    """The state after `states` and `token`; `window` is 0 for a model without a sliding window."""
    last = states[-1] if states else 0
    in_window = sum(states[max(0, len(states) - window + 1) :]) if window else 0
    return (31 * last + token + sum(states) + 3 * in_window) % _MODULUS


def next_recurrent(recurrent: int, token: int) -> int:
    return (17 * recurrent + token) % _MODULUS


def recurrent_of(prompt: Sequence[int]) -> int:
    """What a correct recurrent layer holds after these tokens."""
    recurrent = 0
    for token in prompt:
        recurrent = next_recurrent(recurrent, token)
    return recurrent


def sampled_from(state: int) -> int:
    return state % 997 + 1


def states_of(prompt: Sequence[int], window: int = 0) -> list[int]:
    """What a correct cache holds for each token."""
    states: list[int] = []
    for token in prompt:
        states.append(next_state(states, token, window))
    return states


def expected_tokens(
    prompt: Sequence[int], count: int, window: int = 0, *, recurrent: bool = False
) -> list[int]:
    """The toy model's answer with a correct cache.

    Args:
        recurrent: whether it has recurrent layers.
    """
    states = states_of(prompt, window)
    held = recurrent_of(prompt) if recurrent else 0
    answer: list[int] = []
    for _ in range(count):
        answer.append(sampled_from(states[-1] + held))
        states.append(next_state(states, answer[-1], window))
        if recurrent:
            held = next_recurrent(held, answer[-1])
    return answer


class ToyModel:
    """Reads and writes the caches of one engine.

    Args:
        layers: one per cache group: by worker a float32 view `[blocks, heads, tokens, elements]`.
        window: of the second layer, if there is one.
        recurrent: the same of the recurrent layers, their bytes as vLLM views them.

    `forward` samples as it goes, so a step may be run before the one before it was answered.
    """

    def __init__(
        self,
        engine: SchedulerEngine,
        layers: Sequence[Sequence[torch.Tensor]],
        window: int,
        recurrent: Sequence[Sequence[torch.Tensor]] = (),
    ) -> None:
        self._engine, self._layers, self._window = engine, layers, window
        self._recurrent = [
            [shard.flatten(1).view(torch.float32) for shard in shards]
            for shards in recurrent
        ]
        self._views = [shard for shards in (*layers, *recurrent) for shard in shards]
        self._spec = engine.cache_config.kv_cache_groups[-1].kv_cache_spec
        # As `mamba_state_idx` of the model runner: the position in its table of the block that a request writes.
        self._running: dict[str, int] = {}
        self._samples: defaultdict[str, deque[int]] = defaultdict(deque)
        self._ahead: dict[tuple[str, int], int] = {}

    def forward(self, output: Any) -> None:
        starts = {
            new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs
        }
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # As in `cleanup_mamba_state_idx`, and before the forward pass the copies of blocks.
        gone = output.finished_req_ids | cached.resumed_req_ids
        for name in gone | (output.preempted_req_ids or set()):
            self._running.pop(name, None)
        copy_kv_cache_blocks_inplace(
            self._views,
            self._engine.cache_config.num_blocks,
            output.kv_cache_block_copies or (),
        )
        for name, count in output.num_scheduled_tokens.items():
            self._compute(name, starts[name], starts[name] + count)

    def sample(self, request_id: str) -> int:
        """The token of the oldest step that has not been asked for."""
        return self._samples[request_id].popleft()

    def recurrent_pages(self, block: int) -> list[torch.Tensor]:
        """What a block holds of the first recurrent layer, by worker."""
        return [shard[block] for shard in self._recurrent[0]]

    def poison(self) -> None:
        """Overwrite the whole cache, as if every block had been reused."""
        for shards in self._layers:
            for shard in shards:
                shard.fill_(9999.0)

    def _compute(self, name: str, start: int, stop: int) -> None:
        request = self._engine.scheduler.requests[name]
        blocks = self._engine.all_block_ids(name)
        states = self.read_states(0, blocks[0], 0, start)
        if self._window:
            first = max(0, start - self._window + 1)
            if self.read_states(1, blocks[1], first, start) != states[first:]:
                states = [_BROKEN] * start
        taken: list[int] = []
        for position in range(start, stop):
            known = position < request.num_tokens
            token = (
                request.all_token_ids[position]
                if known
                else self._ahead[name, position]
            )
            taken.append(token)
            states.append(next_state(states, token, self._window))
        tables = blocks[: len(self._layers)]
        for layer, ids in enumerate(tables):
            self.write_states(layer, ids, start, states[start:])
        state = states[-1] + self._recur(name, blocks[len(tables) :], start, taken)
        if not request.is_prefill_chunk:
            self._samples[name].append(sampled_from(state))
            self._ahead[name, stop] = sampled_from(state)

    def _recur(
        self, name: str, tables: Sequence[list[int]], start: int, taken: Sequence[int]
    ) -> int:
        """Take tokens into the recurrent layers, as `preprocess_mamba` and the forward pass do.

        Returns:
            What the layers hold then; 0 without any.
        """
        held = 0
        if not self._recurrent:
            return held
        block_tokens = self._spec.block_size
        last = (start + len(taken) - 1) // block_tokens
        before = self._running.get(name, (start - 1) // block_tokens)
        kept_after, kept_in = self._checkpoint(start, len(taken))
        for shards, table in zip(self._recurrent, tables, strict=True):
            for shard in shards:
                page = shard[table[last]]
                if before not in (-1, last):
                    page[:] = shard[table[before]]
                held = _number_in(page) if start else 0
                for count, token in enumerate(taken, start=1):
                    held = next_recurrent(held, token)
                    if count == kept_after:
                        shard[table[kept_in]] = held
                page[:] = held
        self._running[name] = last
        return held

    def _checkpoint(self, start: int, count: int) -> tuple[int, int]:
        """After how many tokens of a pass the state is kept, and the position in the table of its block; (0, -1) if it
        is not."""
        if not self._spec.num_prefill_checkpoint_blocks:
            return 0, -1
        config = self._engine.cache_config
        offsets, positions = compute_mamba_prefill_checkpoints(
            [start + count],
            [count],
            hash_block_size=config.hash_block_size,
            mamba_block_size=self._spec.block_size,
            checkpoint_alignment=self._spec.prefill_checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=config.cache_hit_alignment_tokens,
        )
        return offsets[0], positions[0]

    def read_states(
        self, layer: int, blocks: list[int], start: int, stop: int
    ) -> list[int]:
        if start == stop:
            return []
        where = _cells(blocks, start, stop, self._block_tokens(layer))
        halves = [half for shard in self._layers[layer] for half in _k_and_v(shard)]
        cells = torch.cat([half[where].flatten(1) for half in halves], dim=1)
        even = (cells == cells[:, :1]).all(dim=1)
        seen = torch.where(even, cells[:, 0], torch.full_like(cells[:, 0], _BROKEN))
        # By a list: a tensor's elements one by one are tensors, a hundred times as slow.
        return list(map(int, seen.tolist()))

    def write_states(
        self, layer: int, blocks: list[int], start: int, states: list[int]
    ) -> None:
        where = _cells(blocks, start, start + len(states), self._block_tokens(layer))
        values = torch.tensor(states, dtype=torch.float32).reshape(-1, 1, 1)
        for shard in self._layers[layer]:
            for half in _k_and_v(shard):
                half[where] = values

    def _block_tokens(self, layer: int) -> int:
        return int(self._layers[layer][0].shape[2])


def _number_in(page: torch.Tensor) -> int:
    """The number that all elements of a recurrent layer's page are."""
    is_even = bool((page == page[0]).all())
    return int(page[0]) if is_even else _BROKEN


def _k_and_v(shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of a cache as `[blocks, tokens, heads, elements]`, arranged as vLLM's CPU attention has them: in a
    (block, head) K is `[elements, tokens]` and V is `[tokens, elements]`."""
    blocks, heads, tokens, content = shard.shape
    k, v = shard.view(blocks, heads, 2, -1).unbind(2)
    return k.view(blocks, heads, content // 2, tokens).permute(0, 3, 1, 2), v.view(
        blocks, heads, tokens, content // 2
    ).transpose(1, 2)


def _cells(
    blocks: list[int], start: int, stop: int, block_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(start, stop)
    return torch.tensor(blocks)[positions // block_tokens], positions % block_tokens
