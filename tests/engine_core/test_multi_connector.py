"""kvferry beside a connector that offloads, as children of vLLM's MultiConnector, on both engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidConfig
from tests.engine_core.driver import tokens
from tests.engine_core.host_tier import STORES, Store
from tests.engine_core.node import Node, ferry_of
from tests.engine_core.test_handover import COUNT, decode
from tests.engine_core.toy_model import expected_tokens

PROMPT = tokens(100)
ORDERS = {"kvferry first": False, "offloading first": True}


@pytest.fixture(autouse=True)
def stores() -> Iterator[dict[str, Store]]:
    STORES.update({"kv_producer": Store(), "kv_consumer": Store()})
    yield STORES
    STORES.clear()


def children(role: str, *, offloading_first: bool = False) -> dict[str, Any]:
    """What makes a node's connector a MultiConnector of two."""
    ferry = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvferry.connector", "kv_role": role}
    tier = {
        "kv_connector": "HostTier",
        "kv_connector_module_path": "tests.engine_core.host_tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": role},
    }
    both = [ferry | {"kv_load_failure_policy": "recompute"}, tier]
    extra = {"connectors": both[::-1] if offloading_first else both}
    return {"connector": "MultiConnector", "module": None, "extra": extra}


def counted(node: Node, name: str, label: str | None = None) -> int:
    """As `Engine.counted`, of the child."""
    of_child = [stats["FerryConnector"] for stats in node.engine.stats if "FerryConnector" in stats]
    found = [stats.get("counters", {}).get(name, {}) for stats in of_child]
    return sum(sum(by.values()) if label is None else by.get(label, 0) for by in found)


@pytest.mark.parametrize("offloading_first", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"overlap": True}], ids=["one worker", "tp 2", "overlapping"])
def test_prompts_are_read_by_one_child_and_saved_by_the_other(
    make: Any, shape: dict[str, Any], offloading_first: bool
) -> None:
    producer, consumer = (
        make(role, **children(role, offloading_first=offloading_first), **shape)
        for role in ("kv_producer", "kv_consumer")
    )
    lengths = (1, 16, 33, 100, 255)
    for seed, length in enumerate(lengths, 10):
        prompt = tokens(length, seed=seed)
        assert decode(consumer, f"d{length}", prompt, producer.prefill(f"p{length}", prompt)) == 1
        for node in (producer, consumer):
            node.until(lambda node=node: node.engine.is_whole)
    assert counted(producer, "leases_released", "done") == len(lengths)
    blocks = sum(-(-length // 16) for length in lengths)
    assert counted(consumer, "planned_bytes") == blocks * producer.engine.block_bytes * len(consumer.workers)
    assert counted(consumer, "local_recomputes") == 0
    assert STORES["kv_producer"].blocks.keys() <= STORES["kv_consumer"].blocks.keys()
    assert len(STORES["kv_producer"].blocks) == sum(length // 16 for length in lengths)


def test_what_the_other_child_has_is_loaded_from_there_and_the_lease_is_given_back(make: Any) -> None:
    producer = make("kv_producer", **children("kv_producer"))
    consumer = make("kv_consumer", **children("kv_consumer", offloading_first=True))
    decode(consumer, "before", PROMPT, producer.prefill("p0", PROMPT))
    consumer.until(lambda: consumer.engine.is_whole)
    assert consumer.engine.scheduler.reset_prefix_cache()
    assert decode(consumer, "after", PROMPT, producer.prefill("p1", PROMPT)) == len(PROMPT) % 16
    assert STORES["kv_consumer"].loaded == ["after"]
    for node in (producer, consumer):
        node.until(lambda node=node: node.engine.is_whole)
    assert counted(consumer, "loads") == 1
    assert counted(consumer, "local_recomputes", "not_wanted") == 1
    assert counted(producer, "leases_released", "release") == 1


def test_blocks_are_free_when_neither_child_needs_them(make: Any) -> None:
    """kvferry holds blocks by references of its own; the other child by having vLLM delay their free."""
    producer, consumer = (make(role, **children(role)) for role in ("kv_producer", "kv_consumer"))
    side = ferry_of(producer.engine.connector).scheduler_side
    blocks = -(-len(PROMPT) // 16)

    def held() -> int:
        return int(producer.engine.blocks_at_start - producer.engine.free_blocks)

    STORES["kv_producer"].may_save = False
    decode(consumer, "d0", PROMPT, producer.prefill("p0", PROMPT))
    producer.until(lambda: side.leases.kept.num_held == 0)
    assert held() == blocks, "read by the consumer, not yet saved by the other child"
    STORES["kv_producer"].may_save = True
    producer.until(lambda: producer.engine.is_whole)

    other = tokens(100, seed=4)
    params = producer.prefill("p1", other)
    producer.until(lambda: not producer.engine.scheduler.requests)
    assert held() == blocks, "saved by the other child, not yet read by the consumer"
    assert decode(consumer, "d1", other, params) == 1
    producer.until(lambda: producer.engine.is_whole)
    # What was copied late was copied before the blocks were given away.
    producer.engine.scheduler.reset_prefix_cache()
    producer.engine.add("again", other, max_tokens=COUNT)
    assert producer.answer("again").tokens == expected_tokens(other, COUNT)
    assert STORES["kv_producer"].loaded == ["again"]


def test_a_prompt_whose_lease_is_over_is_computed_and_counted(make: Any) -> None:
    producer, consumer = (make(role, **children(role)) for role in ("kv_producer", "kv_consumer"))
    params = producer.prefill("p", PROMPT)
    ferry_of(producer.engine.connector).scheduler_side.leases.release_all("reset")
    producer.until(lambda: producer.engine.is_whole)
    assert decode(consumer, "d", PROMPT, params) == len(PROMPT)
    assert counted(consumer, "local_recomputes", "load_failed") == 1
    assert counted(consumer, "failed_requests") == 0


def test_two_children_that_hand_prompts_over_are_refused_by_name(make: Any) -> None:
    producer = make("kv_producer", **children("kv_producer"))
    side = ferry_of(producer.engine.connector).scheduler_side
    with pytest.raises(InvalidConfig, match=r"connectors is 'object'; expected one child that hands prompts over"):
        side.publish({(0, 0): object()})
