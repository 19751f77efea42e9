"""Any content of `kv_transfer_params`: the answer is right, the engine stays alive, and the prompt's blocks are not
poisoned for the next request. With `fail` the request may end with an error instead, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.core.node import Node, stop_parallel_state
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.ports import free_port
from tests.promises import promise

pytestmark = pytest.mark.slow

PROMPT, OTHER = tokens(40), tokens(40, seed=7)
COUNT = 4
Tamper = Callable[[dict[str, Any], dict[str, Any]], Any]
"""From the params of `PROMPT` and those of `OTHER` to what is sent with `PROMPT`."""


@pytest.fixture(scope="module")
def producer() -> Iterator[Node]:
    node = Node("kv_producer", num_blocks=512, extra={"kv_lease_duration": 600})
    yield node
    node.close()


@pytest.fixture(scope="module")
def consumers() -> Iterator[dict[str, Node]]:
    """One for each of vLLM's policies for failed loads."""
    extra = {"handshake_timeout_s": 0.3}
    nodes = {
        policy: Node("kv_consumer", policy=policy, extra=extra, num_blocks=64)
        for policy in ("recompute", "fail")
    }
    yield nodes
    for node in nodes.values():
        node.close()
    stop_parallel_state()


def flat(**changes: Any) -> Tamper:
    return lambda mine, other: {**mine, **changes}


def ticket(**changes: Any) -> Tamper:
    return lambda mine, other: {**mine, "kvferry": {**mine["kvferry"], **changes}}


def without(*keys: str) -> Tamper:
    return lambda mine, other: {
        key: value for key, value in mine.items() if key not in keys
    }


_WRONG: tuple[Any, ...] = (None, [], {}, -1, 2**63)
NO_LOAD: dict[str, Tamper] = {
    "only the wish": lambda mine, other: {"do_remote_prefill": True},
    "both wishes": flat(do_remote_decode=True),
    "a wish that is text": flat(do_remote_prefill="yes"),
    "no host": without("remote_host"),
    "a host that is no host": flat(remote_host="no such host.invalid"),
    "a host that is not allowed": flat(remote_host="203.0.113.7"),
    "a name that is not allowed": flat(remote_host="no-such-host.invalid"),
    "an address of whoever reads it": flat(remote_host="0.0.0.0"),
    "an address with a zone": flat(remote_host="::1%2]:0;[::1"),
    "no port": without("remote_port"),
    "no blocks": without("remote_block_ids"),
    "no engine": without("remote_engine_id"),
    "no ticket": without("kvferry"),
    "a ticket that is text": flat(kvferry="let me in"),
    "a ticket of tomorrow": ticket(version=2),
    "a stock producer's params": lambda mine, other: {
        k: v for k, v in mine.items() if k != "kvferry"
    },
    "text": lambda mine, other: "give me blocks",
    "nothing that is text": lambda mine, other: "",
    "a list": lambda mine, other: [mine],
    "a number": lambda mine, other: 7,
    "nan": flat(remote_num_tokens=float("nan")),
    "ten million blocks": flat(remote_block_ids=[list(range(10_000_000))]),
    "a million groups": flat(remote_block_ids=[[]] * 1_000_000),
    "blocks that are text": flat(remote_block_ids="123"),
    "blocks in no group": flat(remote_block_ids=[1, 2, 3]),
    "negative blocks": flat(remote_block_ids=[[-1, -2, -3]]),
    "huge blocks": flat(remote_block_ids=[[2**40]]),
    "a million keys": lambda mine, other: {
        **mine,
        **{str(index): index for index in range(1_000_000)},
    },
    "another prompt's params": lambda mine, other: other,
}
NO_LOAD |= {
    f"{key} = {value!r}": flat(**{key: value})
    for key in (
        "remote_host",
        "remote_port",
        "remote_engine_id",
        "remote_request_id",
        "remote_num_tokens",
        "tp_size",
    )
    for value in (*_WRONG, "\x00")
}
NO_LOAD |= {
    f"kvferry.{key} = {value!r}": ticket(**{key: value})
    for key in ("boot", "lease_slot", "lease_epoch", "lease_s", "digests", "mac")
    for value in (*_WRONG, "zz")
}

FAILED_LOAD: dict[str, Tamper] = {
    "another request's blocks": lambda mine, other: {
        **mine,
        "remote_block_ids": other["remote_block_ids"],
    },
    "another request's lease": lambda mine, other: {
        **mine,
        "kvferry": {
            **mine["kvferry"],
            **{key: other["kvferry"][key] for key in ("lease_slot", "lease_epoch")},
        },
    },
    "blocks out of range": flat(remote_block_ids=[[9000, 9001, 9002]]),
    "too few blocks": flat(remote_block_ids=[[1]]),
    "too many groups": lambda mine, other: {
        **mine,
        "remote_block_ids": mine["remote_block_ids"] * 2,
    },
    "a slot out of range": ticket(lease_slot=2**24 - 1),
    "a forged mac": ticket(mac="0" * 64),
    "another boot": ticket(boot="0" * 32),
    "a wrong epoch": ticket(lease_epoch="0" * 14 + "1"),
    "an unknown engine": flat(remote_engine_id="unknown"),
    "a dead port": lambda mine, other: {**mine, "remote_port": free_port()},
    "another tensor parallel size": flat(tp_size=2),
}


@pytest.fixture(scope="module")
def untouched(producer: Node) -> tuple[dict[str, Any], dict[str, Any]]:
    """Good params of `PROMPT` and of `OTHER`, for tests in which they are not used."""
    return producer.prefill("untouched/0", PROMPT), producer.prefill(
        "untouched/1", OTHER
    )


@pytest.fixture
def params(
    producer: Node, request: pytest.FixtureRequest
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Good params of `PROMPT` and of `OTHER`, each with its own lease, which is released afterwards."""
    names = [f"{request.node.name}/{index}" for index in range(2)]
    yield producer.prefill(names[0], PROMPT), producer.prefill(names[1], OTHER)
    producer.engine.connector.scheduler_side.leases.release_all("reset")
    producer.until(lambda: producer.engine.is_whole)


def run(node: Node, name: str, sent: Any) -> tuple[list[int], str | None]:
    node.engine.scheduler.reset_prefix_cache()
    node.engine.add(name, PROMPT, sent, max_tokens=COUNT)
    answer = node.answer(name)
    node.until(lambda: node.engine.is_whole)
    return answer.tokens, answer.finish_reason


def check_plain(node: Node, name: str) -> None:
    """The next plain request for the same prompt is right as well: no block of it was poisoned."""
    node.engine.add(name, PROMPT, max_tokens=COUNT)
    assert node.answer(name).tokens == expected_tokens(PROMPT, COUNT)


@promise(6)
@pytest.mark.parametrize("kind", NO_LOAD)
def test_params_that_cannot_be_used_are_answered_from_a_local_prefill(
    consumers: dict[str, Node],
    untouched: tuple[dict[str, Any], dict[str, Any]],
    kind: str,
) -> None:
    consumer = consumers["fail"]  # nothing is loaded, so nothing fails
    before = consumer.engine.counted("loads")
    sent = NO_LOAD[kind](*copy.deepcopy(untouched))
    assert run(consumer, f"{kind}/hostile", sent) == (
        expected_tokens(PROMPT, COUNT),
        "length",
    )
    assert consumer.engine.counted("loads") == before
    check_plain(consumer, f"{kind}/plain")


@promise(1)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("kind", FAILED_LOAD)
def test_params_that_another_wrote_or_changed_never_give_a_wrong_answer(
    consumers: dict[str, Node],
    params: tuple[dict[str, Any], dict[str, Any]],
    policy: str,
    kind: str,
) -> None:
    consumer = consumers[policy]
    sent = FAILED_LOAD[kind](*copy.deepcopy(params))
    right = (expected_tokens(PROMPT, COUNT), "length")
    assert run(consumer, f"{kind}/hostile", sent) == (
        right if policy == "recompute" else ([], "error")
    )
    check_plain(consumer, f"{kind}/plain")
