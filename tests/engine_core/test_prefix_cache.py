"""What is found in vLLM's prefix cache: its own rules for drafters, and what two threads may see of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import Request

from kvferry.connector.vllm.prefix_cache import PrefixCache
from tests.harness.core.configs import (
    BLOCK_TOKENS,
    kv_cache_config,
    model_config,
    tokens,
)

PROMPT = tokens(600, seed=3)


def manager_of(**shape: Any) -> KVCacheManager:
    """vLLM's, which has computed the prompt."""
    model_config()  # sets the seed of hashes
    drafts = shape.pop("use_eagle", False)
    manager = KVCacheManager(
        kv_cache_config(200, **shape),
        max_model_len=1024,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        use_eagle=drafts,
    )
    assert manager.allocate_slots(request_of(PROMPT), len(PROMPT)) is not None
    return manager


def request_of(prompt: Sequence[int]) -> Request:
    return Request(
        request_id="own",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


def found(cache: PrefixCache, proven: int, longest: int) -> int:
    """Of so many tokens that a client has proved to have, the length of the longest hit of at most so many."""
    hashes = request_of(PROMPT[:proven]).block_hashes
    prefix = cache.find(hashes, longest, lambda: None)
    return prefix.num_tokens if prefix is not None else 0


def cache_of(manager: KVCacheManager) -> PrefixCache:
    cache = PrefixCache()
    cache.bind(manager)
    return cache


@pytest.mark.parametrize("shape", [{}, {"window": 48}], ids=["full", "and a window"])
def test_a_drafter_costs_the_last_block_of_what_is_proven_and_no_more(
    shape: dict[str, Any],
) -> None:
    """What it has of that block's last tokens depends on the tokens after them."""
    manager = manager_of(use_eagle=True, **shape)
    cache = cache_of(manager)
    assert found(cache, proven=512, longest=512) == 496
    # The directory looks further for a length that has a digest. That the next block is cached and proven is enough.
    assert found(cache, proven=512, longest=256) == 256
    # As vLLM hits it for a prompt with that block, and one token.
    _, hit, _ = manager.get_computed_blocks(request_of(PROMPT[: 256 + 16 + 1]))
    assert hit == 256


def test_without_a_drafter_all_that_is_proven_is_found() -> None:
    cache = cache_of(manager_of())
    assert found(cache, proven=512, longest=512) == 512
    assert found(cache, proven=512, longest=256) == 256


def test_states_that_are_cached_in_another_way_are_given_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = manager_of(states=1)
    assert cache_of(manager).hash_tokens == BLOCK_TOKENS
    (states,) = (
        one
        for one in manager.coordinator.single_type_managers
        if isinstance(one, MambaManager)
    )
    monkeypatch.setattr(states, "mamba_cache_mode", "all")
    assert cache_of(manager).hash_tokens == 0


@pytest.mark.parametrize("error", [RuntimeError, StopIteration])
def test_a_cache_that_changes_while_it_is_looked_through_has_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """vLLM keeps blocks of one hash in a dict, which the engine's thread may empty while this one takes its first."""
    cache = cache_of(manager_of())

    def changes(cached: Any, key: bytes) -> None:
        raise error

    monkeypatch.setattr(BlockHashToBlockMap, "get_one_block", changes)
    assert found(cache, proven=512, longest=512) == 0


def test_an_engine_with_priorities_gives_nothing_and_hits_what_was_computed(
    make_engine: Any,
) -> None:
    """With priorities vLLM leaves hashes of blocks that it has scheduled and does not compute. `UndoneSteps` takes them
    out of the cache; where steps overlap that was not seen, so such an engine lends nothing."""
    engine = make_engine(
        "kv_both", num_blocks=14, scheduling="priority", max_step_tokens=128
    )
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 64
    prompt = tokens(200, seed=1)
    engine.add("low", prompt, priority=5)
    engine.add("short", tokens(8, seed=9), max_tokens=1, priority=9)
    engine.step()
    engine.add("high", tokens(16, seed=2), priority=0)
    engine.step()
    preempting = engine.step()
    assert preempting.output.preempted_req_ids == {"low"}
    hit = engine.make_request("looked up", [*prompt, 1])
    _, cached, _ = engine.scheduler.kv_cache_manager.get_computed_blocks(hit)
    assert cached == 128, "what was computed, and nothing of the step that was undone"
    assert engine.connector.scheduler_side.prefix_cache.hash_tokens == 0
