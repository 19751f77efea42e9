"""kvferry's metrics through vLLM: scheduler statistics → front end → Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.engine_core.offers import offer
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.promises import promise

PROMPT = tokens(40)
LABELS = {"model_name": "toy", "engine": "3"}


@pytest.fixture
def engine(make_engine: Any) -> Iterator[SchedulerEngine]:
    unregister_vllm_metrics()
    yield make_engine("kv_consumer")
    unregister_vllm_metrics()


def sample(name: str, **labels: str) -> Any:
    return REGISTRY.get_sample_value(f"vllm:{name}", {**LABELS, **labels})


@promise(8)
def test_outcomes_of_remote_prompts_are_in_prometheus_by_reason(
    engine: SchedulerEngine,
) -> None:
    front_end = KVConnectorProm(engine.config, list(LABELS), {3: list(LABELS.values())})
    assert sample("kvferry_local_recomputes_total", reason="load_failed") == 0
    engine.add("good", PROMPT, offer(PROMPT), max_tokens=1)
    engine.add("bad", tokens(40, seed=2), offer(tokens(40, seed=2)), max_tokens=1)
    engine.add("other", tokens(40, seed=3), offer(PROMPT), max_tokens=1)
    engine.add(
        "foreign",
        tokens(40, seed=4),
        {"do_remote_prefill": True, "remote_host": "x"},
        max_tokens=1,
    )
    engine.step()
    engine.step(loaded={"good"}, failed={"bad"})
    engine.run()
    engine.step()
    for stats in engine.stats:
        front_end.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats)), 3)
    reasons = ("load_failed", "other_prompt", "foreign_params", "invalid_params")
    assert [
        sample("kvferry_local_recomputes_total", reason=reason) for reason in reasons
    ] == [
        1,
        1,
        1,
        0,
    ]
    assert sample("kvferry_loads_total") == 2
    assert sample("kvferry_handover_seconds_count") == 1
