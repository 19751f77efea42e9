"""kvferry's metrics through vLLM: scheduler statistics → front end → Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.engine_core.offers import offer
from tests.harness.core.scheduler import Engine, tokens

PROMPT = tokens(40)
LABELS = {"model_name": "toy", "engine": "3"}


@pytest.fixture
def engine(make_engine: Any) -> Iterator[Engine]:
    unregister_vllm_metrics()
    yield make_engine("kv_consumer")
    unregister_vllm_metrics()


def sample(name: str, **labels: str) -> Any:
    return REGISTRY.get_sample_value(f"vllm:{name}", {**LABELS, **labels})


def test_outcomes_of_remote_prompts_are_in_prometheus_by_reason(engine: Engine) -> None:
    front_end = KVConnectorProm(engine.config, list(LABELS), {3: list(LABELS.values())})
    assert sample("kvferry_local_recomputes_total", reason="load_failed") == 0
    engine.add("good", PROMPT, offer(PROMPT), max_tokens=1)
    engine.add("bad", tokens(40, seed=2), offer(tokens(40, seed=2)), max_tokens=1)
    engine.add("other", tokens(40, seed=3), offer(PROMPT), max_tokens=1)
    engine.add("foreign", tokens(40, seed=4), {"do_remote_prefill": True, "remote_host": "x"}, max_tokens=1)
    engine.step()
    engine.step(loaded={"good"}, failed={"bad"})
    engine.run()
    engine.step()
    for stats in engine.stats:
        front_end.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats)), 3)
    reasons = ("load_failed", "other_prompt", "foreign_params", "invalid_params")
    assert [sample("kvferry_local_recomputes_total", reason=reason) for reason in reasons] == [1, 1, 1, 0]
    assert sample("kvferry_loads_total") == 2
    assert sample("kvferry_handover_seconds_count") == 1


def test_figures_that_the_front_end_does_not_know_are_left_out(engine: Engine) -> None:
    front_end = KVConnectorProm(engine.config, list(LABELS), {3: list(LABELS.values())})
    front_end.observe({"counters": {"of_tomorrow": {"": 1}, "loads": {"red": 1, "": 1}}, "samples": {"x": [1.0]}}, 3)
    assert sample("kvferry_loads_total") == 1


def test_the_log_line_adds_an_interval_up(engine: Engine) -> None:
    lines: list[str] = []
    log = KVConnectorLogging(engine.config.kv_transfer_config)
    for name in ("a", "b"):
        engine.add(name, tokens(40, seed=ord(name)), offer(tokens(40, seed=ord(name))), max_tokens=1)
        engine.step()
        engine.step(loaded={name})
        engine.run()
    for stats in engine.stats:
        log.observe(stats)
    log.log(lambda text, *args: lines.append(text % args))
    assert "loads=2" in lines[0]
    log.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1
