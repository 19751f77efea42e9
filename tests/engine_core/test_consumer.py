"""A consumer's scheduler side in vLLM's scheduler: every state of a remote prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.engine.facts import steps_alone
from kvferry.connector.vllm.core import EngineLoop
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.params import announced_id
from kvferry.scheduler.requests import RemotePromptState
from kvferry.worker.loads.results import LoadNotifier
from tests.engine_core.offers import Eavesdropper, offer
from tests.harness.core.scheduler import BLOCK_TOKENS, Scheduled, tokens
from tests.ports import free_port
from tests.waiting import wait_until

PROMPT = tokens(40)


def loads(step: Scheduled) -> dict[str, tuple[int, int]]:
    """The loads ordered in this step: first and last token, by request."""
    orders = step.orders
    return (
        {}
        if orders is None
        else {x.request_id: (x.first_token, x.stop_token) for x in orders.loads}
    )


def test_a_remote_prompt_is_loaded_whole_and_one_token_of_it_is_computed(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer")
    engine.add("d", PROMPT, offer(PROMPT))
    step = engine.step()
    assert loads(step) == {"d": (0, 40)}
    assert step.metadata.is_idle
    assert step.orders.loads[0].local_blocks == (tuple(engine.block_ids("d")),)
    assert loads(engine.step()) == {}
    engine.step(loaded={"d"})
    step = engine.step()
    assert step.computed == {"d": 1}
    assert not step.metadata.is_idle
    assert engine.run()["d"].finish_reason == "length"
    assert engine.is_whole
    assert engine.counted("loads") == 1
    assert len(engine.stats[-1]["samples"].get("handover_s", ())) <= 1


def test_no_step_waits_for_a_load_while_another_stage_may_have_work(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", pp=2)
    engine.add("d", PROMPT, offer(PROMPT))
    step = engine.step()
    assert loads(step) == {"d": (0, 40)}
    assert not step.metadata.is_idle
    engine.abort("d")
    engine.step(loaded={"d"})


@pytest.mark.parametrize(("overlap", "depth"), [(False, 1), (True, 2)])
def test_an_engine_sleeps_while_all_its_requests_wait_for_loads_once_its_workers_have_notified(
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    overlap: bool,
    depth: int,
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(
        EngineLoop, "wait", lambda _, timeout_s: sleeps.append(timeout_s)
    )
    engine = make_engine("kv_consumer", overlap=overlap)
    side = engine.connector.scheduler_side
    engine.add("d", PROMPT, offer(PROMPT))
    for _ in range(3):
        engine.step()
    assert not sleeps, "only a step shows that a load has ended"
    notifier = LoadNotifier(0)
    request.addfinalizer(notifier.close)
    notifier.boot = side.channel.local.boot
    notifier.notify()
    wait_until(
        lambda: side.steps.load_listener.hears_all_workers,
        "the notification is not heard",
    )
    for _ in range(depth):
        engine.step()
    assert not sleeps, (
        "what was notified is in the first one's report, and steps overlap"
    )
    engine.step()
    assert len(sleeps) == 1
    engine.add("beside", tokens(20, seed=2), max_tokens=1)
    assert engine.step().computed
    assert len(sleeps) == 1
    engine.step(loaded={"d"})
    assert engine.run()["d"].finish_reason == "length"
    assert engine.is_whole


def test_no_step_waits_for_answers_while_the_blocks_of_an_aborted_load_may_come_back(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(
        EngineLoop, "wait", lambda _, timeout_s: sleeps.append(timeout_s)
    )
    engine = make_engine("kv_consumer")
    side = engine.connector.scheduler_side
    engine.add("d", PROMPT, offer(PROMPT))
    engine.step()
    engine.abort("d")
    named = {
        "remote_engine_id": announced_id(new_boot_id(), "p"),
        "remote_host": "127.0.0.1",
        "remote_port": free_port(),
    }
    engine.add(
        "asks", PROMPT, {"do_remote_prefill": True, "do_remote_decode": False, **named}
    )
    engine.step()
    assert not sleeps, "only a step shows that the load has ended"
    notifier = LoadNotifier(0)
    request.addfinalizer(notifier.close)
    notifier.boot = side.channel.local.boot
    notifier.notify()
    wait_until(
        lambda: side.steps.load_listener.hears_all_workers,
        "the notification is not heard",
    )
    engine.step()
    assert not sleeps, "what was notified is in this step's report"
    engine.step()
    assert len(sleeps) == 1, "the workers notify"
    notifier.notify()
    wait_until(
        lambda: not side.steps.load_listener.has_no_news,
        "the notification is not heard",
    )
    engine.step()
    assert len(sleeps) == 1
    engine.step(loaded={"d"})
    assert not engine.used_blocks
    engine.abort("asks")


@pytest.mark.parametrize(
    ("sizes", "alone"), [((1, 1), True), ((2, 1), False), ((1, 2), False)]
)
def test_only_an_engine_of_one_stage_and_one_rank_is_alone(
    sizes: tuple[int, int], alone: bool
) -> None:
    """A step of a data-parallel rank holds up all others, which wait for it in the next collective operation."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=sizes[0], data_parallel_size=sizes[1]
    )
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert steps_alone(config) is alone


def test_only_what_the_local_cache_lacks_is_loaded(make_engine: Any) -> None:
    engine = make_engine("kv_consumer")
    engine.add("before", PROMPT[:32], max_tokens=1)
    engine.run()
    engine.add("d", PROMPT, offer(PROMPT))
    step = engine.step()
    assert loads(step) == {"d": (32, 40)}
    assert len(step.orders.loads[0].local_blocks[0]) == 3
    engine.step(loaded={"d"})
    engine.run()
    assert engine.is_whole


def test_a_prompt_that_is_all_in_the_local_cache_gives_its_lease_back(
    make_engine: Any, eavesdropper: Eavesdropper
) -> None:
    engine = make_engine("kv_consumer")
    short = tokens(2 * BLOCK_TOKENS)
    engine.add("before", tokens(3 * BLOCK_TOKENS), max_tokens=1)
    engine.run()
    engine.add(
        "d", tokens(3 * BLOCK_TOKENS), offer(short, port=eavesdropper.port, slot=5)
    )
    step = engine.step()
    assert (loads(step), step.computed) == ({}, {"d": BLOCK_TOKENS})
    assert eavesdropper.released() == [5]
    engine.run()
    assert engine.is_whole


REJECTED = {"max_tokens": 1, "abort_immediately": True}
UNSCHEDULED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "aborted": (PROMPT, {}),
    "rejected by the front end, as vLLM 0.32 makes it": ([0], REJECTED),
    "as vLLM 0.33 makes it while paused": (PROMPT, REJECTED),
}


@pytest.mark.parametrize(("prompt", "request_"), UNSCHEDULED.values(), ids=UNSCHEDULED)
def test_a_request_that_ends_before_it_was_scheduled_gives_its_lease_back(
    make_engine: Any,
    eavesdropper: Eavesdropper,
    prompt: list[int],
    request_: dict[str, Any],
) -> None:
    engine = make_engine("kv_consumer")
    engine.add("d", prompt, offer(PROMPT, port=eavesdropper.port, slot=3), **request_)
    engine.abort("d")
    assert eavesdropper.released() == [3]
    assert loads(engine.step()) == {}
    assert engine.is_whole


def test_a_prompt_that_is_too_long_for_this_engine_gives_its_lease_back(
    make_engine: Any, eavesdropper: Eavesdropper
) -> None:
    """The usual reason of a rejection. vLLM passes it on with a prompt of one token, whatever its params list."""
    engine = make_engine("kv_consumer")
    params = offer(tokens(1200 * BLOCK_TOKENS), port=eavesdropper.port, slot=3)
    assert len(params["remote_block_ids"][0]) == 1200
    engine.add("d", [0], params, **REJECTED)
    engine.abort("d")
    assert eavesdropper.released() == [3]
    assert engine.counted("local_recomputes", "invalid_params") == 0
    assert engine.is_whole


def test_a_failed_load_is_computed_here_counted_and_never_tried_again(
    make_engine: Any, eavesdropper: Eavesdropper
) -> None:
    engine = make_engine("kv_consumer", policy="recompute")
    engine.add("d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=6))
    engine.step()
    engine.step(failed={"d"})
    step = engine.step()
    assert (loads(step), step.computed) == ({}, {"d": 40})
    assert engine.run()["d"].finish_reason == "length"
    assert eavesdropper.released() == [6]
    assert engine.counted("local_recomputes", "load_failed") == 1
    assert engine.is_whole


def test_a_failed_load_under_fail_ends_the_request_and_nothing_else(
    make_engine: Any, eavesdropper: Eavesdropper
) -> None:
    engine = make_engine("kv_consumer", policy="fail")
    engine.add("other", tokens(20, seed=9), max_tokens=8)
    engine.add("d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=7))
    engine.step()
    engine.step(failed={"d"})
    assert engine.answers["d"].finish_reason == "error"
    assert engine.run()["other"].finish_reason == "length"
    assert eavesdropper.released() == [7]
    assert engine.counted("local_recomputes", "load_failed") == 0
    assert engine.is_whole


@pytest.mark.parametrize("first", ["a", "b"])
def test_one_params_object_over_a_batch_serves_only_the_prompt_that_it_was_made_for(
    make_engine: Any, first: str
) -> None:
    engine = make_engine("kv_consumer")
    prompts = {"a": PROMPT, "b": tokens(40, seed=8)}
    params = offer(prompts["a"])
    for name in sorted(prompts, reverse=first == "b"):
        engine.add(name, prompts[name], params, max_tokens=2)
    step = engine.step()
    assert (loads(step), step.computed) == ({"a": (0, 40)}, {"b": 40})
    engine.step(loaded={"a"})
    engine.run()
    assert engine.is_whole
    assert (
        engine.counted("local_recomputes", "other_prompt")
        + engine.counted("local_recomputes", "lease_in_use")
        == 1
    )


def test_a_turn_that_was_tokenised_anew_takes_what_it_certainly_shares(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_consumer", num_blocks=64)
    made_for = tokens(300)
    engine.add("d", [*made_for[:270], *tokens(30, seed=8)], offer(made_for))
    assert loads(engine.step()) == {"d": (0, 256)}
    engine.step(loaded={"d"})
    assert engine.step().computed == {"d": 44}
    engine.run()
    assert engine.is_whole


def test_prompt_logprobs_need_the_whole_prompt_and_give_the_lease_back(
    make_engine: Any, eavesdropper: Eavesdropper
) -> None:
    engine = make_engine("kv_consumer")
    engine.add(
        "d",
        PROMPT,
        offer(PROMPT, port=eavesdropper.port, slot=8),
        prompt_logprobs=1,
        max_tokens=1,
    )
    step = engine.step()
    assert (loads(step), step.computed) == ({}, {"d": 40})
    assert eavesdropper.released() == [8]
    assert engine.counted("local_recomputes", "not_wanted") == 1
    assert engine.is_whole


def test_a_prompt_of_embeddings_is_computed_here_and_gives_the_lease_back(
    make_engine: Any, eavesdropper: Eavesdropper
) -> None:
    engine = make_engine("kv_consumer")
    request = engine.add("d", PROMPT, None, prompt_embeds=torch.zeros(40, 64))
    assert request.num_prompt_tokens == 40
    engine.abort("d")
    engine.add(
        "e",
        PROMPT,
        offer(PROMPT, port=eavesdropper.port, slot=8),
        prompt_embeds=torch.zeros(40, 64),
        max_tokens=1,
    )
    step = engine.step()
    assert (loads(step), step.computed) == ({}, {"e": 40})
    assert eavesdropper.released() == [8]
    assert engine.counted("local_recomputes", "prompt_embeds") == 1


def test_blocks_that_a_sibling_has_held_are_freed_without_a_lease_of_ours(
    make_engine: Any,
) -> None:
    engine = make_engine("kv_both")
    engine.add("theirs", PROMPT, max_tokens=1)
    engine.run()
    engine.connector.update_connector_output(
        KVConnectorOutput(finished_sending={"theirs"})
    )
    assert engine.counted("leases_released") == 0


@pytest.mark.parametrize("failed", [False, True], ids=["loaded", "failed"])
def test_a_prompt_that_a_sibling_loads_is_not_ours_to_count(
    make_engine: Any, failed: bool
) -> None:
    """vLLM reports loads and holds of all children of a MultiConnector to each of them."""
    engine = make_engine("kv_both")
    request = engine.add("d", PROMPT, offer(PROMPT))
    nothing = engine.scheduler.kv_cache_manager.empty_kv_cache_blocks
    engine.connector.update_state_after_alloc(request, nothing, 0)
    reported = KVConnectorOutput(
        finished_recving={"d"}, failed_recving={"d"} if failed else set()
    )
    engine.connector.update_connector_output(reported)
    side = engine.connector.scheduler_side
    assert side.loads.state("d") is RemotePromptState.DECLINED
    engine.run()
    assert engine.counted("local_recomputes", "not_wanted") == 1
    assert (
        engine.counted("failed_requests")
        == engine.counted("local_recomputes", "load_failed")
        == 0
    )
