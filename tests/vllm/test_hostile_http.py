"""Bad `kv_transfer_params` over HTTP: the prompt is answered right, counted, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.vllm.pair import Change, Pair, long_prompt, text_of


@dataclass(frozen=True)
class Case:
    """One way to be wrong."""

    name: str
    change: Change
    counted: str = "invalid_params"


def put(**values: Any) -> Change:
    """Set keys of the params."""
    return lambda params: {**params, **values}


def put_in_ticket(**values: Any) -> Change:
    """Set keys of the nested object."""
    return lambda params: {**params, "kvferry": {**params["kvferry"], **values}}


# One of every kind: engine_core/test_hostile_params.py has all keys, without HTTP between.
CASES = [
    Case("do_remote_prefill alone", lambda _: {"do_remote_prefill": True}, "foreign_params"),
    Case("no host", lambda params: {key: value for key, value in params.items() if key != "remote_host"}),
    Case("a port that is an object", put(remote_port={"x": [1]})),
    Case("kvferry is a list", put(kvferry=[])),
    Case("a lease epoch that is an object", put_in_ticket(lease_epoch={"x": [1]})),
    Case("ten million block ids", lambda params: put(remote_block_ids=[list(range(10_000_000))])(params)),
    Case("block ids out of range", put(remote_block_ids=[[10**6, 10**6 + 1]]), "load_failed"),
    Case("a dead port", put(remote_port=9), "load_failed"),
    Case("a host that does not exist", put(remote_host="no.such.host.invalid"), "load_failed"),
    Case("another epoch", put_in_ticket(lease_epoch="0" * 14 + "1"), "load_failed"),
]


@pytest.fixture(scope="module")
def fast_pair(pair: Pair) -> Pair:
    """The pair, after a first contact with the peer."""
    assert pair.hand_over(long_prompt("Warm up")).status_code == 200
    return pair


AT_ONCE = 8
"""Requests in flight: as many prompts, good and bad, are in one batch of the engines."""


@dataclass(frozen=True)
class Outcome:
    """The result of a case: the producer's own answer, that to bad params, and the consumer's own afterwards."""

    want: str
    answer: httpx.Response
    later: str


@dataclass(frozen=True)
class Outcomes:
    """Of all cases, and what the consumer counted meanwhile, by reason."""

    of_case: dict[str, Outcome]
    recomputes: dict[str, float]


@pytest.fixture(scope="module")
def outcomes(fast_pair: Pair) -> Outcomes:
    """All cases, several at once: one after the other they take minutes, and no engine serves one client only."""
    pair = fast_pair

    def ask(case: Case) -> Outcome:
        prompt = long_prompt(case.name, 12)
        want = pair.plain(pair.producer, prompt)
        answer = pair.hand_over(prompt, case.change)
        return Outcome(want, answer, pair.plain(pair.consumer, prompt))

    before = pair.consumer.metrics()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        found = list(clients.map(ask, CASES))
    counted = (pair.consumer.metrics() - before).by_label("vllm:kvferry_local_recomputes_total", "reason")
    return Outcomes({case.name: outcome for case, outcome in zip(CASES, found, strict=True)}, counted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_params_are_answered_right_by_computing_the_prompt_here(outcomes: Outcomes, case: Case) -> None:
    outcome = outcomes.of_case[case.name]
    assert outcome.answer.status_code == 200, outcome.answer.text
    assert text_of(outcome.answer) == outcome.want
    assert outcome.later == outcome.want, "the prefix cache was poisoned"


def test_bad_params_are_counted_by_what_is_wrong_with_them(outcomes: Outcomes) -> None:
    assert outcomes.recomputes == Counter(case.counted for case in CASES)


@pytest.mark.parametrize("value", ["text", ["list"], 7], ids=["a string", "a list", "a number"])
def test_params_that_are_no_object_are_refused_by_the_server(fast_pair: Pair, value: Any) -> None:
    answer = fast_pair.decode("Hello", value)
    assert answer.status_code == 400
    assert fast_pair.plain(fast_pair.consumer, "Hello there") is not None
