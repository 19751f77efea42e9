"""An engine that shuts down: the consumers that still get their leases, and the end of its drain.

vLLM steps on while its scheduler `has_requests`, until its time to drain is over; a held request is one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from kvferry.connector.vllm.core import EngineLoop
from tests.engine_core.offers import Eavesdropper, offer
from tests.harness.core.node import Node
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.harness.core.toy_model import expected_tokens

PROMPT = tokens(100)
LONG_S = 600.0
"""A lease time longer than every test."""
DRAINS: dict[str, Any] = {
    "shutdown_timeout": 60,
    "extra": {"kv_lease_duration": LONG_S},
}


def terminate(node: Node | SchedulerEngine) -> None:
    """The effect of SIGTERM on the connector, without the engine's own part."""
    engine = node.engine if isinstance(node, Node) else node
    engine.connector.scheduler_side.steps.loop.is_ending = True


def may_end(node: Node) -> bool:
    """Whether the engine's loop would end now."""
    return not node.engine.scheduler.has_requests()


def test_while_an_engine_drains_its_lease_is_read_and_it_ends_as_soon_as_none_is_left(
    make: Any,
) -> None:
    producer, consumer = make("kv_producer", **DRAINS), make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    terminate(producer)
    for _ in range(20):
        producer.step()
    assert not may_end(producer), "a consumer may still come"
    consumer.decode("d", PROMPT, params, producer)
    assert consumer.engine.counted("loads") == 1
    assert consumer.engine.counted("local_recomputes") == 0
    producer.until(lambda: may_end(producer))
    assert producer.engine.is_whole


def test_an_unread_lease_keeps_a_draining_engine_no_longer_than_it_lives(
    make: Any,
) -> None:
    producer = make(
        "kv_producer", shutdown_timeout=60, extra={"kv_lease_duration": 0.3}
    )
    producer.prefill("p", PROMPT)
    terminate(producer)
    producer.until(lambda: may_end(producer))
    assert producer.engine.counted("leases_released", "expired") == 1


def test_offers_of_turns_do_not_keep_a_draining_engine_and_none_is_made(
    make_both: Any,
) -> None:
    prefiller, decoder = make_both(extra=DRAINS["extra"]), make_both(**DRAINS)
    other = tokens(60, seed=3)
    first, second = prefiller.prefill("p1", PROMPT), prefiller.prefill("p2", other)
    decoder.engine.add("d1", PROMPT, first, max_tokens=4)
    assert decoder.answer("d1").params is not None
    decoder.engine.add("d2", other, second, max_tokens=8)
    decoder.until(lambda: len(decoder.engine.answers["d2"].tokens) > 2)
    terminate(decoder)
    answer = decoder.answer("d2")
    assert (answer.tokens, answer.params) == (expected_tokens(other, 8), None)
    decoder.until(lambda: may_end(decoder))
    assert decoder.engine.counted("turns_released", "shutdown") == 1
    prefiller.until(lambda: prefiller.engine.is_whole)


def test_without_a_time_to_drain_leases_end_through_the_fence_and_the_engine_is_not_kept(
    make: Any,
) -> None:
    producer, consumer = (
        make("kv_producer", extra={"kv_lease_duration": LONG_S}),
        make("kv_consumer"),
    )
    params = producer.prefill("p", PROMPT)
    terminate(producer)
    producer.until(lambda: may_end(producer))
    producer.model.poison()
    consumer.decode("d", PROMPT, params)
    assert consumer.engine.counted("failed_loads", "fence") == 1


@pytest.mark.parametrize("begun", [False, True], ids=["offered", "loading"])
def test_a_consumer_that_ends_gives_back_what_it_has_not_read(
    begun: bool, eavesdropper: Eavesdropper
) -> None:
    engine = SchedulerEngine(
        "FerryConnector", module="kvferry.connector", role="kv_consumer"
    )
    engine.add("d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=5))
    if begun:
        engine.step()
        assert engine.status("d") == "WAITING_FOR_REMOTE_KVS"
    started_s = time.monotonic()
    engine.close()
    assert eavesdropper.released() == [5]
    assert time.monotonic() - started_s < 10.0
    engine.close()
    assert eavesdropper.released() == [5], "and once"


@pytest.fixture
def vllm_received() -> Iterator[list[int]]:
    """A handler of SIGTERM like that which vLLM sets before it makes a connector."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield received
    signal.signal(signal.SIGTERM, before)


def test_a_signal_is_noticed_and_reaches_the_handler_that_was_there(
    vllm_received: list[int],
) -> None:
    loop = EngineLoop()
    assert not loop.is_ending
    os.kill(os.getpid(), signal.SIGTERM)
    assert (loop.is_ending, vllm_received) == (True, [signal.SIGTERM])


def test_nothing_is_changed_where_no_handler_is_set_or_on_another_thread(
    vllm_received: list[int],
) -> None:
    ours = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=EngineLoop)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is ours
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    EngineLoop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
