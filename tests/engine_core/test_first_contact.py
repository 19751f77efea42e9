"""First contact while a request waits: a consumer with full slots prewarms the producer before the load is ordered."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.protocol.params import engine_of
from kvferry.worker.peers.peer import PeerKey
from tests.engine_core.test_engine_loop import make_core
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.harness.integrity import snapshot_of
from tests.ports import free_port
from tests.waiting import wait_until

__all__ = ["make_core"]

PROMPT = tokens(40)
COUNT = 5


def knows(consumer: Node, params: dict[str, Any]) -> bool:
    """Whether every worker can read from the producer of these params."""
    engine_id = engine_of(params["remote_engine_id"])
    key = PeerKey(
        params["remote_host"],
        params["remote_port"],
        engine_id,
        params["kvferry"]["boot"],
    )
    return all(
        key in snapshot_of(worker).peers.ready for worker in consumer.ferry_workers
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_a_request_that_waits_for_a_slot_finds_its_producer_met_when_it_is_scheduled(
    make: Any, tp: int
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", max_num_seqs=1, tp=tp)
    params = producer.prefill("p", PROMPT)
    consumer.engine.add("long", tokens(20, seed=7), max_tokens=400)
    consumer.step()
    consumer.engine.add("d", PROMPT, params, max_tokens=COUNT)
    consumer.until(lambda: knows(consumer, params))
    assert consumer.engine.status("d") == "WAITING"
    assert consumer.engine.counted("loads") == 0
    assert consumer.engine.answers["long"].finish_reason is None
    consumer.engine.abort("long")
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("handshakes_served") == tp, "no worker asked twice"


def times_described(producer: Node) -> int:
    """The number of descriptions that it has sent."""
    return int(
        producer.engine.connector.scheduler_side.monitor.counters.total(
            "handshakes_served"
        )
    )


def finds(consumer: Node, producer: Node) -> None:
    """Take the steps that the engine's loop would take, until every worker can read from this life of a producer."""
    local = producer.engine.connector.scheduler_side.channel.local
    params = {
        "remote_host": local.host,
        "remote_port": local.port,
        "remote_engine_id": local.engine_id,
        "kvferry": {"boot": local.boot},
    }

    def is_known() -> bool:
        consumer.go_on()
        return knows(consumer, params)

    wait_until(is_known, "the producer is known", 30.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_configured_producer_is_prewarmed_before_any_request_and_after_it_restarts(
    make: Any, tp: int
) -> None:
    producer = make("kv_producer")
    consumer = make(
        "kv_consumer", tp=tp, extra={"prewarm_peers": [f"127.0.0.1:{producer.port}"]}
    )
    finds(consumer, producer)
    assert not consumer.must_step, "it is idle"
    asked = times_described(producer)
    params = producer.prefill("p", PROMPT)
    consumer.decode("d", PROMPT, params)
    assert consumer.engine.counted("loads") == 1
    assert consumer.engine.counted("failed_loads") == 0
    assert times_described(producer) == asked == tp + 1, (
        "nothing was left for the request"
    )
    producer.until(lambda: producer.engine.is_whole)
    producer.close()
    again = make("kv_producer", port=producer.port)
    finds(consumer, again)
    consumer.decode("e", PROMPT, again.prefill("q", PROMPT))
    assert consumer.engine.counted("failed_loads") == 0
    assert times_described(again) == tp + 1


def test_an_idle_engine_is_woken_when_a_producer_is_found(
    make: Any, make_core: Any
) -> None:
    port = free_port()
    consumer = make("kv_consumer", extra={"prewarm_peers": [f"127.0.0.1:{port}"]})
    core = make_core(consumer.engine.scheduler)
    assert not core.has_work(), "no producer is there yet"
    producer = make("kv_producer", port=port)
    wait_until(lambda: not core.input_queue.empty(), "it is woken", 30.0)
    core._process_input_queue()  # vLLM's: it returns when there is something to do
    assert core.has_work()
    finds(consumer, producer)
    assert not core.has_work()
