"""Unclaimed leases end for prompts that wait, and give up as many blocks as vLLM asks for: with recurrent groups,
lookahead tokens, renewed leases."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.messages import FerryWorkerMetadata
from kvferry.scheduler.producer import block_references
from kvferry.scheduler.producer.eviction_order import Candidate, candidates
from kvferry.scheduler.producer.ledger import SCAN_S, ProducerLedger
from tests.engine_core.slow_router import (
    HEARTBEAT_S,
    LEASE_S,
    PROMPT_TOKENS,
    REMOTE_DECODE,
    Slow,
)
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.promises import promise


@promise(3)
@pytest.mark.parametrize("fraction", [1.0, 0.5], ids=["for need", "for the cap"])
def test_a_router_that_never_comes_back_does_not_stop_prefills(
    make_slow: Any, fraction: float
) -> None:
    """Eight prompts fill the cache. Left to their leases alone, 40 would take five of them: 300 s."""
    slow = make_slow(max_leased_fraction=fraction)
    slow.prefill(*(f"p{index}" for index in range(40)))
    started_s = slow.now_s
    while slow.answered() < 40:
        slow.step()
        assert slow.now_s < started_s + 5 * 2 * HEARTBEAT_S + 20, (
            f"{slow.answered()} of 40 prompts"
        )
    assert slow.engine.counted("leases_released", "evicted") >= 32
    assert slow.engine.counted("leases_released", "expired") == 0
    slow.step(round(LEASE_S) + 2)
    assert slow.engine.is_whole


def test_leases_alone_keep_no_more_than_their_share_for_longer_than_it_takes_to_know(
    make_slow: Any,
) -> None:
    slow = make_slow(max_leased_fraction=0.5)
    slow.prefill(*(f"p{index}" for index in range(8)))
    slow.step(round(2 * HEARTBEAT_S) + 12)
    assert slow.answered() == 8
    assert slow.held == {"p4", "p5", "p6", "p7"}, "16 blocks of 32, and the oldest went"


def test_a_lease_that_a_running_request_shares_all_blocks_with_is_not_ended_in_vain(
    make_slow: Any,
) -> None:
    slow = make_slow(max_leased_fraction=1.0)
    shared = tokens(PROMPT_TOKENS, seed=5)
    slow.engine.add("shared", shared, REMOTE_DECODE, max_tokens=1)
    slow.step(2)
    runs = [*shared, *tokens(300, seed=6)]
    slow.engine.add("runs", runs, max_tokens=60)
    slow.step(4)
    slow.prefill("waits", length=300)
    slow.step(30)
    assert slow.held == {"shared"}
    assert slow.engine.status("runs") == "RUNNING"


@pytest.mark.parametrize(
    ("how", "held_s"), [("release", 6), ("evicted", 3 * HEARTBEAT_S)]
)
def test_a_request_that_waits_for_blocks_gets_those_of_a_lease_all_at_once(
    make_slow: Any, monkeypatch: pytest.MonkeyPatch, how: str, held_s: float
) -> None:
    """Blocks of which nobody is in need are given back in parts."""
    monkeypatch.setattr(block_references, "RETURNED_AT_ONCE", 1)
    slow = make_slow(max_leased_fraction=1.0)
    slow.prefill("held", length=400)
    slow.step(round(held_s))
    slow.prefill("waits", length=200)
    slow.step()
    assert slow.engine.status("waits") == "WAITING"
    if how == "release":
        slow.side.leases.release(slow.lease("held"))
        slow.step()
    slow.step()
    assert slow.engine.status("waits") == "RUNNING"
    assert slow.engine.counted("leases_released", how) == 1


def test_a_shortage_has_no_step_look_at_all_leases_again(
    make_slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases that are too young to end are many under load, when blocks are short as well."""
    looks: list[float] = []

    def look(ledger: ProducerLedger) -> list[Candidate]:
        looks.append(ledger.clock.awake_s)
        return candidates(ledger)

    monkeypatch.setattr("kvferry.connector.scheduler_side.admission.candidates", look)
    slow = make_slow(engine={"num_blocks": 201}, max_leased_fraction=1.0)

    def step() -> None:
        slow.now_s += 0.0001
        slow.engine.finish(slow.engine.schedule())

    names = [f"p{index}" for index in range(200)]
    slow.prefill(*names, length=16)
    while slow.answered() < len(names):
        step()
    slow.prefill("waits", length=160)
    while not looks:
        step()
    for _ in range(100):
        step()
    assert slow.engine.status("waits") == "WAITING"
    assert len(looks) <= 1 + 100 * 0.0001 / (len(names) * SCAN_S)
    slow.step(round(2 * HEARTBEAT_S))
    assert slow.engine.answers["waits"].finish_reason is not None


def claimed(slow: Slow, length: int, keep_free: int) -> list[str]:
    """Prompts whose consumers renew them, until no more than so many blocks are free."""
    names: list[str] = []
    while slow.engine.free_blocks > keep_free and len(names) < 30:
        names.append(f"c{len(names)}")
        slow.prefill(names[-1], length=length)
        slow.step(3, renew=names)
        assert slow.engine.answers[names[-1]].finish_reason is not None
    return names


def seconds_until_answered(
    slow: Slow, name: str, renew: list[str], limit_s: float
) -> float:
    started_s = slow.now_s
    while slow.engine.answers[name].finish_reason is None:
        assert slow.now_s < started_s + limit_s, (
            f"{name} is {slow.engine.status(name)}, {slow.engine.free_blocks} free"
        )
        slow.step(renew=renew)
    return slow.now_s - started_s


def test_a_prompt_of_a_model_with_recurrent_groups_gets_the_blocks_of_claimed_leases(
    make_slow: Any,
) -> None:
    """One block and a state for each recurrent group, not a block for each 16 tokens of each of them."""
    slow = make_slow(engine={"num_blocks": 101, "states": 3}, kv_lease_duration=LEASE_S)
    names = claimed(slow, 64, keep_free=20)
    slow.prefill("long", length=500)
    assert seconds_until_answered(slow, "long", names, 300) <= 2 * HEARTBEAT_S


def test_live_leases_of_a_model_with_recurrent_groups_do_not_end_while_blocks_are_free(
    make_slow: Any,
) -> None:
    slow = make_slow(engine={"num_blocks": 101, "states": 3}, max_leased_fraction=1.0)
    names = claimed(slow, 64, keep_free=40)
    for index in range(10):
        slow.engine.add(f"medium{index}", [900 + index] * 200, max_tokens=1)
        assert seconds_until_answered(slow, f"medium{index}", names, 300) <= 5
    slow.step(round(HEARTBEAT_S), renew=names)
    assert slow.engine.counted("leases_released", "evicted") == 0


@pytest.mark.parametrize("renewed", [False, True], ids=["silent", "renewed"])
def test_lookahead_tokens_count_where_exactly_the_prompt_would_fit(
    make_slow: Any, renewed: bool
) -> None:
    """Twelve blocks are free, the prompt has twelve, and its lookahead tokens reach into the thirteenth."""
    slow = make_slow(engine={"lookahead": 4}, max_leased_fraction=1.0)
    names = [f"p{index}" for index in range(5)]
    slow.prefill(*names, length=60)
    slow.step(8, renew=names)
    assert slow.engine.free_blocks == 12
    slow.prefill("exact", length=12 * 16)
    assert (
        seconds_until_answered(slow, "exact", names if renewed else [], 600)
        <= 3 * HEARTBEAT_S
    )


def test_whatever_the_estimate_says_a_prompt_that_is_not_admitted_gets_blocks(
    make_slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = make_slow(max_leased_fraction=1.0)
    names = [f"p{index}" for index in range(8)]
    slow.prefill(*names)
    slow.step(12, renew=names)
    monkeypatch.setattr(
        "kvferry.connector.scheduler_side.admission.BlockDemand.lacking",
        lambda *_: 0,
    )
    slow.prefill("waits", length=200)
    seconds = seconds_until_answered(slow, "waits", names, 600)
    assert 2 * HEARTBEAT_S < seconds <= 6 * HEARTBEAT_S, (
        "4, 4, 4 and 8 blocks, a heartbeat apart"
    )
    assert len(slow.held & set(names)) == 3


@pytest.mark.parametrize(
    "runs", [1, 2], ids=["a request more could run", "as many run as can"]
)
def test_a_prompt_that_waits_for_its_turn_to_run_takes_no_leases(
    make_slow: Any, runs: int
) -> None:
    slow = make_slow(
        engine={"max_num_seqs": 2, "num_blocks": 65}, max_leased_fraction=1.0
    )
    names = [f"p{index}" for index in range(8)]
    slow.prefill(*names)
    slow.step(12, renew=names)
    for index in range(runs):
        slow.engine.add(f"runs{index}", [700 + index] * 16, max_tokens=100)
    slow.step(2, renew=names)
    slow.engine.add("waits", [800] * 32, REMOTE_DECODE, max_tokens=1)
    slow.step(round(6 * HEARTBEAT_S), renew=names)
    assert (slow.engine.answers["waits"].finish_reason is not None) == (runs == 1)
    assert slow.engine.counted("leases_released", "evicted") == 0
    assert slow.held.issuperset(names)


def say_over(engine: SchedulerEngine, request_id: str) -> None:
    reported = FerryWorkerMetadata(sent={0: frozenset({request_id})})
    engine.connector.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=reported)
    )


def test_vllm_preempts_again_when_blocks_have_been_coming_for_a_heartbeat(
    make_engine: Any,
) -> None:
    producer = make_engine("kv_producer", extra={"kv_lease_duration": 600.0})
    side = producer.connector.scheduler_side
    clock = itertools.count(time.monotonic(), 10)
    for name in ("first", "second"):
        producer.add(
            name,
            tokens(40, seed=ord(name[0])),
            {"do_remote_decode": True},
            max_tokens=1,
        )
    producer.run()
    side.leases.take_orders(next(clock))
    side.leases.release_all("release")
    side.eviction.evict()
    assert producer.connector.has_pending_block_frees()
    for _ in range(12):
        side.leases.take_orders(next(clock))
        side.eviction.evict()
    assert not producer.connector.has_pending_block_frees(), "110 s without a report"
    say_over(producer, "first")
    side.eviction.evict()
    assert producer.connector.has_pending_block_frees(), "they do report"
    say_over(producer, "second")
    side.eviction.evict()
    assert not producer.connector.has_pending_block_frees()
