"""Prompts whose beginning another engine has: what routers write, and what becomes of it on the engine that asks.

The answerer is scripted, over real sockets; the leases in its tickets are real ones of a real engine, and are read over
NIXL. What an answerer finds is tested in `test_prefix_pulls.py`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvferry.link import limits
from kvferry.link.limits import Backoff
from kvferry.protocol.params import RemotePrefill, read_params
from kvferry.protocol.queries import Answer, PrefixQuery, PromptProgress
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.scheduler.consumer.pull_estimate import (
    ASSUMED_BYTES_S,
    ASSUMED_TOKENS_S,
    PullEstimate,
)
from kvferry.trace.events import Phase
from kvferry.trace.reading import read_recording
from kvferry.trace.summary import summarize
from tests.engine_core.test_tracing import events_about, events_of
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.harness.prefix_answers import (
    Reply,
    ScriptedAnswerer,
    chain_of,
    has,
    over,
    queued,
    silent,
    ticket,
)

COUNT = 4
PREFIX = 512
PROMPT = tokens(PREFIX + 40, seed=5)
SIZES = {"num_blocks": 240, "max_tokens": 1024}
ALLOWED = {"allowed_hosts": ["127.0.0.1"], "prefix_pull_min_tokens": 1}
NOT_PULLED = "prefixes_not_pulled"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy model computes a prompt sooner than an answer comes: requests wait as a large model's do."""
    wait_for(monkeypatch, 3600.0)


def wait_for(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have requests wait so long for answers."""
    monkeypatch.setattr(PullEstimate, "wait_s", lambda *_: seconds)


@pytest.fixture
def make_answerer() -> Iterator[Callable[[Reply], ScriptedAnswerer]]:
    made: list[ScriptedAnswerer] = []

    def build(reply: Reply) -> ScriptedAnswerer:
        made.append(ScriptedAnswerer(reply))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def make_asker(make: Any) -> Callable[..., Node]:
    def build(role: str = "kv_both", **config: Any) -> Node:
        extra = {**ALLOWED, **config.pop("extra", {})}
        node: Node = make(role, extra=extra, **{**SIZES, **config})
        return node

    return build


@pytest.fixture
def source(make: Any) -> Node:
    """The engine whose leases the scripted tickets have."""
    node: Node = make("kv_both", **SIZES)
    return node


def named(*answerers: ScriptedAnswerer, **more: Any) -> dict[str, Any]:
    """The params that llm-d's sidecar makes of its header."""
    sources = [one.source for one in answerers]
    return {**more, "remote_kv_source": sources[0] if len(sources) == 1 else sources}


def hinted(answerer: ScriptedAnswerer) -> KvHintsEnvelope:
    """As Dynamo's worker gives them to vLLM."""
    payload = {
        "source_control_endpoint": f"tcp://127.0.0.1:{answerer.port}",
        "block_hashes": [1, 2],
        "mode": "copy",
    }
    action = KvHintAction("a", "kv.fetch", "1.0", payload)
    return KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[action])


def total(node: Node, name: str, label: str | None = None) -> int:
    node.step()  # what was counted since the last one
    return node.engine.counted(name, label)


def is_served(node: Node, name: str, prompt: list[int] = PROMPT) -> bool:
    """Whether the request has ended as if nothing had been asked."""
    answer = node.engine.answers[name]
    assert answer.finish_reason == "length", answer
    return answer.tokens == expected_tokens(prompt, COUNT, node.window)


# Who names a source.


WAYS = ("llm-d", "a list", "hints", "a hint among the params", "configured")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", [{}, {"overlap": True}, {"tp": 2}], ids=str)
def test_a_prefix_is_read_from_the_engine_that_is_named(
    make_asker: Any, make_answerer: Any, source: Node, way: str, config: dict[str, Any]
) -> None:
    answerer = make_answerer(has(source.prefill("p", PROMPT[:PREFIX])))
    extra = {}
    if way == "configured":
        extra = {"prefix_sources": [f"127.0.0.1:{answerer.port}"]}
    asker = make_asker(extra=extra, **config)
    params = {
        "llm-d": named(answerer),
        "a list": {"remote_kv_source": [answerer.source]},
        "a hint among the params": {"kv_hint": msgspec.to_builtins(hinted(answerer))},
    }.get(way)
    more = {"kv_hints": hinted(answerer)} if way == "hints" else {}
    computed = asker.decode("d", PROMPT, params, source, count=COUNT, **more)
    assert computed == len(PROMPT) - PREFIX
    (query,) = answerer.queries
    assert query.chain == chain_of(PROMPT)
    assert total(asker, "prefix_queries") == 1
    assert total(asker, "prefixes_found") == 1
    assert total(asker, "prefix_loads") == total(asker, "loads") == 1
    assert total(asker, "prefix_tokens_loaded") == PREFIX
    assert total(asker, NOT_PULLED) == total(asker, "local_recomputes") == 0
    source.until(lambda: source.engine.is_whole)
    assert source.engine.counted("leases_released", "done") == 1


def test_a_prefill_leg_pulls_the_last_turn_and_is_decoded_elsewhere(
    make_asker: Any, make_answerer: Any, source: Node
) -> None:
    answerer = make_answerer(has(source.prefill("p", PROMPT[:PREFIX])))
    asker = make_asker()
    asker.engine.add(
        "leg", PROMPT, named(answerer, do_remote_decode=True), max_tokens=1
    )
    until(
        (asker, source), lambda: asker.engine.answers["leg"].finish_reason is not None
    )
    assert total(asker, "prefix_tokens_loaded") == PREFIX
    params = asker.engine.answers["leg"].params
    assert params is not None
    # The decoder has the first turn, and reads the rest.
    source.decode("d", PROMPT, params, asker, count=COUNT)
    assert source.engine.counted("loads") == 1
    until((asker, source), lambda: asker.engine.is_whole)


def test_of_several_engines_the_one_that_has_most_is_read_and_the_others_get_theirs_back(
    make_asker: Any, make_answerer: Any, source: Node
) -> None:
    short, long = (source.prefill(f"p{n}", PROMPT[:n]) for n in (256, PREFIX))
    answerers = [make_answerer(has(one)) for one in (short, long)]
    answerers.append(make_answerer(over()))
    asker = make_asker()
    computed = asker.decode("d", PROMPT, named(*answerers), source, count=COUNT)
    assert computed == len(PROMPT) - PREFIX
    source.until(lambda: source.engine.counted("leases_released", "release") == 1)
    source.until(lambda: source.engine.counted("leases_released", "done") == 1)


def test_only_what_is_beyond_the_own_prefix_hit_is_read(
    make_asker: Any, make_answerer: Any, source: Node
) -> None:
    answerer = make_answerer(has(source.prefill("p", PROMPT[:PREFIX])))
    asker = make_asker()
    asker.decode("first", PROMPT[:300], None, count=COUNT)
    computed = asker.decode("d", PROMPT, named(answerer), source, count=COUNT)
    assert computed == len(PROMPT) - PREFIX
    assert total(asker, "prefix_tokens_loaded") == PREFIX - 288


def test_what_is_in_the_own_cache_is_not_waited_for(
    make_asker: Any, make_answerer: Any
) -> None:
    answerer = make_answerer(silent)
    asker = make_asker()
    asker.decode("first", PROMPT, None, count=COUNT)
    asker.engine.add("d", PROMPT, named(answerer), max_tokens=COUNT)
    asker.step()
    assert asker.engine.status("d") == "RUNNING"
    asker.answer("d")
    assert is_served(asker, "d")
    assert total(asker, NOT_PULLED, "local_hit") == 1


def test_a_turn_or_a_remote_prompt_comes_first(
    make_asker: Any, make_answerer: Any, source: Node
) -> None:
    answerer = make_answerer(silent)
    asker = make_asker()
    params = {**source.prefill("p", PROMPT), **named(answerer)}
    assert asker.decode("d", PROMPT, params, source, count=COUNT) == 1
    assert answerer.queries == []
    assert total(asker, "prefix_queries") == 0


# Who is not asked.


def test_nobody_is_asked_whom_the_operator_has_not_allowed(
    make: Any, make_answerer: Any
) -> None:
    answerer = make_answerer(silent)
    minimum = {"prefix_pull_min_tokens": 1}
    configs: list[dict[str, Any]] = [
        {},  # this host is allowed for kvferry's own params, and not enough here
        {"allowed_hosts": ["10.0.0.0/8"]},
    ]
    for index, extra in enumerate(configs):
        asker = make("kv_both", extra={**minimum, **extra}, **SIZES)
        asker.decode("d", PROMPT, named(answerer), count=COUNT)
        assert total(asker, NOT_PULLED, "host_not_allowed") == 1, index
        assert total(asker, "prefix_queries") == 0
    assert answerer.queries == []


OFF: dict[str, dict[str, Any]] = {
    "switched off": {"extra": {"prefix_pulls": "off"}},
    "a failed load would end the request": {"policy": "fail"},
    "it reads from nobody": {"role": "kv_producer"},
}


@pytest.mark.parametrize("config", OFF.values(), ids=OFF)
def test_an_engine_that_may_not_pull_asks_nobody(
    make_asker: Any, make_answerer: Any, config: dict[str, Any]
) -> None:
    answerer = make_answerer(silent)
    asker = make_asker(**config)
    asker.decode("d", PROMPT, named(answerer), count=COUNT)
    assert answerer.queries == []
    assert total(asker, "prefix_queries") == total(asker, NOT_PULLED) == 0


NOT_WORTH: dict[str, tuple[list[int], dict[str, Any], str | None]] = {
    "no whole chunk": (PROMPT[:255], {}, None),
    "fewer than the operator wants": (
        PROMPT,
        {"prefix_pull_min_tokens": 513},
        "below_threshold",
    ),
}


@pytest.mark.parametrize(
    ("prompt", "extra", "reason"), NOT_WORTH.values(), ids=NOT_WORTH
)
def test_what_is_not_worth_a_pull_is_not_asked_for(
    make_asker: Any,
    make_answerer: Any,
    prompt: list[int],
    extra: dict[str, Any],
    reason: str | None,
) -> None:
    answerer = make_answerer(silent)
    asker = make_asker(extra=extra)
    asker.decode("d", prompt, named(answerer), count=COUNT)
    assert answerer.queries == []
    assert total(asker, NOT_PULLED) == (reason is not None)
    assert total(asker, NOT_PULLED, reason) == (reason is not None)


def test_an_engine_that_is_named_by_itself_is_not_asked(make_asker: Any) -> None:
    asker = make_asker()
    itself = {"remote_host": "127.0.0.1", "remote_port": asker.port}
    asker.decode("d", PROMPT, {"remote_kv_source": itself}, count=COUNT)
    assert total(asker, NOT_PULLED, "local_engine") == 1


WRONG: dict[str, Any] = {
    "a text": "127.0.0.1:1",
    "a port that is none": {"remote_host": "127.0.0.1", "remote_port": 0},
    "too many": [{"remote_host": "127.0.0.1", "remote_port": 1}] * 9,
    "a nested thing": [[[[]]]],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("leg", [{}, {"do_remote_decode": True}], ids=["plain", "leg"])
def test_a_source_that_cannot_be_read_costs_a_computation(
    make_asker: Any, wrong: Any, leg: dict[str, Any]
) -> None:
    asker = make_asker()
    asker.engine.add("d", PROMPT, {**leg, "remote_kv_source": wrong}, max_tokens=COUNT)
    asker.answer("d")
    assert is_served(asker, "d")
    assert total(asker, NOT_PULLED, "invalid_source") == 1
    assert (asker.engine.answers["d"].params is not None) == bool(leg)


def test_a_hint_that_cannot_be_read_costs_a_computation(make_asker: Any) -> None:
    asker = make_asker()
    action = KvHintAction("a", "kv.fetch", "1.0", {"source_control_endpoint": 7})
    hints = KvHintsEnvelope("0.1", "m", [action])
    asker.decode("d", PROMPT, None, count=COUNT, kv_hints=hints)
    assert total(asker, NOT_PULLED, "invalid_source") == 1


# Answers that are of no use.


def hostile(params: dict[str, Any], **changed: Any) -> RemotePrefill:
    """A ticket that differs from the real one in these fields."""
    read = read_params(json.loads(json.dumps(params)))
    assert isinstance(read, RemotePrefill)
    flat = {key: value for key, value in changed.items() if hasattr(read, key)}
    of_ticket = {key: value for key, value in changed.items() if key not in flat}
    made = msgspec.structs.replace(read.kvferry, **of_ticket)
    return msgspec.structs.replace(read, kvferry=made, **flat)


def altered(**changed: Any) -> Callable[[dict[str, Any]], Reply]:
    return lambda params: has(hostile(params, **changed))


ANSWERS: dict[str, tuple[Callable[[dict[str, Any]], Reply], str]] = {
    "there is none": (lambda _: over(), "no_prefix"),
    "no lease is left": (lambda _: over("no_lease"), "no_lease"),
    "it answers no such queries": (lambda _: over("prefix_off"), "prefix_off"),
    "a reason of a later version": (lambda _: over("too_busy"), "no_prefix"),
    # The frame itself is none then: the connection ends.
    "bytes": (lambda _: has(b"\xc1\xff\x00"), "no_answer"),
    "an empty object": (lambda _: has(b"\x80"), "invalid_answer"),
    "containers": (lambda _: has(b"\xdc\x0b\xb8" + b"\x90" * 3000), "invalid_answer"),
    "of another prompt": (
        altered(digests=("a1" * 16, "b2" * 16)),
        "other_prompt",
    ),
    "that is computed": (altered(stream_row=3), "invalid_answer"),
    "of other groups": (altered(held_from=(0, 0, 0)), "invalid_answer"),
    "of a host that is not allowed": (
        altered(remote_host="10.9.9.9"),
        "host_not_allowed",
    ),
    "of another lease": (altered(lease_epoch="00000000000000a"), "load_failed"),
    "of other blocks": (altered(remote_block_ids=((1,) * 32,)), "load_failed"),
}


@pytest.mark.parametrize(("reply", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_of_no_use_costs_a_computation(
    make_asker: Any,
    make_answerer: Any,
    source: Node,
    reply: Callable[[dict[str, Any]], Reply],
    reason: str,
) -> None:
    answerer = make_answerer(reply(source.prefill("p", PROMPT[:PREFIX])))
    asker = make_asker()
    asker.engine.add("d", PROMPT, named(answerer), max_tokens=COUNT)
    until((asker, source), lambda: asker.engine.answers["d"].finish_reason is not None)
    assert is_served(asker, "d")
    assert total(asker, NOT_PULLED, reason) == 1
    assert total(asker, NOT_PULLED) == 1
    assert total(asker, "failed_requests") == total(asker, "local_recomputes") == 0
    assert asker.engine.is_whole


def test_answers_that_cannot_be_used_do_not_fill_the_log(
    make_asker: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("of the test")
    queries = make_asker().engine.connector.scheduler_side.queries
    monkeypatch.setattr(queries, "_unusable", RateLimitedLog(log, 3600.0))
    for number in range(3):
        unusable = Answer(
            number=number, progress=PromptProgress.TICKET, params=msgspec.Raw(b"\x80")
        )
        queries.on_found(("10.0.0.1", 5600), unusable)
    assert not list(queries.take_found(lambda tokens: 0.0))
    (message,) = (each.getMessage() for each in caplog.records if each.name == log.name)
    assert message.startswith("an answer of 10.0.0.1:5600 cannot be used: ")


def test_a_lease_that_ends_before_the_read_costs_a_computation(
    make_asker: Any, make_answerer: Any, source: Node
) -> None:
    params = source.prefill("p", PROMPT[:PREFIX])
    source.engine.connector.scheduler_side.leases.release_all("reset")
    source.until(lambda: source.engine.is_whole)
    asker = make_asker()
    asker.decode("d", PROMPT, named(make_answerer(has(params))), source, count=COUNT)
    assert total(asker, NOT_PULLED, "load_failed") == 1
    assert total(asker, "failed_requests") == 0


# Time.


@pytest.mark.parametrize(
    ("reply", "reason"), [(silent, "no_answer"), (queued, "too_late")]
)
def test_an_answer_that_does_not_come_in_time_is_not_waited_for_and_is_given_back(
    make_asker: Any,
    make_answerer: Any,
    source: Node,
    reply: Reply,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for(monkeypatch, 0.1)
    params = source.prefill("p", PROMPT[:PREFIX])
    answerer = make_answerer(reply)
    asker = make_asker()
    asker.decode("d", PROMPT, named(answerer), source, count=COUNT)
    (query,) = answerer.queries
    assert total(asker, NOT_PULLED, reason) == 1
    asker.until(lambda: answerer.unsubscribed == [query.number])
    answerer.say(ticket(query.number, params))
    until(
        (asker, source),
        lambda: source.engine.counted("leases_released", "release") == 1,
    )
    source.until(lambda: source.engine.is_whole)
    assert total(asker, "loads") == 0


def test_an_engine_that_was_silent_is_not_asked_again_at_once(
    make_asker: Any, make_answerer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "AVOID", Backoff(600.0, 600.0))
    wait_for(monkeypatch, 0.1)
    answerer = make_answerer(silent)
    asker = make_asker()
    for index in range(3):
        prompt = tokens(300, seed=20 + index)
        asker.decode(f"d{index}", prompt, named(answerer), count=COUNT)
    assert len(answerer.queries) == 1
    assert total(asker, NOT_PULLED, "no_answer") == 3
    assert total(asker, "prefix_queries") == 1


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(
    make_asker: Any, make_answerer: Any, source: Node
) -> None:
    params = source.prefill("p", PROMPT[:PREFIX])
    answerer = make_answerer(queued)
    asker = make_asker()
    asker.engine.add("d", PROMPT, named(answerer), max_tokens=COUNT)
    asker.until(lambda: answerer.queries)
    asker.engine.abort("d")
    asker.until(lambda: answerer.unsubscribed == [answerer.queries[0].number])
    answerer.say(ticket(answerer.queries[0].number, params))
    until(
        (asker, source),
        lambda: source.engine.counted("leases_released", "release") == 1,
    )
    assert asker.engine.is_whole
    searches = asker.engine.connector.scheduler_side.queries.searches.snapshot()
    assert not searches.open


def test_weights_that_change_while_a_request_waits_make_its_answer_useless(
    make_asker: Any, make_answerer: Any, source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = source.prefill("p", PROMPT[:PREFIX])
    answerer = make_answerer(queued)
    asker = make_asker()
    asker.engine.add("d", PROMPT, named(answerer), max_tokens=COUNT)
    asker.until(lambda: answerer.queries)
    local = asker.engine.connector.scheduler_side.channel.local
    monkeypatch.setattr(local.weights, "is_attached", True)
    monkeypatch.setattr(type(local.weights), "version", lambda _: "step-7")
    answerer.say(ticket(answerer.queries[0].number, params))
    until((asker, source), lambda: asker.engine.answers["d"].finish_reason is not None)
    assert total(asker, NOT_PULLED, "reset") == 1
    assert total(asker, "loads") == 0


def test_many_requests_wait_at_once_and_others_go_on(
    make_asker: Any, make_answerer: Any, source: Node
) -> None:
    answerer = make_answerer(queued)
    asker = make_asker()
    names = [f"d{index}" for index in range(30)]
    for index, name in enumerate(names):
        prompt = tokens(260, seed=40 + index)
        asker.engine.add(name, prompt, named(answerer), max_tokens=1)
    assert asker.decode("other", PROMPT[:40], None, count=COUNT) == 40
    assert not any(asker.engine.answers[name].tokens for name in names)
    queries = answerer.wait_for_queries(len(names))
    answerer.set_reply(over())
    answerer.say(*map(_none, queries))
    asker.until(lambda: all(asker.engine.answers[name].finish_reason for name in names))
    assert total(asker, NOT_PULLED, "no_prefix") == len(names)


def _none(query: PrefixQuery) -> Answer:
    return Answer(number=query.number, progress=PromptProgress.OVER, reason="no_prefix")


# What is recorded.


def test_what_is_asked_and_what_becomes_of_it_is_recorded(
    make_asker: Any, make_answerer: Any, source: Node, tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    answerer = make_answerer(has(source.prefill("p", PROMPT[:PREFIX])))
    asker = make_asker(extra={"trace_dir": str(folder)})
    asker.decode("pulled", PROMPT, named(answerer), source, count=COUNT)
    answerer.set_reply(over())
    asker.decode("computed", tokens(300, seed=9), named(answerer), count=COUNT)
    asker.close()
    events = events_of(folder, asker)
    assert events_about(events, "pulled")[:4] == [
        f"PrefixAsked tokens={PREFIX}",
        f"DecodeArrived tokens={PREFIX}",
        f"LoadOrdered first_token=0 stop_token={PREFIX}",
        "LoadReported good=True",
    ]
    assert events_about(events, "computed") == [
        "PrefixAsked tokens=256",
        "PrefixNotPulled reason=no_prefix",
    ]
    summary = summarize(read_recording([folder]))
    assert summary.handovers[0].path[0].phase is Phase.PREFIX_QUERY
    assert summary.outcomes == {"loaded": 1}


# With the other end.


@pytest.mark.parametrize("config", [{}, {"overlap": True}, {"tp": 2}], ids=str)
def test_what_another_engine_has_computed_is_read_without_a_prefill_for_it(
    make_asker: Any, source: Node, config: dict[str, Any]
) -> None:
    asker = make_asker(**config)
    source.decode("its own", PROMPT[: PREFIX + 3], None, count=COUNT)
    at = {"remote_host": "127.0.0.1", "remote_port": source.port}
    params = {"remote_kv_source": {"kv_request_id": "x", **at}}
    computed = asker.decode("d", PROMPT, params, source, count=COUNT)
    assert computed == len(PROMPT) - PREFIX
    assert total(asker, "prefix_tokens_loaded") == PREFIX
    other = tokens(300, seed=11)
    assert asker.decode("e", other, params, source, count=COUNT) == len(other)
    assert total(asker, NOT_PULLED, "no_prefix") == 1
    until((asker, source), lambda: source.engine.is_whole and asker.engine.is_whole)


def test_a_turn_whose_history_is_on_its_decoder_goes_through_llm_ds_contract(
    make_asker: Any, source: Node
) -> None:
    # The decoder has the prompt and its answer. The next turn's prefill pulls both from it, and is handed back.
    asker = make_asker()
    source.decode("first", PROMPT[:PREFIX], None, count=COUNT + 256)
    history = [*PROMPT[:PREFIX], *source.engine.answers["first"].tokens]
    prompt = [*history, *tokens(20, seed=12)]
    at = {"remote_host": "127.0.0.1", "remote_port": source.port}
    leg = {
        "do_remote_decode": True,
        "remote_kv_source": {"kv_request_id": "x", **at},
    }
    asker.engine.add("leg", prompt, leg, max_tokens=1)
    until(
        (asker, source), lambda: asker.engine.answers["leg"].finish_reason is not None
    )
    assert total(asker, "prefix_tokens_loaded") == 768, asker.engine.total_counts()
    params = asker.engine.answers["leg"].params
    source.decode("second", prompt, params, asker, count=COUNT)
    assert source.engine.counted("loads") == 1


def test_both_speeds_are_measured_as_the_engine_goes(
    make_asker: Any, source: Node
) -> None:
    asker = make_asker(max_step_tokens=128)
    estimate = asker.engine.connector.scheduler_side.pulls.estimate
    asker.decode("computed", tokens(500, seed=13), None, count=COUNT)
    assert estimate.tokens_s() != ASSUMED_TOKENS_S
    peer = ("127.0.0.1", source.port)
    params = source.prefill("p", PROMPT)
    asker.decode("loaded", PROMPT, params, source, count=COUNT)
    assert estimate.bytes_s(peer, time.monotonic()) != ASSUMED_BYTES_S
