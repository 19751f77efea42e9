"""A producer's scheduler side in vLLM's scheduler: when and how long blocks are held, and the response's params."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.params import RemotePrefill, digest_of_id, read_params
from tests.harness.core.scheduler import BLOCK_TOKENS, SAMPLED, SchedulerEngine, tokens

PROMPT = tokens(40)
REMOTE_DECODE = {"do_remote_decode": True}


def offered(engine: SchedulerEngine, request_id: str) -> RemotePrefill:
    """The offered params, after a trip through JSON."""
    params = read_params(json.loads(json.dumps(engine.answers[request_id].params)))
    assert isinstance(params, RemotePrefill)
    return params


@pytest.mark.parametrize(
    "overlap", [False, True], ids=["one step", "overlapping steps"]
)
@pytest.mark.parametrize(
    ("length", "max_tokens"), [(40, 1), (40, 2), (40, 7), (40, 10), (300, 1), (300, 9)]
)
def test_an_answer_offers_its_prompt_however_many_tokens_it_has(
    make_engine: Any, length: int, max_tokens: int, overlap: bool
) -> None:
    """300 tokens are computed in three chunks. The decoder's prompt lacks what the prefill has generated."""
    engine = make_engine(overlap=overlap)
    engine.add("p", tokens(length), REMOTE_DECODE, max_tokens=max_tokens)
    steps = [engine.schedule()]
    while engine.answers["p"].finish_reason is None:
        steps += [engine.schedule()] if overlap else []
        engine.finish(steps.pop(0))
        steps += [] if steps else [engine.schedule()]
    params = offered(engine, "p")
    assert (params.remote_num_tokens, len(params.kvferry.digests)) == (
        length,
        -(-length // 256),
    )
    assert len(params.remote_block_ids[0]) == -(-length // BLOCK_TOKENS)


@pytest.mark.parametrize(
    "request_id", ["cmpl-" + 1000 * "x", "line\nbreak"], ids=["long", "line break"]
)
def test_a_consumer_can_read_the_params_of_a_request_with_any_id(
    make_engine: Any, request_id: str
) -> None:
    """Clients choose ids, and vLLM accepts longer ones than params may have."""
    engine = make_engine()
    engine.add(request_id, PROMPT, REMOTE_DECODE, max_tokens=1)
    engine.run()
    named = offered(engine, request_id).remote_request_id
    assert named == digest_of_id(request_id)


def test_the_slot_is_opened_with_the_first_step_and_held_with_the_one_that_completes_the_prompt(
    make_engine: Any,
) -> None:
    engine = make_engine(max_step_tokens=30)
    engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    first, second, third = (
        engine.step().orders,
        engine.step().orders,
        engine.step().orders,
    )
    assert [len(first.opens), len(first.completions)] == [1, 0]
    assert [hold.request_id for hold in second.completions] == ["p"]
    assert third is None


def test_a_prefill_without_a_free_slot_is_served_and_offers_nothing(
    make_engine: Any,
) -> None:
    engine = make_engine(extra={"lease_slots": 1})
    engine.add("first", PROMPT, REMOTE_DECODE, max_tokens=1)
    engine.add("second", tokens(20, seed=4), REMOTE_DECODE, max_tokens=1)
    answers = engine.run()
    assert answers["first"].params is not None
    assert (answers["second"].params, answers["second"].finish_reason) == (
        None,
        "length",
    )
    assert engine.used_blocks == 3
    assert engine.counted("leases_refused") == 1


def test_a_session_of_streamed_input_and_a_prompt_of_another_role_are_served_without_a_lease(
    make_engine: Any,
) -> None:
    engine = make_engine()
    engine.add("s", PROMPT, REMOTE_DECODE, max_tokens=1, resumable=True)
    engine.step()
    assert len(engine.connector.scheduler_side.leases) == 0
    consumer = make_engine(role="kv_consumer")
    consumer.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    assert consumer.run()["p"].params is None
    assert consumer.is_whole


def test_a_producer_that_stops_while_a_step_is_in_flight_offers_what_was_computed_before(
    make_engine: Any,
) -> None:
    engine = make_engine(overlap=True)
    request = engine.add(
        "p",
        tokens(3 * BLOCK_TOKENS),
        REMOTE_DECODE,
        max_tokens=9,
        stop_token_ids=[SAMPLED],
    )
    first, second = engine.schedule(), engine.schedule()
    engine.finish(first)
    assert request.num_in_flight_tokens == 1
    params = offered(engine, "p")
    assert (params.remote_num_tokens, len(params.remote_block_ids[0])) == (
        3 * BLOCK_TOKENS,
        3,
    )
    engine.finish(second)


def test_a_hook_of_the_other_role_is_refused_and_no_other_attribute_is_made_up(
    make: Any,
) -> None:
    node = make("kv_producer")
    with pytest.raises(LocalProtocolError, match="in the scheduler"):
        node.engine.connector.register_kv_caches({})
    with pytest.raises(LocalProtocolError, match="in a worker"):
        node.workers[0].reset_cache()
    assert not hasattr(node.engine.connector, "no_such_hook")
