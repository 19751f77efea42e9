"""The effect of real handovers on every metric of loads, leases and gauges.

Two whole engines with real NIXL under them; the figures are those that vLLM's front end would get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.metrics.tables import GAUGES, HISTOGRAMS
from tests.engine_core.offers import offer
from tests.harness.core.node import Node
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.harness.inside import memory_of

PROMPT = tokens(100)
BLOCKS = 7
POOL = {"extra": {"staging_pool_bytes": 1 << 20}}


def samples(engine: SchedulerEngine, name: str) -> list[float]:
    """The statistics of all steps so far."""
    return [
        value
        for stats in engine.stats
        for value in stats.get("samples", {}).get(name, ())
    ]


def gauges(engine: SchedulerEngine, name: str) -> list[float]:
    """All reported values of the gauge, the latest last."""
    return [
        stats["gauges"][name]
        for stats in engine.stats
        if name in stats.get("gauges", {})
    ]


def hand_over(
    producer: Node, consumer: Node, name: str = "d", prompt: list[int] = PROMPT
) -> None:
    params = producer.prefill(f"p-{name}", prompt)
    consumer.engine.add(name, prompt, params, max_tokens=2)
    consumer.answer(name)
    producer.until(lambda: producer.engine.is_whole)
    consumer.step()


def test_a_direct_load_reports_its_plan_its_bytes_its_runs_and_its_producer(
    make: Callable[..., Node],
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    hand_over(producer, consumer)
    reported, size = consumer.engine, BLOCKS * producer.engine.block_bytes
    assert (
        reported.counted("placed_loads", "direct")
        == reported.counted("placed_loads")
        == 1
    )
    assert reported.counted("planned_bytes") == size
    assert reported.counted("staged_bytes") == 0
    peer = f"127.0.0.1:{producer.port}"
    assert reported.counted("peer_loads", peer) == reported.counted("peer_loads") == 1
    assert reported.counted("peer_bytes", peer) == size
    assert reported.counted("peer_load_s", peer) == samples(reported, "load_s")[0] > 0
    (run,), (moved,), (descriptors,) = (
        samples(reported, name)
        for name in ("run_bytes", "transferred_bytes", "descriptors")
    )
    assert run == moved / descriptors
    assert moved == size


def test_a_load_is_in_flight_until_it_has_ended(make: Callable[..., Node]) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    hand_over(producer, consumer)
    assert gauges(consumer.engine, "loads_now") == [1, 0]
    assert gauges(consumer.engine, "prompts_waiting_now")[-1] == 0


@pytest.mark.parametrize(("num_tokens", "loads"), [(41, 0), (42, 1)])
def test_a_hit_that_ends_within_a_block_is_no_recomputed_prompt(
    make: Callable[..., Node], num_tokens: int, loads: int
) -> None:
    """vLLM tells of its whole blocks only, and loads nothing if the whole hit is as long as the load would be."""
    parts = {"states": 1, "match_tokens": 8}
    producer, consumer = make("kv_producer", **parts), make("kv_consumer", **parts)
    prompt = tokens(num_tokens)
    consumer.decode("own", prompt, None)
    params = producer.prefill("p", prompt)
    assert consumer.decode("d", prompt, params, producer) == 1
    assert consumer.engine.counted("loads") == loads
    assert consumer.engine.counted("local_recomputes") == 0
    producer.until(lambda: producer.engine.is_whole)


def test_a_prompt_that_waits_for_a_place_is_reported_as_waiting(
    make_engine: Any,
) -> None:
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
    producer, consumer = (
        make("kv_producer", extra={"lease_slots": 9}),
        make("kv_consumer"),
    )
    hand_over(producer, consumer)
    reported = producer.engine
    assert gauges(reported, "lease_slots") == [9]
    assert max(gauges(reported, "leases_held_now")) == 1
    assert max(gauges(reported, "leased_blocks_now")) == BLOCKS
    assert max(gauges(reported, "leased_fraction_now")) == pytest.approx(
        BLOCKS / (reported.cache_config.num_blocks - 1)
    )
    for name in (
        "leases_held_now",
        "leases_computing_now",
        "leased_blocks_now",
        "leased_fraction_now",
    ):
        assert gauges(reported, name)[-1] == 0
    (left,) = samples(reported, "lease_left_s")
    assert 20 < left <= 30, "it was read at once"


def test_a_lease_that_computes_for_several_steps_is_reported_meanwhile(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_producer", max_step_tokens=16)
    engine.add("p", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    engine.step()
    assert gauges(engine, "leases_computing_now") == [1]
    assert gauges(engine, "leases_held_now") == [0]


def test_staging_in_use_is_reported_while_a_read_cannot_end(
    make: Callable[..., Node],
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", **POOL)
    hand_over(producer, consumer)
    assert gauges(consumer.engine, "staging_pool_bytes")[-1] == 1 << 20
    staging = memory_of(consumer.ferry_workers[0]).staging
    assert staging is not None
    pool = staging.pool
    wave = pool.try_take("another", "load", 1 << 16)
    assert wave is not None
    hand_over(producer, consumer, "meanwhile", tokens(60, seed=5))
    assert gauges(consumer.engine, "staging_used_bytes")[-1] == 1 << 16
    pool.give_back(wave)
    hand_over(producer, consumer, "after", tokens(60, seed=6))
    assert gauges(consumer.engine, "staging_used_bytes")[-1] == 0


def test_every_sample_and_every_gauge_is_moved_by_a_handover(
    make: Callable[..., Node],
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", **POOL)
    hand_over(producer, consumer)
    both = producer.engine.stats + consumer.engine.stats
    # Those of prefixes: `test_prefix_pulls.py`.
    of_others = {"relayout_s", "prefix_wait_s", "prefix_saved_s"}
    assert {name for stats in both for name in stats.get("samples", {})} == set(
        HISTOGRAMS
    ) - of_others
    assert {name for stats in both for name in stats.get("gauges", {})} == set(GAUGES)
