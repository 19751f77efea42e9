"""An idle engine's first step: messages and leases that came before it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_core.test_producer import offered
from tests.harness.core.scheduler import tokens
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("sleeps_long")

REMOTE_DECODE = {"do_remote_decode": True}


def test_the_connector_itself_asks_for_steps_until_a_hold_is_announced(
    make_engine: Any,
) -> None:
    """The blocks of a model with states are held after its request has ended. vLLM takes another step after that. If it
    did not, no consumer could read before the next one."""
    engine = make_engine(states=1)
    engine.add("p", tokens(40), REMOTE_DECODE, max_tokens=1)
    while engine.answers["p"].params is None:
        engine.step()
    assert engine.connector.has_pending_push_work()
    assert engine.step().orders.holds
    assert not engine.connector.has_pending_push_work()


def test_a_lease_that_was_read_while_idle_and_then_ran_out_is_done_and_has_not_expired(
    make_engine: Any,
) -> None:
    engine = make_engine(lease_s=0.3)
    engine.add("p", tokens(40), REMOTE_DECODE, max_tokens=1)
    engine.step()
    engine.step()
    assert not engine.scheduler.has_requests()
    side = engine.connector.scheduler_side
    ended_s = side.leases.clock.awake_s + 0.3
    wait_until(
        lambda: side.leases.clock.awake_s >= ended_s,
        "the listener's thread has wound the clock",
    )
    step = engine.step(over={"p"})
    assert step.orders is None
    assert engine.is_whole
    assert side.monitor.counters.total("leases_released", "done") == 1
    assert side.monitor.counters.total("leases_released", "expired") == 0


def test_a_request_of_an_id_whose_lease_is_not_over_is_served_without_one(
    make_engine: Any,
) -> None:
    """vLLM no longer knows the first request, so it accepts the second."""
    engine = make_engine()
    for _ in range(2):
        engine.add("same", tokens(40), REMOTE_DECODE, max_tokens=1)
        engine.run()
    assert engine.answers["same"].params is None
    assert engine.used_blocks == 3
    engine.step()
    engine.step(over={"same"})
    assert engine.is_whole
    engine.add("same", tokens(40), REMOTE_DECODE, max_tokens=1)
    assert engine.run()["same"].params is not None


def test_cached_blocks_that_were_held_are_reused_from_their_end(
    make_engine: Any,
) -> None:
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
    assert 0 < hit < 64, (
        "the first blocks of the prompt are still cached, the last ones went first"
    )
    assert engine.block_ids("again")[: hit // 16] == held[: hit // 16]
    engine.finish(step)
