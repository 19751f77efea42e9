"""kvferry beside vLLM's ExampleConnector, which keeps caches on disk, as children of MultiConnector in real servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.accuracy.engines import Transfer
from scripts.accuracy.settings import STOCK
from tests.vllm.conftest import START_S
from tests.vllm.fleet import hand_over
from tests.vllm.forked_server import ForkedServer, small_server
from tests.vllm.load import Kind, ask, prompt_of
from tests.waiting import wait_until

PROMPTS = [prompt_of("two children", index) for index in range(3)]


def server(name: str, core: str, role: str, logs: Path, disk: Path) -> ForkedServer:
    ferry = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "kvferry.connector",
        "kv_role": role,
    }
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    children = [
        ferry
        | {
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": 120},
        },
        example | {"kv_connector_extra_config": {"shared_storage_path": str(disk)}},
    ]
    transfer = Transfer(
        role,
        module=STOCK,
        connector="MultiConnector",
        extra_config={"connectors": children},
    )
    return small_server(name, core, transfer, logs)


def in_use(engine: ForkedServer) -> float:
    """Of the cache, this share."""
    return engine.metrics().total("vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def both(
    logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ForkedServer, ForkedServer]]:
    with ExitStack() as stack:
        made = [
            stack.enter_context(
                server(f"multi-{role}", core, role, logs, tmp_path_factory.mktemp(role))
            )
            for core, role in (("0", "kv_producer"), ("1", "kv_consumer"))
        ]
        for one in made:
            one.wait_ready(START_S)
        yield made[0], made[1]


def test_prompts_are_handed_over_and_every_block_is_free_again(
    both: tuple[ForkedServer, ForkedServer],
) -> None:
    producer, consumer = both
    want = [ask(producer.base_url, prompt).tokens for prompt in PROMPTS]
    assert all(want)
    before, before_p = consumer.metrics(), producer.metrics()
    got = [hand_over(producer, consumer, prompt) for prompt in PROMPTS]
    assert [one.kind for one in got] == [Kind.ANSWERED] * len(PROMPTS)
    assert [one.tokens for one in got] == want
    moved = consumer.metrics() - before
    assert moved.total("vllm:kvferry_loads_total") == len(PROMPTS)
    assert moved.total("vllm:kvferry_planned_bytes_total") > 0
    assert moved.total("vllm:nixl_bytes_transferred_sum") == moved.total(
        "vllm:kvferry_planned_bytes_total"
    )
    assert moved.total("vllm:kvferry_local_recomputes_total") == 0

    def given_back() -> bool:
        ended = (producer.metrics() - before_p).total(
            "vllm:kvferry_leases_released_total", how="done"
        )
        return bool(ended == len(PROMPTS))

    wait_until(given_back, "the leases are over", timeout_s=60)
    wait_until(lambda: sum(map(in_use, both)) == 0, "every block is free", timeout_s=60)
