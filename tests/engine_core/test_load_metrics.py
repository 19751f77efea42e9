"""The effect of real handovers on every metric of loads, leases and gauges.

Two whole engines with real NIXL under them; the figures are those that vLLM's front end would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.connector.metrics.stats import FerryStats, PeerLabels
from kvferry.connector.metrics.tables import GAUGES, HISTOGRAMS
from kvferry.worker.loads.results import StepResults
from tests.engine_core.offers import offer
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.core.node import Node
from tests.harness.core.scheduler import Engine, tokens
from tests.harness.rig import Rig

PROMPT = tokens(100)
BLOCKS = 7
POOL = {"extra": {"staging_pool_bytes": 1 << 20}}


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Workers without schedulers, whose layouts can differ; nothing is staged between equal ones."""
    made = Rig("memory")
    yield made
    made.close()


def samples(engine: Engine, name: str) -> list[float]:
    """The statistics of all steps so far."""
    return [value for stats in engine.stats for value in stats.get("samples", {}).get(name, ())]


def gauges(engine: Engine, name: str) -> list[float]:
    """All reported values of the gauge, the latest last."""
    return [stats["gauges"][name] for stats in engine.stats if name in stats.get("gauges", {})]


def hand_over(producer: Node, consumer: Node, name: str = "d", prompt: list[int] = PROMPT) -> None:
    params = producer.prefill(f"p-{name}", prompt)
    consumer.engine.add(name, prompt, params, max_tokens=2)
    consumer.answer(name)
    producer.until(lambda: producer.engine.is_whole)
    consumer.step()


def test_a_direct_load_reports_its_plan_its_bytes_its_runs_and_its_producer(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    hand_over(producer, consumer)
    reported, size = consumer.engine, BLOCKS * producer.engine.block_bytes
    assert reported.counted("placed_loads", "direct") == reported.counted("placed_loads") == 1
    assert reported.counted("planned_bytes") == size
    assert reported.counted("staged_bytes") == 0
    peer = f"127.0.0.1:{producer.port}"
    assert reported.counted("peer_loads", peer) == reported.counted("peer_loads") == 1
    assert reported.counted("peer_bytes", peer) == size
    assert reported.counted("peer_load_s", peer) == samples(reported, "load_s")[0] > 0
    (run,), (moved,), (descriptors,) = (
        samples(reported, name) for name in ("run_bytes", "transferred_bytes", "descriptors")
    )
    assert run == moved / descriptors
    assert moved == size


@pytest.mark.parametrize(
    ("direct_min_bytes", "plan"), [(1 << 20, "staged"), (1, "direct")], ids=["descriptors are dear", "they are cheap"]
)
def test_a_load_between_layouts_reports_its_plan_and_its_relayout(rig: Rig, direct_min_bytes: int, plan: str) -> None:
    settings = replace(SETTINGS, staging_pool_bytes=16 << 10, direct_min_bytes=direct_min_bytes)
    producer = rig.engine("P", shape=CacheShape(axes="bht"), settings=settings)
    consumer = rig.engine("C", shape=CacheShape(axes="bth"), settings=settings)
    rig.transfer(producer, consumer)
    reported = FerryStats.of_results(StepResults(load_records=consumer.seen.load_records), PeerLabels(1))
    assert reported is not None
    counters, measured = reported.data["counters"], reported.data["samples"]
    assert counters["placed_loads"] == {plan: 1}
    assert counters.get("staged_bytes") == (counters["planned_bytes"] if plan == "staged" else None)
    if plan == "direct":
        assert "relayout_s" not in measured
        return
    (relayout_s,), (read_s,) = measured["relayout_s"], measured["read_s"]
    assert 0 < relayout_s <= read_s


def test_the_stages_of_a_load_are_parts_of_its_time(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    hand_over(producer, consumer)
    hand_over(producer, consumer, "again", tokens(50, seed=9))
    stages = [samples(consumer.engine, name) for name in ("queue_s", "connecting_s", "fence_s", "read_s")]
    for load, parts in zip(samples(consumer.engine, "load_s"), zip(*stages, strict=True), strict=True):
        assert 0 < sum(parts) <= load
    waits, whole = samples(consumer.engine, "order_wait_s"), samples(consumer.engine, "handover_s")
    assert len(waits) == len(whole) == 2
    assert all(0 < wait < handover for wait, handover in zip(waits, whole, strict=True))
    assert not samples(consumer.engine, "relayout_s"), "nothing was staged"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_handshake_is_reported_once_by_every_worker(make: Callable[..., Node], tp: int) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", tp=tp)
    for name in ("a", "b", "c"):
        hand_over(producer, consumer, name, tokens(40, seed=ord(name)))
    handshakes = samples(consumer.engine, "handshake_s")
    assert len(handshakes) == tp
    assert all(value > 0 for value in handshakes)
    assert gauges(consumer.engine, "peers_now")[-1] == 1, "of the worker with most, not of all of them"


def test_a_load_is_in_flight_until_it_has_ended(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    hand_over(producer, consumer)
    assert gauges(consumer.engine, "loads_now") == [1, 0]
    assert gauges(consumer.engine, "prompts_waiting_now")[-1] == 0


def test_a_prompt_that_waits_for_a_place_is_reported_as_waiting(make_engine: Any) -> None:
    engine = make_engine("kv_consumer", max_num_seqs=1)
    engine.add("long", tokens(20, seed=7), max_tokens=400)
    engine.step()
    engine.add("d", PROMPT, offer(PROMPT), max_tokens=2)
    engine.step()
    assert gauges(engine, "prompts_waiting_now")[-1] == 1
    assert not samples(engine, "order_wait_s")
    engine.abort("d", "long")
    engine.step()
    assert gauges(engine, "prompts_waiting_now")[-1] == 0


def test_a_lease_is_reported_while_computing_while_held_and_with_its_seconds_left(
    make: Callable[..., Node],
) -> None:
    producer, consumer = make("kv_producer", extra={"lease_slots": 9}), make("kv_consumer")
    hand_over(producer, consumer)
    reported = producer.engine
    assert gauges(reported, "lease_slots") == [9]
    assert max(gauges(reported, "leases_held_now")) == 1
    assert max(gauges(reported, "leased_blocks_now")) == BLOCKS
    assert max(gauges(reported, "leased_fraction_now")) == pytest.approx(
        BLOCKS / (reported.cache_config.num_blocks - 1)
    )
    for name in ("leases_held_now", "leases_computing_now", "leased_blocks_now", "leased_fraction_now"):
        assert gauges(reported, name)[-1] == 0
    (left,) = samples(reported, "lease_left_s")
    assert 20 < left <= 30, "it was read at once"


def test_a_lease_that_computes_for_several_steps_is_reported_meanwhile(make_engine: Any) -> None:
    engine = make_engine("kv_producer", max_step_tokens=16)
    engine.add("p", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    engine.step()
    assert gauges(engine, "leases_computing_now") == [1]
    assert gauges(engine, "leases_held_now") == [0]


def test_staging_in_use_is_reported_while_a_read_cannot_end(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", **POOL)
    hand_over(producer, consumer)
    assert gauges(consumer.engine, "staging_pool_bytes")[-1] == 1 << 20
    pool = consumer.workers[0].worker_side._worker._memory.staging.pool
    wave = pool.try_take("another", "load", 1 << 16)
    hand_over(producer, consumer, "meanwhile", tokens(60, seed=5))
    assert gauges(consumer.engine, "staging_used_bytes")[-1] == 1 << 16
    pool.give_back(wave)
    hand_over(producer, consumer, "after", tokens(60, seed=6))
    assert gauges(consumer.engine, "staging_used_bytes")[-1] == 0


def test_a_failed_load_is_reported_by_producer_once_that_is_known(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    for name in ("before", "good", "after"):
        prompt = tokens(60, seed=len(name))
        params: dict[str, Any] = producer.prefill(f"p-{name}", prompt)
        if name != "good":
            params = {**params, "kvferry": {**params["kvferry"], "mac": "0" * 64}}
        consumer.engine.add(name, prompt, params, max_tokens=2)
        consumer.answer(name)
    consumer.step()
    assert consumer.engine.counted("failed_loads", "mac") == 2
    assert consumer.engine.counted("peer_failed_loads", "other") == 1, "clients cannot make labels"
    assert consumer.engine.counted("peer_failed_loads", f"127.0.0.1:{producer.port}") == 1


def test_without_labels_every_producer_is_another_one(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", extra={"max_peer_labels": 0})
    hand_over(producer, consumer)
    assert consumer.engine.counted("peer_loads", "other") == consumer.engine.counted("peer_loads") == 1


def test_every_sample_and_every_gauge_is_moved_by_a_handover(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", **POOL)
    hand_over(producer, consumer)
    both = producer.engine.stats + consumer.engine.stats
    assert {name for stats in both for name in stats.get("samples", {})} == set(HISTOGRAMS) - {"relayout_s"}
    assert {name for stats in both for name in stats.get("gauges", {})} == set(GAUGES)


def test_a_step_without_news_reports_nothing(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    hand_over(producer, consumer)
    consumer.engine.add("local", tokens(20, seed=3), max_tokens=30)
    consumer.step()
    before = len(consumer.engine.stats)
    for _ in range(10):
        consumer.step()
    assert len(consumer.engine.stats) == before
