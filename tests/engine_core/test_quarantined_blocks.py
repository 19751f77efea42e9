"""Blocks of a failed load that may still be written: they are not reused before every worker reports them as safe."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.messages import FerryWorkerMetadata
from tests.engine_core.offers import offer
from tests.harness.core.scheduler import tokens
from tests.promises import promise

pytestmark = pytest.mark.slow

PROMPT = tokens(40)


def report(*failed: str, **alive: set[str]) -> KVConnectorOutput:
    """The workers' reports: failed loads, and by worker (`w0`, `w1`) those whose blocks may still be written."""
    reported = {int(worker[1:]): frozenset(names) for worker, names in alive.items()}
    return KVConnectorOutput(
        finished_recving=set(failed) or None,
        failed_recving=set(failed),
        kv_connector_worker_meta=FerryWorkerMetadata(reported) if reported else None,
    )


@promise(2)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_blocks_stay_out_of_the_pool_until_the_transfer_is_dead(
    make_engine: Any, policy: str
) -> None:
    engine = make_engine("kv_consumer", policy=policy)
    engine.add("d", PROMPT, offer(PROMPT), max_tokens=2)
    engine.step()
    mine = set(engine.block_ids("d"))
    engine.step(worker=report("d", w0={"d"}))
    step = engine.step()
    if policy == "recompute":
        assert step.computed == {"d": 40}
        assert not mine & set(engine.block_ids("d")), "it is computed into other blocks"
        engine.run()
    assert engine.answers["d"].finish_reason == (
        "length" if policy == "recompute" else "error"
    )
    engine.step()
    assert engine.used_blocks == 3
    assert engine.scheduler.has_requests(), (
        "the engine must step on, or the end of the transfer is not noticed"
    )
    engine.step(worker=report(w0=set()))
    assert engine.is_whole
    engine.step()
    assert not engine.scheduler.has_requests()


@promise(2)
def test_one_of_two_workers_fails_first_and_the_blocks_are_pinned_until_both_are_done(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer")
    engine.add("d", PROMPT, offer(PROMPT), max_tokens=2)
    engine.step()
    engine.step(worker=report(w0={"d"}))
    engine.step(worker=report(w1={"d"}))
    engine.step(worker=report("d"))
    engine.run()
    assert engine.used_blocks == 3
    engine.step(worker=report(w0=set()))
    assert engine.used_blocks == 3
    engine.step(worker=report(w1=set()))
    assert engine.is_whole


def test_the_gauges_say_how_much_is_out_of_use_and_that_nothing_is_any_more(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", policy="fail")
    quarantined = engine.connector.scheduler_side.loads.quarantine
    engine.add("d", PROMPT, offer(PROMPT))
    engine.step()
    engine.step(worker=report("d", w0={"d"}))
    reported = quarantined.gauges(time.monotonic() + 50.0)
    assert (
        reported["quarantined_requests_now"],
        reported["quarantined_blocks_now"],
    ) == (1, 3)
    assert 50.0 <= reported["oldest_quarantine_s"] < 110.0
    engine.step(worker=report(w0=set()))
    assert engine.is_whole
    engine.step()
    for name, values in (
        ("quarantined_requests_now", [0, 1, 0]),
        ("quarantined_blocks_now", [0, 3, 0]),
    ):
        assert [
            stats["gauges"][name] for stats in engine.stats if name in stats["gauges"]
        ] == values, "each once"


def test_blocks_of_the_local_cache_that_the_request_shared_serve_others_meanwhile(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer")
    engine.add("before", PROMPT[:32], max_tokens=1)
    engine.run()
    engine.add("d", PROMPT, offer(PROMPT), max_tokens=2)
    engine.step()
    engine.step(worker=report("d", w0={"d"}))
    assert engine.step().computed == {"d": 8}, "the local hit is good"
    engine.run()
    engine.step(worker=report(w0=set()))
    assert engine.is_whole


def test_an_engine_that_ends_does_not_wait_for_blocks_in_quarantine(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", policy="fail")
    engine.add("d", PROMPT, offer(PROMPT))
    engine.step()
    engine.step(worker=report("d", w0={"d"}))
    engine.step()
    assert engine.scheduler.has_requests(), (
        "while it serves, it steps until they are back"
    )
    engine.connector.scheduler_side.steps.loop.is_ending = True
    engine.step()
    assert not engine.scheduler.has_requests()
