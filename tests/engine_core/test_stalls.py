"""Whatever becomes of loads, a decoder never stands still: not behind a failed load, nor behind pinned blocks."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.messages import FerryWorkerMetadata
from kvferry.connector.scheduler_side.admission import Admission
from kvferry.connector.scheduler_side.requests import MAX_LOOKED_AT
from kvferry.connector.vllm.scheduler import EngineBlocks
from kvferry.scheduler.requests import RemotePromptState
from tests.engine_core.offers import Eavesdropper, offer
from tests.engine_core.stalls import Life
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.promises import promise
from tests.waiting import deadline_s

pytestmark = pytest.mark.slow

WINDOW = 48


def load(engine: SchedulerEngine, *lengths: int, **request: Any) -> list[str]:
    """Add prompts of these lengths, each with a lease of its own, and order as many loads as fit."""
    names = [f"c{index}" for index in range(len(lengths))]
    for index, (name, length) in enumerate(zip(names, lengths, strict=True)):
        prompt = tokens(length, seed=index + 1)
        engine.add(name, prompt, offer(prompt), **request)
    engine.step()
    return names


def loading(engine: SchedulerEngine) -> set[str]:
    return set(
        engine.connector.scheduler_side.loads.requests(RemotePromptState.LOADING)
    )


def fail(
    engine: SchedulerEngine,
    failed: set[str],
    alive: set[str],
    loaded: frozenset[str] = frozenset(),
) -> None:
    """A step in which these loads end; the blocks of those that are `alive` are pinned."""
    worker_meta = FerryWorkerMetadata(still_written={0: frozenset(alive)})
    report = KVConnectorOutput(
        finished_recving=failed | loaded,
        failed_recving=failed,
        kv_connector_worker_meta=worker_meta,
    )
    engine.step(worker=report)


def unpin(engine: SchedulerEngine) -> None:
    report = KVConnectorOutput(
        kv_connector_worker_meta=FerryWorkerMetadata(still_written={0: frozenset()})
    )
    engine.step(worker=report)


def run_until(engine: SchedulerEngine, *names: str) -> None:
    for _ in range(200):
        if all(engine.answers[name].finish_reason is not None for name in names):
            return
        engine.step(failed=loading(engine))
    states = {name: engine.status(name) for name in engine.scheduler.requests}
    raise AssertionError(
        f"requests stand still: {states}, {engine.free_blocks} blocks are free"
    )


@pytest.mark.parametrize(
    "lengths", [(130,) * 3, (100,) * 4, (100, 130, 40, 200)], ids=str
)
def test_loads_that_all_fail_are_computed_where_a_window_needs_more_than_they_took(
    make_engine: Any, lengths: tuple[int, ...]
) -> None:
    engine = make_engine("kv_consumer", window=WINDOW, num_blocks=40)
    names = load(engine, *lengths)
    assert len(loading(engine)) > 2
    engine.step(failed=loading(engine))
    run_until(engine, *names)
    assert engine.is_whole


@pytest.mark.parametrize("failed", ["c0", "c1"])
def test_a_load_that_fails_beside_a_good_one_stops_neither(
    make_engine: Any, failed: str
) -> None:
    engine = make_engine("kv_consumer", window=WINDOW, num_blocks=50)
    names = load(engine, 300, 300)
    assert loading(engine) == {"c0", "c1"}
    engine.step(failed={failed}, loaded={"c0", "c1"} - {failed})
    run_until(engine, *names)
    assert engine.is_whole


@promise(6)
def test_a_prompt_that_cannot_fit_beside_pinned_blocks_lets_others_pass_until_they_return(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", num_blocks=28)
    load(engine, 250)
    fail(engine, {"c0"}, alive={"c0"})
    engine.add("plain", tokens(200, seed=7))
    engine.add("fits", tokens(100, seed=8))
    engine.add("short", tokens(16, seed=9))
    run_until(engine, "fits", "short")
    assert {engine.answers[name].finish_reason for name in ("c0", "plain")} == {None}
    unpin(engine)
    run_until(engine, "c0", "plain")
    assert engine.is_whole


def test_several_failed_loads_of_one_producer_that_stands_still_let_a_short_prompt_pass(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", num_blocks=28)
    load(engine, 250, 100)
    assert loading(engine) == {"c0", "c1"}
    fail(engine, {"c0", "c1"}, alive={"c0", "c1"})
    engine.add("short", tokens(16, seed=9))
    run_until(engine, "short")
    unpin(engine)
    run_until(engine, "c0", "c1")
    assert engine.is_whole


def test_a_load_that_cannot_begin_beside_a_failed_one_is_computed_while_that_waits_for_pinned_blocks(
    make_engine: Any,
) -> None:
    """vLLM keeps the blocks of a failed load free from all other loads, until it is computed."""
    engine = make_engine("kv_consumer", num_blocks=28)
    load(engine, 250)
    fail(engine, {"c0"}, alive={"c0"})
    prompt = tokens(40, seed=5)
    engine.add("healthy", prompt, offer(prompt))
    engine.add("short", tokens(16, seed=9))
    run_until(engine, "healthy", "short")
    assert engine.counted("local_recomputes", "blocks_pinned") == 1
    unpin(engine)
    run_until(engine, "c0")
    assert engine.is_whole


def test_a_failed_load_does_not_wait_for_a_load_of_higher_priority_that_waits_for_its_blocks(
    make_engine: Any,
) -> None:
    engine = make_engine(
        "kv_consumer", num_blocks=40, window=WINDOW, scheduling="priority"
    )
    load(engine, 300, priority=2)
    engine.add("beside", tokens(100, seed=6), max_tokens=8)
    engine.step(failed={"c0"})
    prompt = tokens(250, seed=7)
    engine.add("first", prompt, offer(prompt), priority=0)
    run_until(engine, "c0", "first", "beside")
    assert engine.is_whole
    assert engine.counted("loads") == 2, (
        "both wait for the failed one, and neither gives its load up"
    )


def test_what_vllm_reserves_for_drafts_beside_a_failed_load_is_counted(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block fewer than vLLM wants for both: it stops at the load, and would never look at the failed one."""
    monkeypatch.setattr(VllmConfig, "num_speculative_tokens", 3)
    engine = make_engine(
        "kv_consumer", num_blocks=40, window=WINDOW, scheduling="priority", lookahead=3
    )
    side = engine.connector.scheduler_side
    load(engine, 300, priority=2)
    failed = engine.scheduler.requests["c0"]
    engine.add("beside", tokens(100, seed=6), max_tokens=20)
    engine.step(failed={"c0"})
    engine.step()
    assert "WAITING" in engine.status("c0"), "it does not fit"
    for length in range(16, 160, 16):
        prompt = tokens(length, seed=20 + length)
        name = f"load{length}"
        request = engine.add(name, prompt, offer(prompt), priority=0, max_tokens=1)
        both = sum(side.demand.lacking(each) for each in (request, failed))
        if both in (engine.blocks_at_start, engine.blocks_at_start - 1):
            break
        engine.abort(name)
    else:
        raise AssertionError("no length of a load is just too long")
    for _ in range(80):
        engine.step(loaded=loading(engine))
    assert not engine.scheduler.requests


def test_a_prompt_of_higher_priority_that_loads_nothing_does_not_wait_for_a_failed_load(
    make_engine: Any,
) -> None:
    """vLLM reserves nothing against it, so it must not wait for a long one that is less urgent."""
    engine = make_engine(
        "kv_consumer", num_blocks=40, window=WINDOW, scheduling="priority"
    )
    load(engine, 300, priority=2)
    engine.add("beside", tokens(100, seed=6), max_tokens=60)
    engine.step(failed={"c0"})
    engine.step()
    assert "WAITING" in engine.status("c0"), "it does not fit"
    engine.add("urgent", tokens(16, seed=9), max_tokens=1, priority=0)
    engine.step()
    engine.step()
    assert engine.answers["urgent"].finish_reason is not None
    run_until(engine, "c0", "beside")
    assert engine.is_whole


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_what_waits_for_pinned_blocks_or_for_a_failed_load_costs_little_and_is_looked_at_when_they_are_over(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, scheduling: str
) -> None:
    """vLLM looks up the prefix of a request that is skipped in every step. 500 took 14 ms, 50 with priorities."""
    engine = make_engine("kv_consumer", num_blocks=28, scheduling=scheduling)
    load(engine, 250, priority=2)
    fail(engine, {"c0"}, alive={"c0"})
    names = [f"long{index}" for index in range(3 * MAX_LOOKED_AT)]
    for index, name in enumerate(names):
        prompt = tokens(200, seed=10 + index)
        engine.add(
            name, prompt, offer(prompt) if index % 2 else None, priority=1, max_tokens=1
        )
    engine.add("short", tokens(16, seed=9), priority=3)
    run_until(engine, "short")
    looked_up: list[str] = []
    manager = engine.scheduler.kv_cache_manager
    monkeypatch.setattr(
        manager, "get_computed_blocks", _noting(manager.get_computed_blocks, looked_up)
    )
    engine.step()
    assert len(looked_up) <= MAX_LOOKED_AT + 1
    engine.abort(*names[::3])
    unpin(engine)
    run_until(engine, "c0", *set(names) - set(names[::3]))
    assert engine.is_whole


def test_blocks_of_a_failed_load_are_free_at_once_also_behind_a_session_that_lacks_them(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", num_blocks=28)
    engine.add("session", tokens(100, seed=6), max_tokens=1, resumable=True)
    for _ in range(3):
        engine.step()
    assert "STREAMING" in engine.status("session")
    load(engine, 300)
    assert loading(engine) == {"c0"}
    engine.add("session", tokens(60, seed=8), max_tokens=1, resumable=True)
    engine.step(failed={"c0"})
    for _ in range(8):
        engine.step()
    assert "STREAMING" in engine.status("session"), "its second part is computed"
    engine.abort("session")
    run_until(engine, "c0")
    assert engine.is_whole


def test_the_local_prefix_of_a_failed_load_is_not_pinned(make_engine: Any) -> None:
    engine = make_engine("kv_consumer", num_blocks=28)
    prompt = tokens(250)
    engine.add("before", prompt[:192], max_tokens=1)
    engine.run()
    engine.add("d", prompt, offer(prompt))
    engine.step()
    fail(engine, {"d"}, alive={"d"})
    assert engine.connector.scheduler_side.loads.quarantine.num_blocks == 4
    run_until(engine, "d")
    unpin(engine)
    assert engine.is_whole


LIVES: dict[str, dict[str, Any]] = {
    "full attention": {"num_blocks": 28},
    "window": {"num_blocks": 44, "window": WINDOW},
    "states": {"num_blocks": 28, "states": 1},
    "window and states": {"num_blocks": 50, "window": WINDOW, "states": 2},
    "priorities": {"num_blocks": 28, "scheduling": "priority"},
    "priorities and a window": {
        "num_blocks": 44,
        "window": WINDOW,
        "scheduling": "priority",
    },
    "both roles": {"num_blocks": 34, "role": "kv_both"},
    "both roles by priority": {
        "num_blocks": 50,
        "window": WINDOW,
        "role": "kv_both",
        "scheduling": "priority",
    },
    "overlapping steps": {"num_blocks": 44, "window": WINDOW, "overlap": True},
    "failing requests": {"num_blocks": 44, "window": WINDOW, "policy": "fail"},
    "tokens written ahead": {"num_blocks": 29, "lookahead": 3},
    "a watermark": {"num_blocks": 46, "window": WINDOW, "watermark": 0.05},
    "two at a time": {"num_blocks": 44, "window": WINDOW, "max_num_seqs": 2},
}


@promise(6)
@pytest.mark.parametrize("kind", LIVES)
def test_as_long_as_loads_end_requests_end_and_short_ones_do_not_wait_for_pins(
    make_engine: Any, eavesdropper: Eavesdropper, run_seed: int, kind: str
) -> None:
    """`KVFERRY_SEED` runs the same lives again, exactly: no thread has a part in them."""
    for index in range(3):
        draw = random.Random(f"{run_seed} {index}")
        config = dict(LIVES[kind])
        role = config.pop("role", "kv_consumer")
        engine = make_engine(role, **config)
        failing = draw.choice((0.3, 0.7, 1.0))
        is_frozen = draw.random() < 0.5
        life = Life(
            engine,
            draw,
            eavesdropper.port,
            failing=failing,
            frozen=is_frozen,
            is_producer=role == "kv_both",
        )
        life.live(40)
        life.end()
        assert engine.counted("stalled_heartbeats") == 0


def test_an_engine_that_stands_still_says_so_once_a_heartbeat_and_what_to_do(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine("kv_consumer", window=WINDOW, num_blocks=40, lease_s=0.06)
    load(engine, 130, 130, 130)
    monkeypatch.setattr(Admission, "must_wait", lambda *_, **__: False)
    monkeypatch.setattr(EngineBlocks, "free", lambda *_: None)
    engine.step(failed={"c0", "c1", "c2"})
    with caplog.at_level(logging.ERROR):
        _step_until(engine, lambda: engine.counted("stalled_heartbeats") >= 3)
    lines = [
        record.getMessage()
        for record in caplog.records
        if "nothing was computed" in record.getMessage()
    ]
    assert 1 <= len(lines) <= 2, "the first heartbeat, the second, the fourth"
    assert "1 requests wait for blocks and 2 whose load is over" in lines[0]
    assert (
        "req=c1 with 130 tokens (WAITING_FOR_REMOTE_KVS): abort that request"
        in lines[0]
    )
    engine.abort("c0", "c1", "c2")
    before = engine.counted("stalled_heartbeats")
    engine.step()
    assert engine.counted("stalled_heartbeats") == before


def test_waiting_for_pinned_blocks_is_reported_with_the_producer_to_blame(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine("kv_consumer", num_blocks=28, lease_s=0.06)
    load(engine, 250)
    fail(engine, {"c0"}, alive={"c0"})
    with caplog.at_level(logging.ERROR):
        _step_until(engine, lambda: engine.counted("stalled_heartbeats") >= 1)
    assert (
        "11 of 27 blocks are free (16 pinned by failed loads, 0 leased)" in caplog.text
    )
    assert "restart the producer that does not answer" in caplog.text
    unpin(engine)
    run_until(engine, "c0")


def _noting(call: Callable[..., Any], noted: list[str]) -> Callable[..., Any]:
    def noting(request: Any, *most_tokens: Any) -> Any:
        noted.append(request.request_id)
        return call(request, *most_tokens)

    return noting


def _step_until(engine: SchedulerEngine, over: Callable[[], bool]) -> None:
    end_s = deadline_s(30.0)
    while not over():
        assert time.monotonic() < end_s
        engine.step()
