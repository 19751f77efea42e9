"""kvferry beside a connector that offloads, as children of vLLM's MultiConnector, on both engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.protocol.errors import InvalidConfig
from tests.engine_core.host_tier import STORES, Store
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens

PROMPT = tokens(100)
ORDERS = {"kvferry first": False, "offloading first": True}


@pytest.fixture(autouse=True)
def stores() -> Iterator[dict[str, Store]]:
    STORES.update({"kv_producer": Store(), "kv_consumer": Store()})
    yield STORES
    STORES.clear()


def children(role: str, *, offloading_first: bool = False) -> dict[str, Any]:
    """The configuration that makes a node's connector a MultiConnector of two."""
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
        assert consumer.decode(f"d{length}", prompt, producer.prefill(f"p{length}", prompt)) == 1
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
    consumer.decode("before", PROMPT, producer.prefill("p0", PROMPT))
    consumer.until(lambda: consumer.engine.is_whole)
    assert consumer.engine.scheduler.reset_prefix_cache()
    assert consumer.decode("after", PROMPT, producer.prefill("p1", PROMPT)) == len(PROMPT) % 16
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
        return int(producer.engine.used_blocks)

    STORES["kv_producer"].may_save = False
    consumer.decode("d0", PROMPT, producer.prefill("p0", PROMPT))
    producer.until(lambda: len(side.leases.block_references.held) == 0)
    assert held() == blocks, "read by the consumer, not yet saved by the other child"
    STORES["kv_producer"].may_save = True
    producer.until(lambda: producer.engine.is_whole)

    other = tokens(100, seed=4)
    params = producer.prefill("p1", other)
    producer.until(lambda: not producer.engine.scheduler.requests)
    assert held() == blocks, "saved by the other child, not yet read by the consumer"
    assert consumer.decode("d1", other, params) == 1
    producer.until(lambda: producer.engine.is_whole)
    # What was copied late was copied before the blocks were given away.
    producer.engine.scheduler.reset_prefix_cache()
    producer.decode("again", other, None)
    assert STORES["kv_producer"].loaded == ["again"]


def test_a_prompt_whose_lease_is_over_is_computed_and_counted(make: Any) -> None:
    producer, consumer = (make(role, **children(role)) for role in ("kv_producer", "kv_consumer"))
    params = producer.prefill("p", PROMPT)
    ferry_of(producer.engine.connector).scheduler_side.leases.release_all("reset")
    producer.until(lambda: producer.engine.is_whole)
    assert consumer.decode("d", PROMPT, params) == len(PROMPT)
    assert counted(consumer, "local_recomputes", "load_failed") == 1
    assert counted(consumer, "failed_requests") == 0


@pytest.fixture
def stock_handshake(make: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Node], Any]]:
    """The handshake of a worker of vLLM's own NixlConnector, as from the second child of a MultiConnector."""
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", lambda *_: [MultipleOf(BLOCK_TOKENS)])
    made: list[Any] = []

    def describe(node: Node) -> Any:
        config, caches = copy.copy(node.engine.config), node.engine.cache_config
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_producer", engine_id="stock"
        )
        with set_current_vllm_config(config):
            worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
            made.append(worker)
            worker.register_kv_caches(
                allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout.LBHNC, [BLOCK_TOKENS])
            )
        return worker.get_handshake_metadata()

    yield describe
    for worker in made:
        worker.shutdown()


def test_a_second_child_that_hands_prompts_over_is_refused_by_name_and_harms_nothing(
    make: Any, stock_handshake: Callable[[Node], Any]
) -> None:
    """vLLM gives all children the handshake of the first one that has any."""
    producer, consumer = (make(role, **children(role)) for role in ("kv_producer", "kv_consumer"))
    published = {(0, 0): stock_handshake(producer)}
    with pytest.raises(
        InvalidConfig, match=r"connectors is 'NixlHandshakePayload'; expected one child that hands prompts over"
    ):
        producer.engine.connector.set_xfer_handshake_metadata_pp_aware(published)
    assert consumer.decode("d", PROMPT, producer.prefill("p", PROMPT)) == 1
    assert counted(consumer, "loads") == 1
