"""vLLM's KV events for blocks that kvferry has loaded, as a router receives them.

vLLM's block pool publishes them when it caches them, which is after the load was reported. So kvferry's `take_events`
has nothing to add, and must not: every event of its own would be a second one.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from tests.engine_core.offers import offer
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.scheduler import BLOCK_TOKENS, SchedulerEngine, tokens

PROMPT = tokens(100)
FULL_BLOCKS = len(PROMPT) // BLOCK_TOKENS


class Events:
    """An engine's events, published as vLLM's scheduler does."""

    def __init__(self, engine: SchedulerEngine) -> None:
        self.all: list[Any] = []
        engine.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        self.all += batch.events

    def shutdown(self) -> None: ...

    def stored(self, group: int = 0) -> list[Any]:
        """Hashes in the order in which they came."""
        found = [
            event
            for event in self.all
            if isinstance(event, BlockStored) and event.group_idx == group
        ]
        return [name for event in found for name in event.block_hashes]

    def removed(self) -> set[Any]:
        return {
            name
            for event in self.all
            if isinstance(event, BlockRemoved)
            for name in event.block_hashes
        }


@pytest.fixture
def consumer(make_engine: Any) -> Any:
    return make_engine("kv_consumer")


def test_nothing_is_published_before_the_load_is_good_and_then_all_of_it_once(
    consumer: SchedulerEngine,
) -> None:
    events = Events(consumer)
    consumer.add("d", PROMPT, offer(PROMPT), max_tokens=1)
    for _ in range(3):
        consumer.step()
    assert consumer.status("d") == "WAITING_FOR_REMOTE_KVS"
    assert not events.all
    consumer.step(loaded={"d"})
    consumer.run()
    assert len(events.stored()) == len(set(events.stored())) == FULL_BLOCKS
    (event,) = events.all
    assert (event.medium, event.parent_block_hash, event.block_size) == (
        "GPU",
        None,
        BLOCK_TOKENS,
    )
    assert event.token_ids == PROMPT[: FULL_BLOCKS * BLOCK_TOKENS]


@pytest.mark.parametrize("window", [0, 48], ids=["one group", "two groups"])
def test_both_engines_publish_the_same_blocks_of_the_same_groups(
    make: Any, window: int
) -> None:
    shape = {"window": window, "num_blocks": 80}
    producer, consumer = make("kv_producer", **shape), make("kv_consumer", **shape)
    theirs, ours = Events(producer.engine), Events(consumer.engine)
    consumer.decode("d", PROMPT, producer.prefill("p", PROMPT))
    assert len(theirs.stored()) == len(set(theirs.stored())) == FULL_BLOCKS
    assert ours.stored() == theirs.stored()
    if window:
        assert ours.stored(group=1)
        assert set(ours.stored(group=1)) <= set(theirs.stored(group=1))
    assert {event.kv_cache_spec_kind for event in ours.all} == {
        event.kv_cache_spec_kind for event in theirs.all
    }


def test_blocks_that_a_lease_holds_are_not_published_as_removed_until_they_are_reused(
    make: Any,
) -> None:
    producer: Node = make("kv_producer", num_blocks=16)
    events = Events(producer.engine)
    producer.prefill("held", PROMPT)
    held = set(events.stored())
    for seed in range(
        2, 5
    ):  # the pool has 15 blocks, 7 of them held: these take each other's
        producer.engine.add(f"other{seed}", tokens(100, seed=seed), max_tokens=1)
        producer.answer(f"other{seed}")
    assert events.removed()
    assert not events.removed() & held
    ferry_of(producer.engine.connector).scheduler_side.leases.release_all("reset")
    producer.until(lambda: producer.engine.is_whole)
    for seed in range(5, 8):
        producer.engine.add(f"other{seed}", tokens(100, seed=seed), max_tokens=1)
        producer.answer(f"other{seed}")
    assert held <= events.removed()
