"""Bad `kv_transfer_params` over HTTP: the prompt is answered right, counted, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.promises import promise
from tests.vllm.pair import Change, ServerPair, long_prompt, text_of


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
    Case(
        "do_remote_prefill alone",
        lambda _: {"do_remote_prefill": True},
        "foreign_params",
    ),
    Case(
        "no host",
        lambda params: {
            key: value for key, value in params.items() if key != "remote_host"
        },
    ),
    Case("a port that is an object", put(remote_port={"x": [1]})),
    Case("kvferry is a list", put(kvferry=[])),
    Case("a lease epoch that is an object", put_in_ticket(lease_epoch={"x": [1]})),
    Case(
        "ten million block ids",
        lambda params: put(remote_block_ids=[list(range(10_000_000))])(params),
    ),
    Case(
        "block ids out of range",
        put(remote_block_ids=[[10**6, 10**6 + 1]]),
        "load_failed",
    ),
    Case("a dead port", put(remote_port=9), "load_failed"),
    Case(
        "a host that is not trusted", put(remote_host="203.0.113.7"), "host_not_allowed"
    ),
    Case(
        "a name that is not trusted",
        put(remote_host="no.such.host.invalid"),
        "host_not_allowed",
    ),
    Case(
        "an address with a zone", put(remote_host="::1%2]:0;[::1"), "host_not_allowed"
    ),
    Case("another epoch", put_in_ticket(lease_epoch="0" * 14 + "1"), "load_failed"),
]


AT_ONCE = 8
"""Requests in flight: one after the other they take minutes, and no engine serves one client only."""


@promise(8)
def test_bad_params_are_counted_by_what_is_wrong_with_them(pair: ServerPair) -> None:
    """Their prompts are answered right, and the prefix cache is not poisoned."""

    def ask(case: Case) -> None:
        prompt = long_prompt(case.name, 12)
        want = pair.plain(pair.producer, prompt)
        answer = pair.hand_over(prompt, case.change)
        assert answer.status_code == 200, (case.name, answer.text)
        assert text_of(answer) == want, case.name
        assert pair.plain(pair.consumer, prompt) == want, (
            f"{case.name}: the prefix cache was poisoned"
        )

    assert pair.hand_over(long_prompt("Warm up")).status_code == 200
    before = pair.consumer.metrics()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        list(clients.map(ask, CASES))
    counted = (pair.consumer.metrics() - before).by_label(
        "vllm:kvferry_local_recomputes_total", "reason"
    )
    assert counted == Counter(case.counted for case in CASES)
