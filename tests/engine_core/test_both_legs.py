"""A router sends both legs of a request at once: the consumer asks the producer for a prompt that is still computed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvferry.connector.engine.facts import Siblings
from kvferry.protocol.params import announced_id
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

COUNT = 4
PROMPT = tokens(140, seed=3)
REMOTE_DECODE = {"do_remote_decode": True}


def leg_params(producer: Node, name: str, **changed: Any) -> dict[str, Any]:
    """The params that vllm-router sends to a decoder together with the prefill."""
    local = producer.engine.connector.scheduler_side.channel.local
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": announced_id(local.boot, local.engine_id),
        "remote_host": "127.0.0.1",
        "remote_port": producer.port,
        "tp_size": 1,
        "remote_request_id": name,
        **changed,
    }


def ids(name: str) -> tuple[str, str]:
    """The ids of both legs of a request, as vLLM makes them."""
    return f"cmpl-{name}-0-0123abcd", f"cmpl-{name}-0-89efcdab"


def check(consumer: Node, leg: str, prompt: list[int] = PROMPT) -> None:
    assert consumer.engine.answers[leg].tokens == expected_tokens(
        prompt, COUNT, consumer.window
    )


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize(
    "step_tokens", [64, 256], ids=["in three steps", "in one step"]
)
@pytest.mark.parametrize("config", [{}, {"overlap": True}, {"tp": 2}], ids=str)
def test_the_prompt_is_loaded_whichever_leg_comes_first(
    make: Any, first: str, config: dict[str, Any], step_tokens: int
) -> None:
    config = {"max_step_tokens": step_tokens, **config}
    producer, consumer = make("kv_producer", **config), make("kv_consumer", **config)
    prefill, decode = ids("x")

    def send_decode() -> None:
        consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)

    def send_prefill() -> None:
        producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)

    (send_prefill if first == "prefill" else send_decode)()
    for _ in range(3):
        consumer.step()
    (send_decode if first == "prefill" else send_prefill)()
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("loads") == 1
    assert consumer.engine.counted("local_recomputes") == 0
    until(
        (producer, consumer),
        lambda: producer.engine.is_whole and consumer.engine.is_whole,
    )
    assert producer.engine.answers[prefill].params is not None


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_legs_of_llm_ds_sidecar_are_joined_by_their_id(
    make: Any, first: str
) -> None:
    """As it writes them with `--kv-connector=offloading`: their request ids need not be alike."""
    allowed = {"extra": {"allowed_hosts": ["127.0.0.1"]}}
    config: dict[str, Any] = {"max_step_tokens": 64}
    producer = make("kv_producer", **config)
    consumer = make("kv_consumer", **allowed, **config)
    joined = {"kv_request_id": "2f0c6f7e-6a4e-4a55"}
    at = {"remote_host": "127.0.0.1", "remote_port": producer.port}

    def send(leg: str) -> None:
        if leg == "prefill":
            params: dict[str, Any] = {"remote_decoder": joined}
            producer.engine.add("cmpl-a-0-0123abcd", PROMPT, params, max_tokens=1)
        else:
            params = {"remote_prefiller": {**joined, **at}}
            consumer.engine.add("cmpl-b-0-89efcdab", PROMPT, params, max_tokens=COUNT)

    legs = ["prefill", "decode"]
    send(first)
    for _ in range(2):
        consumer.step()
    legs.remove(first)
    send(legs[0])
    until(
        (producer, consumer),
        lambda: (
            "cmpl-b-0-89efcdab" in consumer.engine.answers
            and consumer.engine.answers["cmpl-b-0-89efcdab"].finish_reason is not None
        ),
    )
    check(consumer, "cmpl-b-0-89efcdab")
    assert consumer.engine.counted("loads") == 1
    assert consumer.engine.counted("local_recomputes") == 0
    until(
        (producer, consumer),
        lambda: producer.engine.is_whole and consumer.engine.is_whole,
    )


def test_a_leg_that_announces_no_engine_of_kvferrys_asks_listed_hosts_only(
    make: Any,
) -> None:
    """Any client can write it, and another program may listen at that port of this host."""
    producer, consumer = make("kv_producer"), make("kv_consumer")
    at = {"remote_host": "127.0.0.1", "remote_port": producer.port}
    params = {"remote_prefiller": {"kv_request_id": "x", **at}}
    assert consumer.decode("d", PROMPT, params, producer, count=COUNT) == len(PROMPT)
    assert consumer.engine.counted("local_recomputes", "host_not_allowed") == 1
    itself = make("kv_both", extra={"allowed_hosts": ["127.0.0.1"]})
    at["remote_port"] = itself.port
    params = {"remote_prefiller": {"kv_request_id": "x", **at}}
    assert itself.decode("d", PROMPT, params, count=COUNT) == len(PROMPT)
    assert itself.engine.counted("local_recomputes", "local_engine") == 1


def test_a_request_waits_as_long_as_its_producer_has_it_in_its_queue(make: Any) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill, decode = ids("x")
    producer.engine.add(
        prefill, PROMPT, REMOTE_DECODE, max_tokens=1
    )  # it arrives, and no step is taken
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    queries = consumer.engine.connector.scheduler_side.queries.queries
    until((consumer,), lambda: queries.snapshot().known)
    assert not consumer.engine.answers[decode].tokens
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("loads") == 1


def settled(consumer: Node) -> bool:
    """Whether no question is open, not even of a request that has ended."""
    return not consumer.engine.connector.scheduler_side.queries.queries.snapshot().open


def wait_until_known(consumer: Node) -> None:
    """Wait until a producer has said that it has the prompt."""
    queries = consumer.engine.connector.scheduler_side.queries.queries
    until((consumer,), lambda: queries.snapshot().known)


@pytest.mark.parametrize(("policy", "computed"), [("recompute", 1), ("fail", 0)])
def test_a_prefill_that_is_aborted_ends_the_decode_by_the_policy_for_failed_loads(
    make: Any, policy: str, computed: int
) -> None:
    producer, consumer = (
        make("kv_producer", max_step_tokens=64),
        make("kv_consumer", policy=policy),
    )
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.step()
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    wait_until_known(consumer)
    producer.engine.abort(prefill)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    assert consumer.engine.answers[decode].finish_reason == (
        "length" if computed else "error"
    )
    assert consumer.engine.counted("local_recomputes", "prefill_failed") == computed
    assert consumer.engine.counted("failed_requests") == 1 - computed
    until(
        (producer, consumer),
        lambda: (
            producer.engine.is_whole and consumer.engine.is_whole and settled(consumer)
        ),
    )


def test_a_retry_is_not_told_of_the_prefill_that_was_aborted_before_it(
    make: Any,
) -> None:
    """The first decoder was gone, so nobody has asked for the first prefill; the second one asks before its own."""
    producer = make("kv_producer", max_step_tokens=64)
    consumer = make("kv_consumer", policy="fail")
    first, decode = ids("x")
    producer.engine.add(first, PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.step()
    producer.engine.abort(first)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    queries = consumer.engine.connector.scheduler_side.channel.query_client
    until((producer, consumer), lambda: queries.snapshot().answered)
    producer.engine.add("cmpl-x-0-45670123", PROMPT, REMOTE_DECODE, max_tokens=1)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("loads") == 1
    until((producer, consumer), lambda: producer.engine.is_whole and settled(consumer))


def test_a_prompt_whose_prefill_was_aborted_before_it_was_asked_for_is_computed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No retry comes. The producer remembers nothing of it."""
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 0.5)
    producer, consumer = make("kv_producer"), make("kv_consumer", policy="fail")
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.engine.abort(prefill)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("local_recomputes", "prompt_unknown") == 1
    directory = producer.engine.connector.scheduler_side.tickets.directory
    assert not directory.snapshot().prompts


def test_a_request_that_is_to_fail_is_computed_where_vllm_loads_nothing_for_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another child of a MultiConnector may have its tokens. A failure that no load belongs to would end the engine."""
    producer, consumer = (
        make("kv_producer", max_step_tokens=64),
        make("kv_consumer", policy="fail"),
    )
    prefill, decode = ids("x")
    connector = consumer.engine.connector
    matched = connector.get_num_new_matched_tokens

    def nothing(request: Any, num_local: int) -> tuple[int | None, bool]:
        found, _ = matched(request, num_local)
        return (None, False) if found is None else (0, False)

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", nothing)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    wait_until_known(consumer)
    producer.engine.abort(prefill)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("failed_requests") == 1
    until((consumer,), lambda: consumer.engine.is_whole)


@pytest.mark.parametrize(
    "ticket",
    [
        {},
        REMOTE_DECODE,
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "kvferry": {"version": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_ticket_that_cannot_be_used_costs_a_prefill(
    make: Any, ticket: dict[str, Any], policy: str
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", policy=policy)
    prefill, decode = ids("x")
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    asked = producer.engine.connector.scheduler_side.tickets.directory
    asked.ticket(prefill, ticket)
    until(
        (consumer,), lambda: consumer.engine.answers[decode].finish_reason is not None
    )
    check(consumer, decode)
    reasons = ("invalid_params", "foreign_params")
    assert (
        sum(consumer.engine.counted("local_recomputes", reason) for reason in reasons)
        == 1
    )


def test_an_internal_error_in_an_answer_costs_a_prefill_and_not_the_engine(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill, decode = ids("x")
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)

    def broken(*_: object) -> object:
        raise ZeroDivisionError("unheard of")

    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    monkeypatch.setattr("kvferry.connector.scheduler_side.intake.decode_params", broken)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("local_recomputes", "invalid_params") == 1


def test_a_decode_that_is_aborted_while_it_waits_gives_the_ticket_back_without_a_step(
    make: Any,
) -> None:
    """The consumer has no request then, so its loop takes no step either."""
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill, decode = ids("x")
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    consumer.step()
    consumer.engine.abort(decode)
    while consumer.go_on():
        pass
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    until(
        (producer,),
        lambda: (
            not consumer.must_step and producer.engine.is_whole and settled(consumer)
        ),
    )
    assert producer.engine.counted("leases_released", "release") == 1
    assert consumer.engine.is_whole


def test_a_prompt_that_no_producer_knows_is_computed_here(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 0.5)
    producer, consumer = make("kv_producer"), make("kv_consumer")
    _, decode = ids("x")
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("local_recomputes", "prompt_unknown") == 1
    assert settled(consumer)


def test_a_producer_that_dies_while_it_is_asked_costs_a_wait_and_a_prefill(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 0.5)
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    wait_until_known(consumer)
    producer.engine.connector.scheduler_side.channel.listener.close()
    until(
        (consumer,), lambda: consumer.engine.answers[decode].finish_reason is not None
    )
    check(consumer, decode)
    assert consumer.engine.counted("local_recomputes", "prompt_unknown") == 1
    producer.engine.abort(prefill)


@pytest.mark.parametrize(
    ("changed", "prompt", "reason"),
    [
        ({"remote_request_id": "another"}, PROMPT, "prompt_unknown"),
        ({"remote_engine_id": "stock"}, PROMPT, "foreign_params"),
        ({"remote_port": 0}, PROMPT, "invalid_params"),
        ({}, [*PROMPT[:-1], 5], "other_prompt"),
    ],
    ids=["another id", "no kvferry engine", "no port", "another prompt"],
)
def test_a_leg_that_does_not_fit_is_computed_here(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    prompt: list[int],
    reason: str,
) -> None:
    # The answer is there before the time of the query is over, however long a busy machine takes for it.
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 1e6)
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(
        decode, prompt, leg_params(producer, "x", **changed), max_tokens=COUNT
    )
    queries = consumer.engine.connector.scheduler_side.queries.queries
    # The producer does not step meanwhile: it would be done with the prompt, and give no reason any more.
    if reason == "other_prompt":
        until((consumer,), lambda: bool(queries.snapshot().unknown))
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 0.0)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode, prompt)
    assert consumer.engine.counted("local_recomputes", reason) == 1
    assert consumer.engine.counted("loads") == 0


@pytest.mark.parametrize("is_live", [False, True])
def test_a_client_cannot_tell_from_the_time_of_its_answer_whether_an_id_is_live(
    make: Any, monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    """Its own prompt is another one. It is answered when an id that nobody has would be, and no earlier."""
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 1e6)
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill, decode = ids("x")
    if is_live:
        producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(
        decode, tokens(140, seed=9), leg_params(producer, "x"), max_tokens=COUNT
    )
    queries = consumer.engine.connector.scheduler_side.queries.queries
    query_client = consumer.engine.connector.scheduler_side.channel.query_client

    def is_answered() -> bool:
        # Only the answer about a live id has a reason, which the engine has once it has taken the answer.
        answered = (
            queries.snapshot().unknown if is_live else query_client.snapshot().answered
        )
        return bool(answered) or not len(queries)

    until((consumer,), is_answered)
    for _ in range(5):
        consumer.step()
    assert len(queries) == 1, "the request still waits"
    monkeypatch.setattr("kvferry.scheduler.consumer.pending_queries.UNKNOWN_S", 0.0)
    until(
        (consumer,), lambda: consumer.engine.answers[decode].finish_reason is not None
    )
    assert (
        consumer.engine.counted(
            "local_recomputes", "other_prompt" if is_live else "prompt_unknown"
        )
        == 1
    )
    producer.engine.abort(prefill)


def test_prompts_of_one_id_go_to_who_has_the_same_prompt(make: Any) -> None:
    """Siblings of `n > 1` and prompts of one batch have ids of their own; a client may give equal ids all the same."""
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prompts = [tokens(100, seed=seed) for seed in (1, 2)]
    for n, prompt in enumerate(prompts):
        producer.engine.add(f"cmpl-x-0-0000000{n}", prompt, REMOTE_DECODE, max_tokens=1)
    for n, prompt in enumerate(prompts):
        consumer.engine.add(
            f"cmpl-x-0-1111111{n}", prompt, leg_params(producer, "x"), max_tokens=COUNT
        )
    names = [f"cmpl-x-0-1111111{n}" for n in range(2)]
    until(
        (producer, consumer),
        lambda: all(consumer.engine.answers[name].finish_reason for name in names),
    )
    for name, prompt in zip(names, prompts, strict=True):
        check(consumer, name, prompt)
    assert consumer.engine.counted("loads") == 2
    until(
        (producer, consumer),
        lambda: producer.engine.is_whole and consumer.engine.is_whole,
    )


def test_a_prompt_of_another_data_parallel_rank_is_found(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's answers name one rank; vLLM's front end has given this prompt to another."""
    consumer, there = make("kv_consumer"), make("kv_producer")
    monkeypatch.setattr(
        "kvferry.connector.scheduler_side.side.siblings_of",
        lambda config: Siblings((there.port,), are_all=True),
    )
    named = make("kv_producer")
    prefill, decode = ids("x")
    consumer.engine.add(decode, PROMPT, leg_params(named, "x"), max_tokens=COUNT)
    there.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    until(
        (there, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("loads") == 1
    until((there, consumer), lambda: there.engine.is_whole and settled(consumer))


def test_a_producer_that_announces_nothing_answers_all_the_same(make: Any) -> None:
    producer, consumer = (
        make("kv_producer", extra={"streaming": "off"}),
        make("kv_consumer"),
    )
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("loads") == 1


def test_push_is_announced_once_a_consumer_that_can_ask_has_connected(
    make: Any,
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    first = producer.prefill("p0", PROMPT)
    consumer.decode("d0", PROMPT, first)
    second = producer.prefill("p1", tokens(100, seed=5))
    assert [params["transfer_mode"] for params in (first, second)] == ["pull", "push"]
    off = make("kv_producer", extra={"streaming": "off"})
    params = off.prefill("q0", tokens(100, seed=8))
    consumer.decode("e0", tokens(100, seed=8), params)
    assert off.prefill("q1", tokens(100, seed=6))["transfer_mode"] == "pull"


def test_push_is_not_announced_where_a_prompt_may_be_on_a_rank_that_nobody_names(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each such prompt would wait for 10 s, and would then be computed by the decoder."""
    consumer = make("kv_consumer")
    monkeypatch.setattr(
        "kvferry.connector.scheduler_side.side.siblings_of",
        lambda config: Siblings((), are_all=False),
    )
    with caplog.at_level("WARNING", "kvferry"):
        producer = make("kv_producer")
    assert "routers are not told to send both legs at once" in caplog.text
    consumer.decode("d0", PROMPT, producer.prefill("p0", PROMPT))
    second = producer.prefill("p1", tokens(100, seed=5))
    assert second["transfer_mode"] == "pull"
    # A router that does it all the same is served.
    prefill, decode = ids("x")
    prompt = tokens(120, seed=6)
    producer.engine.add(prefill, prompt, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(decode, prompt, leg_params(producer, "x"), max_tokens=COUNT)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode, prompt)
    assert consumer.engine.counted("loads") == 2


def test_a_ticket_may_come_before_the_producers_workers_have_the_orders(
    make: Any,
) -> None:
    producer, consumer = make("kv_producer", max_step_tokens=256), make("kv_consumer")
    prefill, decode = ids("x")
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    runner, waiting = producer.runners[0], threading.Event()
    steps, run = iter(range(1)), runner.step

    def late(*args: Any) -> Any:
        """The step's orders reach the worker when the consumer has read the slot."""
        for _ in steps:
            until((consumer,), lambda: consumer.engine.counted("loads") == 1)
            waiting.wait(0.2)
        return run(*args)

    runner.step = late
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("local_recomputes") == 0
