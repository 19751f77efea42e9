"""Requests that vLLM preempts in the very step that it has scheduled them for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.core.node import Node
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens
from tests.harness.core.toy_model import expected_tokens
from tests.promises import promise

PREFILL = tokens(400, seed=2)
CHUNK = 2 * BLOCK_TOKENS
URGENT = tokens(31, seed=3)
COUNT = 60
NODE = {"num_blocks": 80, "max_tokens": 512, "max_step_tokens": 128}


@promise(1)
@pytest.mark.parametrize("overlap", [False, True], ids=["one step", "overlapping"])
def test_what_a_step_that_was_undone_would_have_computed_is_not_hit(
    make: Any, overlap: bool
) -> None:
    """A prefill is taken out of a step again, since a request of higher priority needs a block and none is free."""
    # Where steps overlap, an engine that loads frees no block of a request in flight, and so undoes no step.
    node = make("kv_producer", **NODE, scheduling="priority", overlap=overlap)
    scheduler = node.engine.scheduler
    scheduler.scheduler_config.long_prefill_token_threshold = CHUNK
    pool = scheduler.kv_cache_manager.block_pool
    node.engine.add("prefill", PREFILL, max_tokens=4, priority=5)
    node.step()
    node.engine.add("urgent", URGENT, max_tokens=COUNT, priority=0)
    node.until(lambda: both_need_a_block(node))
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - CHUNK // BLOCK_TOKENS)
    step = node.step()
    assert step.output.preempted_req_ids == {"prefill"}
    assert "prefill" not in step.computed
    pool.free_blocks(taken)
    assert node.answer("prefill").tokens == expected_tokens(PREFILL, 4)
    assert node.answer("urgent").tokens == expected_tokens(URGENT, COUNT)


def both_need_a_block(node: Node) -> bool:
    """Whether the prefill is scheduled first in the next step, and both get a block then."""
    running = node.engine.scheduler.running
    if [request.request_id for request in running] != ["prefill", "urgent"]:
        return False
    prefill, urgent = running
    at_chunk: bool = prefill.num_computed_tokens % CHUNK == 0
    at_block: bool = urgent.num_computed_tokens % BLOCK_TOKENS == 0
    return at_chunk and at_block
