"""Workers that do not report ended leases: neither running requests nor the engine's shutdown wait for them."""

from __future__ import annotations

import itertools
import time
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.messages import FerryWorkerMetadata
from tests.engine_core.conversation import TURNS
from tests.engine_core.offers import offer
from tests.harness.core.scheduler import Engine, tokens

PROMPT = tokens(40)


def say_over(engine: Engine, request_id: str) -> None:
    reported = FerryWorkerMetadata(over={0: frozenset({request_id})})
    engine.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reported))


def test_vllm_preempts_again_when_blocks_have_been_coming_for_a_heartbeat(make_engine: Any) -> None:
    producer = make_engine("kv_producer", extra={"kv_lease_duration": 600.0})
    side = producer.connector.scheduler_side
    clock = itertools.count(time.monotonic(), 10)
    for name in ("first", "second"):
        producer.add(name, tokens(40, seed=ord(name[0])), {"do_remote_decode": True}, max_tokens=1)
    producer.run()
    side.leases.take_orders(next(clock))
    side.leases.release_all("release")
    side.eviction.evict()
    assert producer.connector.has_pending_block_frees()
    for _ in range(12):
        side.leases.take_orders(next(clock))
        side.eviction.evict()
    assert not producer.connector.has_pending_block_frees(), "110 s without a report"
    say_over(producer, "first")
    side.eviction.evict()
    assert producer.connector.has_pending_block_frees(), "they do report"
    say_over(producer, "second")
    side.eviction.evict()
    assert not producer.connector.has_pending_block_frees()


def test_an_engine_that_ends_does_not_wait_for_blocks_in_quarantine(make_engine: Any) -> None:
    consumer = make_engine("kv_consumer", policy="fail")
    consumer.add("d", PROMPT, offer(PROMPT))
    consumer.step()
    stuck = FerryWorkerMetadata({0: frozenset({"d"})})
    consumer.step(
        worker=KVConnectorOutput(finished_recving={"d"}, failed_recving={"d"}, kv_connector_worker_meta=stuck)
    )
    consumer.step()
    assert consumer.scheduler.has_requests(), "while it serves, it steps until they are back"
    consumer.connector.scheduler_side._idle.drain.is_requested = True
    consumer.step()
    assert not consumer.scheduler.has_requests()


def test_an_offer_that_was_made_just_before_the_engine_is_to_end_does_not_keep_it(make_engine: Any) -> None:
    decoder = make_engine("kv_both", extra=TURNS, shutdown_timeout=60)
    decoder.add("d", PROMPT, offer(PROMPT), max_tokens=2)
    decoder.step()
    decoder.step(loaded=["d"])
    decoder.run()
    assert decoder.answers["d"].params is not None
    decoder.connector.scheduler_side._idle.drain.is_requested = True
    for _ in range(4):
        step = decoder.schedule()
        decoder.finish(step, over=step.ended)
    assert not decoder.scheduler.has_requests()
    assert decoder.counted("turns_released", "shutdown") == 1
