"""Bad `kv_transfer_params` over HTTP: the prompt is answered right, counted, and nothing is left behind."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.accuracy.engines import Transfer
from scripts.accuracy.settings import STOCK
from tests.vllm.conftest import START_S
from tests.vllm.forked_server import ForkedServer
from tests.vllm.pair import Change, Pair, Params, long_prompt, text_of

# Of every kind some: engine_core/test_hostile_params.py has all keys, without HTTP between.
MISSING = ("remote_host", "remote_block_ids", "remote_num_tokens")
MISSING_IN_TICKET = ("version", "boot", "mac")
WRONG_TYPE = ("remote_port", "remote_block_ids", "remote_engine_id", "transfer_mode", "do_remote_decode")
WRONG_TYPE_IN_TICKET = ("version", "lease_epoch", "digests")
WRONG: Any = {"x": [1]}


@dataclass(frozen=True)
class Case:
    """One way to be wrong."""

    name: str
    change: Change
    counted: str = "invalid_params"


def put(**values: Any) -> Change:
    """Set keys of the params; `ticket_…` of the nested object."""

    def change(params: Params) -> Params:
        changed = copy.deepcopy(params)
        for key, value in values.items():
            if key.startswith("ticket_"):
                changed["kvferry"][key.removeprefix("ticket_")] = value
            else:
                changed[key] = value
        return changed

    return change


def drop(key: str, *, of_ticket: bool = False) -> Change:
    """Leave a key out."""

    def change(params: Params) -> Params:
        changed = copy.deepcopy(params)
        del (changed["kvferry"] if of_ticket else changed)[key]
        return changed

    return change


CASES = [
    Case("do_remote_prefill alone", lambda _: {"do_remote_prefill": True}, "foreign_params"),
    Case("a stock producer's params", drop("kvferry"), "foreign_params"),
    *(Case(f"no {key}", drop(key)) for key in MISSING),
    *(Case(f"no kvferry.{key}", drop(key, of_ticket=True)) for key in MISSING_IN_TICKET),
    *(Case(f"wrong type in {key}", put(**{key: WRONG})) for key in WRONG_TYPE),
    *(Case(f"wrong type in kvferry.{key}", put(**{f"ticket_{key}": WRONG})) for key in WRONG_TYPE_IN_TICKET),
    Case("kvferry is a list", put(kvferry=[])),
    Case("ten million block ids", lambda params: put(remote_block_ids=[list(range(10_000_000))])(params)),
    Case("block ids out of range", put(remote_block_ids=[[10**6, 10**6 + 1]]), "load_failed"),
    Case("another request's block ids", put(remote_block_ids=[[7, 8]]), "load_failed"),
    Case("an unknown engine", put(remote_engine_id="unknown"), "load_failed"),
    Case("a dead port", put(remote_port=9), "load_failed"),
    Case("a host that does not exist", put(remote_host="no.such.host.invalid"), "load_failed"),
    Case("a host that is none", put(remote_host="tcp://[[:::"), "load_failed"),
    Case("another boot", put(ticket_boot="0" * 32), "load_failed"),
    Case("another epoch", put(ticket_lease_epoch="0" * 14 + "1"), "load_failed"),
    Case("another slot", put(ticket_lease_slot=900), "load_failed"),
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


def test_params_of_another_prompt_are_not_believed(fast_pair: Pair) -> None:
    pair = fast_pair
    mine, other = long_prompt("My own", 12), long_prompt("Another one's", 12)
    want = pair.plain(pair.producer, mine)
    params = pair.prefill(other)
    before = pair.consumer.metrics()
    assert text_of(pair.decode(mine, params)) == want
    counted = (pair.consumer.metrics() - before).by_label("vllm:kvferry_local_recomputes_total", "reason")
    assert counted == {"other_prompt": 1.0}
    assert pair.plain(pair.consumer, mine) == want


def test_params_that_were_used_already_are_not_believed(fast_pair: Pair) -> None:
    pair, prompt = fast_pair, long_prompt("Replayed", 12)
    params = pair.prefill(prompt)
    want = text_of(pair.decode(prompt, params))
    for turn in range(2):
        before = pair.consumer.metrics()
        assert text_of(pair.decode(prompt, params)) == want, turn
        counted = pair.consumer.metrics() - before
        assert counted.by_label("vllm:kvferry_local_recomputes_total", "reason") == {"lease_over": 1.0}
        assert counted.by_label("vllm:kvferry_failed_loads_total", "reason") == {}


@pytest.mark.parametrize("value", ["text", ["list"], 7], ids=["a string", "a list", "a number"])
def test_params_that_are_no_object_are_refused_by_the_server(fast_pair: Pair, value: Any) -> None:
    answer = fast_pair.decode("Hello", value)
    assert answer.status_code == 400
    assert fast_pair.plain(fast_pair.consumer, "Hello there") is not None


@pytest.fixture(scope="module")
def strict_pair(fast_pair: Pair, logs: Path) -> Iterator[Pair]:
    """The same producer, and a consumer that ends requests whose load failed. It is loaded by the name that the entry
    point registers, without a module path, and as `kv_both`, so that both of its halves are alive."""
    transfer = Transfer("kv_both", module=STOCK, connector="FerryConnector", failure_policy="fail")
    spec = replace(fast_pair.consumer.spec, name="decode-fail", transfer=transfer)
    with ForkedServer(spec, logs) as consumer:
        consumer.wait_ready(START_S)
        yield Pair(fast_pair.producer, consumer)


def test_with_the_policy_fail_a_bad_load_ends_its_request_alone(strict_pair: Pair) -> None:
    pair = strict_pair
    chosen = {"a dead port", "another request's block ids", "another epoch", "block ids out of range", "no remote_host"}
    for case in (case for case in CASES if case.name in chosen):
        prompt = long_prompt(f"Strictly {case.name}", 12)
        want = pair.plain(pair.producer, prompt)
        answer = pair.hand_over(prompt, case.change)
        assert answer.status_code >= 500 or text_of(answer) == want, (case.name, answer.text)
        assert (answer.status_code >= 500) == (case.counted == "load_failed"), (case.name, answer.text)
        assert pair.plain(pair.consumer, prompt) == want, case.name
    good = long_prompt("Strictly good", 12)
    assert text_of(pair.hand_over(good)) == pair.plain(pair.producer, good)


def test_an_engine_that_is_both_also_prefills_for_others(strict_pair: Pair) -> None:
    pair = Pair(strict_pair.consumer, strict_pair.consumer)
    prompt = long_prompt("Both at once", 12)
    want = pair.plain(strict_pair.producer, prompt)
    params = pair.prefill(prompt)
    assert params["kvferry"]["lease_slot"] >= 0
    before = pair.consumer.metrics()
    assert text_of(pair.decode(prompt, params)) == want
    counted = (pair.consumer.metrics() - before).by_label("vllm:kvferry_local_recomputes_total", "reason")
    assert counted == {"local_engine": 1.0}
