"""An idle engine is woken once in a while; a paused one is not idle before its leases are over; one whose requests all
wait for answers takes no step."""

from __future__ import annotations

import inspect
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from kvferry.connector.vllm.core import EngineLoop, RunningWeights
from kvferry.protocol.queries import Answer, PromptProgress, encode_params
from kvferry.scheduler.requests import LeaseState
from kvferry.worker.loads.state import LoadState
from tests.engine_core.prefixes import LONG, asking, compute, query_of, side_of
from tests.engine_core.test_both_legs import REMOTE_DECODE, ids, leg_params
from tests.engine_core.test_idle import prefill, work
from tests.harness.core.loop import engine_core
from tests.harness.core.node import until
from tests.harness.core.scheduler import tokens
from tests.promises import promise
from tests.waiting import deadline_s, wait_until

LEASE_S = 1.2


@pytest.fixture
def make_core() -> Iterator[Any]:
    """Makes engine cores for schedulers."""
    with ExitStack() as cores:

        def build(scheduler: Any = None) -> Any:
            return cores.enter_context(engine_core(scheduler))

        yield build


def test_the_core_of_this_process_is_found_and_woken(make_core: Any) -> None:
    core = make_core()
    EngineLoop().wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def test_without_a_core_or_with_two_none_is_woken_and_nothing_happens(
    make_core: Any,
) -> None:
    EngineLoop().wake()
    cores = [make_core(), make_core()]
    EngineLoop().wake()
    assert all(core.input_queue.empty() for core in cores)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("update_weights", True),
        ("reload_weights", True),
        ("finish_weight_update", True),
        ("start_draft_weight_update", True),
        ("update_weight_from_trainer", True),
        ("load_model", True),
        ("init_weight_transfer_engine", False),
        ("get_weights_info", False),
        ("check_health", False),
        ("profile", False),
    ],
)
def test_weights_that_are_updated_are_those_of_no_other_engine_until_they_are_named(
    make_core: Any, method: str, changes: bool
) -> None:
    core = make_core()
    calls: list[Any] = []
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda *call: calls.append(call)
    )
    weights = RunningWeights()
    weights.attach(core)
    before = inspect.signature(core.collective_rpc)
    core.collective_rpc(method, None, (1,), {"two": 2})
    assert calls == [(method, None, (1,), {"two": 2})]
    assert before == inspect.signature(
        MethodType(EngineCoreProc.collective_rpc, core)
    ), "vLLM converts by it"
    first = weights.version()
    assert bool(first) == changes
    core.collective_rpc(method)
    assert (weights.version() != first) == changes, "another update, other weights"
    core.set_weight_version("step-7")
    assert weights.version() == "step-7"
    core.collective_rpc(method)
    assert (weights.version() != "step-7") == changes


def test_an_engine_notices_updates_from_its_first_turn_on(
    make_engine: Any, make_core: Any
) -> None:
    engine = make_engine("kv_producer")
    core = make_core()
    core._weight_version = "default"
    engine.connector.has_pending_push_work()
    core.collective_rpc("update_weights")
    assert engine.connector.scheduler_side.channel.local.weights.version().startswith(
        "unnamed"
    )


def test_the_version_of_weights_is_read_from_the_core_and_empty_before_they_are_updated(
    make_core: Any,
) -> None:
    core, weights = make_core(), RunningWeights()
    core.set_weight_version("step-6")
    assert weights.version() == "", "there is no core"
    core.set_weight_version("default")
    weights.attach(core)
    assert weights.version() == ""
    core.set_weight_version("step-7")
    assert weights.version() == "step-7"


@promise(3)
def test_an_unclaimed_lease_expires_in_time_although_the_engine_has_no_requests(
    make: Any, make_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvferry.connector.scheduler_side.steps.MAX_IDLE_S", LEASE_S / 6
    )
    node = make("kv_producer", extra={"kv_lease_duration": LEASE_S})
    prefill(node, "p", tokens(100))
    core = make_core(node.engine.scheduler)
    began_s = time.monotonic()
    end_s = deadline_s(20.0)
    idle_times = 0
    while not node.engine.is_whole:
        core._process_input_queue()  # vLLM's: it returns when there is something to do
        idle_times += 1
        work(
            node, most=100_000
        )  # here it does not sleep for a millisecond between two of them
        assert time.monotonic() < end_s, "it was not ended"
    assert time.monotonic() >= began_s + LEASE_S * 0.9
    assert idle_times <= 8, "it was woken oftener than it had to be"
    assert node.engine.counted("leases_released", "expired") == 1


def test_a_pause_is_complete_when_no_lease_is_held_any_more_and_then_caches_can_be_emptied(
    make: Any, make_core: Any
) -> None:
    node = make("kv_producer", extra={"kv_lease_duration": 60.0})
    prefill(node, "p", tokens(100))
    core = make_core(node.engine.scheduler)
    core._finish_pause = lambda clear_cache: node.engine.scheduler.reset_prefix_cache(
        True, clear_cache
    )
    assert not core.has_work(), "it is idle"
    done = core.pause_scheduler("wait", clear_cache=True)
    assert done is not None
    for _ in range(5):
        node.step()
    assert core.has_work(), "a consumer may still come"
    node.engine.connector.scheduler_side.leases.release_all("release")
    node.until(lambda: not core.has_work())
    core._notify_idle_state_callbacks()
    assert done.result(timeout=0) is None
    core.resume_scheduler()
    prefill(node, "q", tokens(100))
    assert not core.has_work(), "it is idle again"


def test_a_pause_that_keeps_requests_ends_with_the_lease_of_one_that_still_answers(
    make: Any, make_core: Any
) -> None:
    """Its blocks are held since its prompt is complete, and its request cannot end before the engine goes on."""
    node = make("kv_producer", extra={"kv_lease_duration": LEASE_S})
    node.engine.add("p", tokens(100), {"do_remote_decode": True}, max_tokens=4)
    leases = side_of(node).leases
    node.until(lambda: bool(leases.leases(LeaseState.HELD)))
    core = make_core(node.engine.scheduler)
    core._finish_pause = lambda clear_cache: None
    done = core.pause_scheduler("keep", clear_cache=False)
    node.until(lambda: not core.has_work())
    core._notify_idle_state_callbacks()
    assert done.result(timeout=0) is None
    core.resume_scheduler()
    assert len(node.answer("p").tokens) == 4
    node.until(lambda: node.engine.is_whole)
    node.step()
    assert node.engine.counted("leases_released", "expired") == 1


def test_a_pause_ends_prefixes_that_others_read_at_once(
    make: Any, make_core: Any
) -> None:
    """Nobody is left without an answer: who reads one computes it."""
    node = make("kv_both", **LONG)
    prompt = tokens(600, seed=4)
    compute(node, "own", prompt)
    with asking(node) as asker:
        asker.ticket(query_of(prompt))
    core = make_core(node.engine.scheduler)
    leases = side_of(node).leases
    (lease,) = leases.leases(LeaseState.HELD)
    assert leases.renew(lease.name), "it is read, and would last for long"
    node.until(lambda: not core.has_work())
    core._finish_pause = lambda clear_cache: None
    core.pause_scheduler("wait", clear_cache=True)
    node.step()
    assert lease.state is LeaseState.ENDING
    node.until(lambda: not core.has_work())
    assert node.engine.is_whole
    assert node.engine.counted("prefixes_released", "evicted") == 1


@promise(2)
def test_a_reset_that_preempts_requests_ends_leases_and_succeeds(
    make: Any, make_core: Any
) -> None:
    """What vLLM's loop does for `reset_prefix_cache(reset_running_requests=True)`, with prompts, prefixes and a request
    that runs."""
    node = make("kv_both", **LONG)
    prompt = tokens(600, seed=4)
    compute(node, "own", prompt)
    params = node.prefill("p", tokens(100))
    with asking(node) as asker:
        asker.ticket(query_of(prompt))
        core = make_core(node.engine.scheduler)
        core.output_queue = queue.Queue()
        core.step_fn = lambda: ({}, bool(node.step().computed))
        core.post_step = lambda executed: None
        core.model_executor.is_sleeping = False
        node.engine.add("runs", tokens(40, seed=5), max_tokens=20)
        node.step()
        node.engine.connector.has_pending_push_work()  # vLLM's loop asks
        before = inspect.signature(core.reset_prefix_cache)
        held = side_of(node).leases.leases(LeaseState.HELD)
        assert len(held) == 2
        assert core.reset_prefix_cache(True)
        assert before == inspect.signature(
            MethodType(EngineCoreProc.reset_prefix_cache, core)
        )
        assert core.scheduler.pause_state is PauseState.UNPAUSED
        assert not len(side_of(node).leases)
        assert asker.ask(query_of(prompt, 2)).reason == "no_prefix"
    node.model.poison()
    answer = node.answer("runs").tokens
    consumer = make("kv_consumer")
    consumer.decode("d", tokens(100), params, node)
    assert len(answer) == 20
    assert consumer.engine.counted("failed_loads", "fence") == 1
    assert node.engine.counted("prefixes_released", "reset") == 1
    assert node.engine.counted("leases_released", "reset") == 1


def test_requests_that_wait_for_answers_wait_in_one_step_until_one_comes_that_matters(
    make: Any, make_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step makes vLLM's workers spin for a second."""
    monkeypatch.setattr("kvferry.link.limits.REPEAT_S", 0.2)
    producer, consumer = make("kv_producer"), make("kv_consumer")
    make_core(consumer.engine.scheduler)
    names, prompts = (
        [ids(f"x{n}") for n in range(3)],
        [tokens(100, seed=n) for n in range(3)],
    )
    for (prefilled, _), prompt in zip(names, prompts, strict=True):
        producer.engine.add(
            prefilled, prompt, REMOTE_DECODE, max_tokens=1
        )  # queued, until a step is taken
    for n, (_, decoded) in enumerate(names):
        consumer.engine.add(
            decoded, prompts[n], leg_params(producer, f"x{n}"), max_tokens=1
        )
    query_client, answers = (
        consumer.engine.connector.scheduler_side.channel.query_client,
        [],
    )
    take = query_client._answered

    def answered(*answer: Any) -> None:
        take(*answer)
        answers.append(answer)

    monkeypatch.setattr(query_client, "_answered", answered)
    with ThreadPoolExecutor(1) as loop:
        step = loop.submit(consumer.step)
        wait_until(lambda: len(answers) > 20, "the questions were repeated")
        assert not step.done()
        producer.step()
        step.result(60.0)
    until(
        (producer, consumer),
        lambda: all(consumer.engine.answers[name].finish_reason for _, name in names),
    )
    assert consumer.engine.counted("loads") == len(names)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_step_waits_for_a_load_whose_end_the_report_of_an_earlier_one_has(
    make: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Where steps overlap, that report is processed after the next step has begun."""
    producer, consumer = (
        make("kv_producer", max_step_tokens=64),
        make("kv_consumer", overlap=overlap),
    )
    consumer.decode("first", tokens(140), producer.prefill("p", tokens(140)), producer)
    side = consumer.engine.connector.scheduler_side
    wait_until(
        lambda: side.steps.load_listener.hears_all_workers,
        "no notification has arrived",
    )
    (worker,) = consumer.ferry_workers
    prefilled, decoded = ids("x")
    happened: list[str] = []

    def wait(_: EngineLoop, timeout_s: float) -> bool:
        """The events while the consumer's loop waits, one a call."""
        time.sleep(0.001)
        if "notifies" in happened:
            happened.append("waits in vain")
        elif worker.count_loads(LoadState.PARKED, LoadState.RESUMED):
            producer.answer(prefilled)
            wait_until(
                lambda: not side.steps.load_listener.has_no_news,
                "the load has not ended",
            )
            happened.append("notifies")
        elif not happened and side.queries.queries.snapshot().known:
            producer.step()
            happened.append("is begun")
        return True

    monkeypatch.setattr(EngineLoop, "wait", wait)
    prompt = tokens(140, seed=2)
    producer.engine.add(prefilled, prompt, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(decoded, prompt, leg_params(producer, "x"), max_tokens=1)
    assert consumer.answer(decoded).finish_reason == "length"
    assert happened == ["is begun", "notifies"]
    assert consumer.engine.counted("loads") == 2


def test_news_that_come_before_a_wait_end_it(make_core: Any) -> None:
    core, loop = make_core(), EngineLoop()
    loop.notify()
    began_s = time.monotonic()
    assert loop.wait(300.0)
    assert time.monotonic() < began_s + 60.0
    assert core.input_queue.empty()


def test_a_request_for_the_engine_ends_the_wait_for_answers(
    make: Any, make_core: Any
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    core = make_core(consumer.engine.scheduler)
    prefilled, decoded = ids("x")
    producer.engine.add(prefilled, tokens(100), REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(decoded, tokens(100), leg_params(producer, "x"), max_tokens=1)
    with ThreadPoolExecutor(1) as loop:
        step = loop.submit(consumer.step)
        queries = consumer.engine.connector.scheduler_side.queries.queries
        wait_until(lambda: queries.snapshot().known, "it is queued")
        core.input_queue.put_nowait("a request")
        step.result(60.0)
    assert not consumer.engine.answers[decoded].tokens


def test_answers_that_come_during_a_step_wake_the_loop_once_and_none_hides_a_ticket(
    make: Any, make_core: Any
) -> None:
    consumer, named = make("kv_consumer"), make("kv_producer")
    core = make_core()
    prefilled, decoded = ids("x")
    asking = consumer.engine.connector.scheduler_side.queries
    consumer.engine.add(decoded, tokens(100), leg_params(named, "x"), max_tokens=1)
    producer = ("127.0.0.1", named.port)
    (number,) = asking.queries.snapshot().open
    params = named.prefill(prefilled, tokens(100))
    wait_until(lambda: asking.has_answers, "the producer has answered")
    asking.on_answer(
        producer,
        Answer(
            number=number, progress=PromptProgress.TICKET, params=encode_params(params)
        ),
    )
    for _ in range(100):
        asking.on_answer(
            producer, Answer(number=number, progress=PromptProgress.UNKNOWN)
        )
    assert core.input_queue.qsize() == 1
    until(
        (named, consumer),
        lambda: consumer.engine.answers[decoded].finish_reason is not None,
    )
    assert consumer.engine.counted("loads") == 1
