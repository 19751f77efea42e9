"""Two whole engines when something takes long: a load that hangs, a consumer that is busy, a producer that stalls."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from kvferry.scheduler.state.clock import AwakeClock
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Transfer, TransferState
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

pytestmark = pytest.mark.slow

COUNT = 4
PROMPT = tokens(40)


def _connect(producer: Node, consumer: Node) -> None:
    """A first load; on a busy machine it may take longer than the deadline, and is tried again."""
    for attempt in itertools.count():
        prompt = tokens(20, seed=100 + attempt)
        consumer.engine.add(f"warm-{attempt}", prompt, producer.prefill(f"warm-{attempt}", prompt), max_tokens=1)
        consumer.answer(f"warm-{attempt}")
        if consumer.engine.counted("loads"):
            return


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, no transfer of this process ever seems to end."""
    hangs = threading.Event()
    poll = NixlFabric.poll

    def poll_late(fabric: NixlFabric, transfer: Transfer) -> TransferState:
        return TransferState.IN_FLIGHT if hangs.is_set() else poll(fabric, transfer)

    monkeypatch.setattr(NixlFabric, "poll", poll_late)
    return hangs


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("config", [{}, {"tp": 2, "overlap": True}], ids=["one worker", "two workers, overlapping"])
def test_a_load_that_hangs_costs_its_deadline_and_its_blocks_until_it_is_dead(
    make: Any, hanging: threading.Event, policy: str, config: dict[str, Any]
) -> None:
    producer, consumer = (
        make("kv_producer", **config),
        make("kv_consumer", policy=policy, extra={"load_timeout_s": 0.3}, **config),
    )
    _connect(producer, consumer)
    params = producer.prefill("p", PROMPT)
    hanging.set()
    consumer.engine.add("d", PROMPT, params, max_tokens=COUNT)
    answer = consumer.answer("d")
    right = (expected_tokens(PROMPT, COUNT), "length")
    assert (answer.tokens, answer.finish_reason) == (right if policy == "recompute" else ([], "error"))
    consumer.until(consumer.engine.is_idle)
    for _ in range(5):
        consumer.step()
    assert not consumer.engine.scheduler.requests
    assert consumer.engine.used_blocks == 3
    assert consumer.engine.scheduler.has_requests(), "the engine must step until the transfer is dead"
    hanging.clear()
    consumer.until(lambda: consumer.engine.is_whole)
    assert consumer.engine.counted("failed_loads", "deadline") == config.get("tp", 1)


def test_an_abort_of_a_load_that_hangs_gives_the_blocks_back_when_it_is_dead(
    make: Any, hanging: threading.Event
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", extra={"load_timeout_s": 0.3})
    _connect(producer, consumer)
    params = producer.prefill("p", PROMPT)
    hanging.set()
    consumer.engine.add("d", PROMPT, params, max_tokens=COUNT)
    consumer.step()
    consumer.engine.abort("d")
    consumer.until(lambda: not consumer.engine.scheduler.requests)
    assert consumer.engine.used_blocks == 3
    hanging.clear()
    consumer.until(lambda: consumer.engine.is_whole)


def test_a_prompt_that_waits_for_blocks_longer_than_its_lease_is_loaded_all_the_same(make: Any) -> None:
    producer, consumer = make("kv_producer", extra={"kv_lease_duration": 0.4}), make("kv_consumer", num_blocks=8)
    consumer.engine.add("long", tokens(70, seed=5), max_tokens=40)
    consumer.step()
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=COUNT)
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        if time.monotonic() < until - 0.2 and consumer.engine.answers["long"].finish_reason is None:
            consumer.step()
        producer.step()
        time.sleep(0.03)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    assert consumer.answer("long").tokens == expected_tokens(tokens(70, seed=5), 40)
    assert consumer.engine.counted("local_recomputes", "load_failed") == 0
    assert consumer.engine.counted("heartbeats") > 0
    producer.until(lambda: producer.engine.is_whole)


def test_a_producer_that_stalls_longer_than_its_lease_still_serves_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its threads stall, so its clock stops. An engine that is merely idle does not stall (`test_idle.py`)."""
    producer, consumer = make("kv_producer", extra={"kv_lease_duration": 0.4}), make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    with monkeypatch.context() as stopped:
        stopped.setattr(AwakeClock, "wind", lambda clock, now_s: clock.awake_s)
        time.sleep(0.8)
    producer.step()
    consumer.decode("d", PROMPT, params)
    assert consumer.engine.counted("local_recomputes", "load_failed") == 0
