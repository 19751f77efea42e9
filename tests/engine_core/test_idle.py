"""An engine that only holds blocks is idle: no steps, and the blocks come back with the next request.

`must_step` is what vLLM's loop asks (`has_work`): while it is false, no step is taken here either.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.messages import FerryWorkerMetadata
from kvferry.protocol.handshake import Release, Renew
from kvferry.scheduler.producer.lease import LeaseState
from tests.engine_core.test_producer import lease_of, offered, say
from tests.harness.core.node import Node
from tests.harness.core.runners import SecondRunner
from tests.harness.core.scheduler import Engine, tokens
from tests.harness.core.toy_model import expected_tokens

pytestmark = pytest.mark.slow

PROMPT = tokens(100)
REMOTE_DECODE = {"do_remote_decode": True}
LONG = {"extra": {"kv_lease_duration": 600.0}}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapping, second runner": {"overlap": True, "runner": SecondRunner},
    "two ranks": {"tp": 2},
    "two stages": {"pp": 2},
    "sliding window": {"window": 48},
}


@pytest.fixture(autouse=True)
def _sleeps_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is so slow, on any machine, that the engine would take a step by itself."""
    monkeypatch.setattr("kvferry.connector.scheduler_side.idle.MAX_IDLE_S", 3600.0)


def work(node: Node, most: int = 50) -> int:
    """Step as the engine's loop does, until it would sleep. Returns the number of steps."""
    for count in range(most):
        if not node.go_on():
            return count
    raise AssertionError(f"it was not idle after {most} steps")


def prefill(node: Node, name: str, prompt: list[int]) -> dict[str, Any]:
    """The params of a prefill; the node is idle afterwards."""
    node.engine.add(name, prompt, REMOTE_DECODE, max_tokens=1)
    work(node)
    params = node.engine.answers[name].params
    assert params is not None
    return params


def decode(node: Node, name: str, prompt: list[int], params: Any, count: int = 4) -> None:
    node.engine.add(name, prompt, params, max_tokens=count)
    assert node.answer(name).tokens == expected_tokens(prompt, count, node.window)


def used(engine: Engine) -> int:
    return engine.blocks_at_start - engine.free_blocks


def reported(node: Node) -> bool:
    """Whether every worker's transfer thread has something for the next step."""
    return all(worker.worker_side._worker._thread.results._results.sent for worker in node.workers)


def wait_until_reported(node: Node) -> None:
    deadline_s = time.monotonic() + 20.0
    while not reported(node):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_held_prompt_is_read_from_an_engine_that_takes_no_step_meanwhile(make: Any, shape: str) -> None:
    """So the hold was announced before it is idle, and its blocks are kept without vLLM's help."""
    config = SHAPES[shape]
    same = {name: config[name] for name in ("window", "pp") if name in config}  # the same model
    producer, consumer = make("kv_producer", **LONG, **config), make("kv_consumer", **same)
    params = prefill(producer, "p", PROMPT)
    assert not producer.engine.scheduler.requests, "vLLM knows the request no more"
    before = used(producer.engine)
    assert before > 0
    decode(consumer, "d", PROMPT, params)
    assert consumer.engine.counted("loads") == 1
    assert consumer.engine.counted("failed_loads") == 0
    assert not producer.must_step, "no request needs the blocks"
    assert used(producer.engine) == before
    wait_until_reported(producer)
    producer.engine.add("next", tokens(20, seed=7), max_tokens=1)
    work(producer)
    assert producer.engine.is_whole
    assert producer.engine.counted("leases_released", "done") == 1


def test_a_prompt_that_finds_the_pool_full_of_leases_that_were_read_is_computed_in_the_second_step(make: Any) -> None:
    producer, consumer = make("kv_producer", num_blocks=15, **LONG), make("kv_consumer")
    prompts = {name: tokens(100, seed=ord(name)) for name in "ab"}  # seven blocks of fourteen each
    params = {name: prefill(producer, name, prompt) for name, prompt in prompts.items()}
    assert producer.engine.free_blocks == 0
    for name, prompt in prompts.items():
        decode(consumer, f"d-{name}", prompt, params[name])
    wait_until_reported(producer)
    deadline_s = time.monotonic() + 20.0
    side = producer.workers[0].worker_side._worker
    while len(side._thread.results._results.sent) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    producer.engine.add("new", tokens(100, seed=3), max_tokens=1)
    assert producer.step().computed == {}
    assert producer.step().computed == {"new": 100}
    assert producer.engine.counted("leases_released", "evicted") == 0


def test_a_prompt_that_finds_every_slot_taken_by_a_lease_that_was_read_gets_one_in_the_second_step(make: Any) -> None:
    producer = make("kv_producer", extra={"kv_lease_duration": 600.0, "lease_slots": 1})
    consumer = make("kv_consumer")
    decode(consumer, "d", PROMPT, prefill(producer, "p", PROMPT))
    wait_until_reported(producer)
    producer.engine.add("new", tokens(100, seed=3), REMOTE_DECODE, max_tokens=1)
    assert producer.step().computed == {}
    assert producer.step().computed == {"new": 100}
    work(producer)
    assert producer.engine.answers["new"].params is not None


def test_no_lease_is_evicted_before_the_engine_knows_which_are_over_anyway(make: Any) -> None:
    """Of two offers one was read while the engine slept. The other is idle, and would go at once."""
    producer, consumer = make("kv_producer", num_blocks=15, **LONG), make("kv_consumer")
    prompts = {name: tokens(100, seed=ord(name)) for name in "ab"}
    params = {name: prefill(producer, name, prompt) for name, prompt in prompts.items()}
    decode(consumer, "d-b", prompts["b"], params["b"])
    wait_until_reported(producer)
    producer.engine.connector.scheduler_side.leases.clock._awake_s += 300.0  # `a` is deserted: ten heartbeats are over
    producer.engine.add("new", tokens(100, seed=3), max_tokens=1)
    work(producer)
    assert producer.engine.counted("leases_released", "evicted") == 0
    assert producer.engine.answers["new"].tokens == expected_tokens(tokens(100, seed=3), 1)
    decode(consumer, "d-a", prompts["a"], params["a"])
    assert consumer.engine.counted("failed_loads") == 0


def test_held_blocks_are_not_reused_while_other_requests_come_and_go(make: Any) -> None:
    producer, consumer = make("kv_producer", num_blocks=24, **LONG), make("kv_consumer")
    params = prefill(producer, "p", PROMPT)
    for index in range(12):
        producer.engine.add(f"o{index}", tokens(120, seed=20 + index), max_tokens=20)
    work(producer, most=500)
    decode(consumer, "d", PROMPT, params)
    assert consumer.engine.counted("failed_loads") == 0


def test_two_leases_of_one_prompt_share_their_blocks_and_the_last_of_them_gives_them_back(make: Any) -> None:
    producer, consumer = make("kv_producer", **LONG), make("kv_consumer")
    first = prefill(producer, "p1", PROMPT)
    second = prefill(producer, "p2", PROMPT)
    shared = set(first["remote_block_ids"][0]) & set(second["remote_block_ids"][0])
    assert len(shared) == 6, "the second was a hit on blocks that are held"
    decode(consumer, "d1", PROMPT, first)
    producer.until(lambda: producer.engine.counted("leases_released", "done") == 1)
    assert used(producer.engine) == 7, "the six, and the second one's own tail"
    consumer.engine.scheduler.reset_prefix_cache()
    decode(consumer, "d2", PROMPT, second)
    producer.until(lambda: producer.engine.is_whole)


def test_two_ranks_free_nothing_until_the_later_one_has_reported(make: Any) -> None:
    producer = make("kv_producer", tp=2, **LONG)
    prefill(producer, "p", PROMPT)
    before = used(producer.engine)
    connector = producer.engine.connector

    def report(worker: int, *names: str) -> None:
        report = FerryWorkerMetadata(over={worker: frozenset(names)})
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))

    for _ in range(3):
        report(1, "p")
    report(7, "p")
    report(0, "unknown")
    assert used(producer.engine) == before
    report(0, "p")
    assert producer.engine.is_whole
    report(0, "p")
    report(1, "p")
    assert producer.engine.is_whole
    prefill(producer, "q", PROMPT)
    assert used(producer.engine) == before
    connector.scheduler_side.leases.release_all("release")
    producer.until(lambda: producer.engine.is_whole)


def test_the_connector_itself_asks_for_steps_until_a_hold_is_announced(make_engine: Any) -> None:
    """vLLM takes another step after a request's end. If it did not, no consumer could read before the next one."""
    engine = make_engine()
    engine.add("p", tokens(40), REMOTE_DECODE, max_tokens=1)
    engine.step()
    assert engine.answers["p"].params is not None
    assert engine.connector.has_pending_push_work()
    assert engine.step().metadata.holds
    assert not engine.connector.has_pending_push_work()


def test_a_lease_that_ran_out_while_idle_ends_with_the_next_request(
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.connector.scheduler_side.idle.MAX_IDLE_S", 0.5)
    engine = make_engine(lease_s=0.3)
    engine.add("p", tokens(40), REMOTE_DECODE, max_tokens=1)
    engine.step()
    engine.step()
    assert not engine.scheduler.has_requests()
    time.sleep(0.6)
    assert used(engine) == 3, "no step, no end"
    assert engine.scheduler.has_requests(), "a call after a while gets a step"
    assert not engine.step().metadata.holds, "in the first one the workers report what they received meanwhile"
    assert engine.scheduler.has_requests()
    step = engine.schedule()
    assert [end.request_id for end in step.metadata.orders().ends] == ["p"]
    engine.finish(step)
    assert engine.scheduler.has_requests(), "its workers have not acknowledged"
    engine.step(over={"p"})
    assert engine.is_whole
    assert not engine.scheduler.has_requests()


def test_a_lease_that_was_read_while_idle_and_then_ran_out_is_done_and_has_not_expired(
    make_engine: Any,
) -> None:
    engine = make_engine(lease_s=0.3)
    engine.add("p", tokens(40), REMOTE_DECODE, max_tokens=1)
    engine.step()
    engine.step()
    assert not engine.scheduler.has_requests()
    side = engine.connector.scheduler_side
    ended_s = side.leases.clock_s + 0.3
    deadline_s = time.monotonic() + 20.0
    while side.leases.clock_s < ended_s:  # the listener winds it
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    step = engine.step(over={"p"})
    assert step.metadata.orders() is None
    assert engine.is_whole
    assert side.counters.total("leases_released", "done") == 1
    assert side.counters.total("leases_released", "expired") == 0


def test_renewals_that_came_while_idle_keep_the_lease(make_engine: Any) -> None:
    engine = make_engine(lease_s=0.6)
    engine.add("p", tokens(40), REMOTE_DECODE, max_tokens=1)
    engine.step()
    engine.step()
    params = offered(engine, "p")
    began_s = time.monotonic()
    while time.monotonic() < began_s + 1.2:
        side = engine.connector.scheduler_side
        renewal = Renew(boot=params.kvferry.boot, leases=(lease_of(params),))
        side._channel.listener.inbox.put(renewal, side.leases.clock.awake_s)
        time.sleep(0.05)
    assert side._channel.listener.inbox.qsize() == 1
    engine.step()
    assert side.leases.state("p") is LeaseState.HELD


def test_a_release_that_came_while_idle_frees_the_blocks_in_the_next_step(
    make_engine: Any,
) -> None:
    engine = make_engine(num_blocks=4)
    engine.add("p", tokens(40), REMOTE_DECODE, max_tokens=1)
    engine.step()
    engine.step()
    params = offered(engine, "p")
    assert engine.free_blocks == 0
    say(engine, Release(boot=params.kvferry.boot, leases=(lease_of(params),)))
    assert not engine.scheduler.has_requests()
    engine.add("new", tokens(40, seed=3), max_tokens=1)
    step = engine.schedule()
    assert step.computed == {}
    engine.finish(step, over={end.request_id for end in step.metadata.orders().ends})
    assert engine.step().computed == {"new": 40}


def test_a_request_of_an_id_whose_lease_is_not_over_is_served_without_one(make_engine: Any) -> None:
    """vLLM no longer knows the first request, so it accepts the second."""
    engine = make_engine()
    for _ in range(2):
        engine.add("same", tokens(40), REMOTE_DECODE, max_tokens=1)
        engine.run()
    assert engine.answers["same"].params is None
    assert used(engine) == 3
    engine.step()
    engine.step(over={"same"})
    assert engine.is_whole
    engine.add("same", tokens(40), REMOTE_DECODE, max_tokens=1)
    assert engine.run()["same"].params is not None


def test_a_request_of_an_id_whose_lease_is_held_may_be_aborted_before_it_begins(make: Any) -> None:
    producer, consumer = make("kv_producer", **LONG), make("kv_consumer")
    params = prefill(producer, "p", PROMPT)
    producer.engine.add("p", tokens(50, seed=2), REMOTE_DECODE, max_tokens=1)
    producer.engine.abort("p")
    decode(consumer, "d", PROMPT, params)
    assert consumer.engine.counted("failed_loads") == 0, "the lease is as it was"


def test_cached_blocks_that_were_held_are_reused_from_their_end(make_engine: Any) -> None:
    engine = make_engine(num_blocks=9)
    engine.add("p", tokens(64), REMOTE_DECODE, max_tokens=1)
    engine.step()
    held = list(offered(engine, "p").remote_block_ids[0])
    engine.step()
    engine.step(over={"p"})
    engine.add("other", tokens(80, seed=3), max_tokens=1)
    engine.run()
    engine.add("again", tokens(64), max_tokens=1)
    step = engine.schedule()
    hit = 64 - step.computed["again"]
    assert 0 < hit < 64, "the first blocks of the prompt are still cached, the last ones went first"
    assert engine.block_ids("again")[: hit // 16] == held[: hit // 16]
    engine.finish(step)


def test_a_reset_wakes_an_idle_engine_and_the_blocks_are_back_when_it_is_idle_again(make: Any) -> None:
    producer = make("kv_producer", **LONG)
    prefill(producer, "p", PROMPT)
    assert not producer.engine.scheduler.reset_prefix_cache(False, True), "vLLM cannot while blocks are held"
    producer.until(lambda: not producer.must_step)
    assert producer.engine.is_whole
    assert producer.engine.scheduler.reset_prefix_cache(False, True)


def test_a_call_to_an_engine_that_was_idle_for_long_gets_one_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to pause it, or to empty its prefix cache: what was read meanwhile is free after that."""
    producer, consumer = make("kv_producer", **LONG), make("kv_consumer")
    params = prefill(producer, "p", PROMPT)
    decode(consumer, "d", PROMPT, params)
    wait_until_reported(producer)
    monkeypatch.setattr("kvferry.connector.scheduler_side.idle.MAX_IDLE_S", 0.5)
    time.sleep(0.6)
    assert producer.must_step
    producer.step()
    assert producer.engine.is_whole
    assert producer.engine.scheduler.reset_prefix_cache()
