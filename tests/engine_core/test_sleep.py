"""A sleep of vLLM, by every way there is: all of its own code but the backend that takes the pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.connector.messages import SiblingFailed
from kvferry.connector.vllm import sleep
from kvferry.link.client import SideChannelClient
from kvferry.protocol.errors import PeerRefused
from kvferry.protocol.handshake import UNKNOWN_ENGINE
from kvferry.worker.registration import MemoryState, WithdrawalRefused
from kvferry.worker.worker import FerryWorker
from tests.engine_core.test_both_legs import ids, leg_params
from tests.harness.core.node import Node, ferry_of, until
from tests.harness.core.scheduler import tokens
from tests.harness.core.sleeper import PagesOfTheTest, core_of
from tests.harness.core.toy_model import expected_tokens
from tests.promises import promise

PROMPT = tokens(100)


@pytest.fixture(autouse=True)
def _engines_can_sleep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM refuses its option on a CPU."""
    monkeypatch.setattr("kvferry.connector.connector.can_sleep", lambda _: True)
    yield
    sleep.guarded.clear()


class Sleeper:
    """A producer and a consumer, of which one sleeps, each as if it had a process of its own."""

    def __init__(self, make: Any, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
        self.producer: Node = make("kv_producer")
        self.consumer: Node = make("kv_consumer")
        self.node = self.producer if role == "kv_producer" else self.consumer
        sleep.guarded.clear()
        for worker in self.node.workers:
            sleep.guarded.add(ferry_of(worker).worker_side)
        self.core = core_of(self.node)
        self.taken = 0
        monkeypatch.setattr(PagesOfTheTest, "take_pages", staticmethod(self.take))
        self._number = 0

    def take(self) -> None:
        """The pages go: none may be registered any more, and what is written then is never read as a cache."""
        states = {worker.registration.state for worker in self.workers}
        assert states == {MemoryState.WITHDRAWN}
        self.node.model.poison()
        self.taken += 1

    @property
    def workers(self) -> list[FerryWorker]:
        workers: list[FerryWorker] = self.node.ferry_workers
        return workers

    def why_refused(self) -> str:
        """Why a peer gets no description of the engine; empty if it gets one."""
        with SideChannelClient() as client:
            try:
                client.fetch_description(
                    "127.0.0.1", self.node.port, UNKNOWN_ENGINE, "peer", 30.0
                )
            except PeerRefused as refused:
                found = re.search(r"engine is (\w+);", str(refused))
                return found.group(1) if found is not None else str(refused)
        return ""

    def hand_over(self) -> int:
        """Returns the prompt tokens that the decoder had to compute."""
        self._number += 1
        params = self.producer.prefill(f"p{self._number}", PROMPT)
        computed = self.consumer.decode(
            f"d{self._number}", PROMPT, params, self.producer
        )
        # A sleep comes when a pause is complete.
        for node in (self.producer, self.consumer):
            node.until(lambda node=node: node.engine.is_whole)  # type: ignore[misc]
            node.until(lambda node=node: not node.must_step)  # type: ignore[misc]
        return computed


class InOrder(list[Any]):
    """What is guarded, the first one first."""

    def discard(self, memory: object) -> None:
        if memory in self:
            self.remove(memory)


@pytest.fixture
def sleeper(make: Any, monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    return Sleeper(make, monkeypatch, "kv_producer")


def level(number: int) -> Callable[[Any], None]:
    def cycle(core: Any) -> None:
        core.sleep(number)
        assert core.wake_up()

    return cycle


def in_two_parts(core: Any) -> None:
    """As trainers do: the weights are written before the caches come back."""
    core.sleep(2)
    assert not core.wake_up(["weights"])
    assert core.wake_up(["kv_cache"])


def caches_only(core: Any) -> None:
    core.sleep(0)
    core.release_kv_cache_memory()
    assert core.wake_up(["kv_cache"])


def caches_and_then_all(core: Any) -> None:
    """The workers are told twice."""
    core.sleep(0)
    core.release_kv_cache_memory()
    core.sleep(1)
    assert core.wake_up()


def twice(core: Any) -> None:
    """As a client calls that has not heard the first answer."""
    core.sleep(1)
    core.sleep(2)
    assert core.wake_up()
    assert core.wake_up()


WAYS = {
    "level 1": level(1),
    "level 2": level(2),
    "weights, then caches": in_two_parts,
    "caches only": caches_only,
    "caches, then all": caches_and_then_all,
    "every call twice": twice,
}


@promise(1)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_prompts_are_handed_over_after_every_kind_of_sleep(
    sleeper: Sleeper, way: Callable[[Any], None]
) -> None:
    assert sleeper.hand_over() == 1
    for generation in (1, 2):
        way(sleeper.core)
        assert sleeper.taken
        assert sleeper.workers[0].registration.generation == generation
        assert sleeper.hand_over() == 1, "the first one after a wake-up is carried"
    assert not sleeper.consumer.engine.counted("failed_loads", "fence")


@promise(1)
def test_a_decoder_that_has_slept_loads_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(make, monkeypatch, "kv_consumer")
    assert sleeper.hand_over() == 1
    for way in WAYS.values():
        way(sleeper.core)
        assert sleeper.hand_over() == 1
    assert sleeper.workers[0].registration.generation == len(WAYS)


def test_a_pause_alone_withdraws_nothing(sleeper: Sleeper) -> None:
    assert sleeper.hand_over() == 1
    sleeper.core.sleep(0)
    assert sleeper.core.wake_up(["scheduling"])
    assert sleeper.workers[0].registration.generation == 0
    assert sleeper.hand_over() == 1


@promise(1)
def test_memory_without_pages_is_neither_registered_nor_described_while_only_the_weights_are_back(
    sleeper: Sleeper,
) -> None:
    assert sleeper.hand_over() == 1
    sleeper.core.sleep(2)
    assert not sleeper.core.wake_up(["weights"])
    assert sleeper.workers[0].registration.state is MemoryState.WITHDRAWN
    assert sleeper.why_refused() == "asleep"
    assert sleeper.core.wake_up(["kv_cache"])
    assert sleeper.workers[0].registration.is_registered
    assert sleeper.hand_over() == 1


def test_weights_that_go_alone_withdraw_nothing(sleeper: Sleeper) -> None:
    assert sleeper.hand_over() == 1
    sleeper.core.model_executor.collective_rpc("discard", args=(("weights",),))
    assert sleeper.workers[0].registration.is_registered
    assert sleeper.hand_over() == 1


def test_waking_an_engine_that_is_awake_keeps_its_tickets(sleeper: Sleeper) -> None:
    params = sleeper.producer.prefill("p", PROMPT)
    sleeper.core.model_executor.wake_up()
    assert sleeper.consumer.decode("d", PROMPT, params, sleeper.producer) == 1


@promise(2)
def test_no_peer_is_described_memory_that_is_about_to_go(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that connects to an agent while it is closed could end its own process."""
    drain = FerryWorker.drain
    answers: list[str] = []

    def drain_after_a_question(worker: FerryWorker) -> None:
        answers.append(sleeper.why_refused())
        drain(worker)

    monkeypatch.setattr(FerryWorker, "drain", drain_after_a_question)
    sleeper.core.sleep(1)
    assert answers == ["asleep"]
    assert sleeper.core.wake_up()


def test_peers_are_told_that_a_sleeping_engine_sleeps(sleeper: Sleeper) -> None:
    params = sleeper.producer.prefill("p", PROMPT)
    sleeper.producer.until(
        lambda: sleeper.producer.engine.scheduler.reset_prefix_cache(False, True)
    )
    sleeper.core.sleep(1)
    # It computes the prompt itself, and is right.
    assert sleeper.consumer.decode("d", PROMPT, params) == len(PROMPT)
    assert sleeper.consumer.engine.counted("failed_loads", "refused") == 1
    assert sleeper.core.wake_up()
    assert sleeper.hand_over() == 1


@promise(2)
def test_a_worker_that_cannot_withdraw_stops_the_sleep_and_says_why(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sleeper.hand_over() == 1

    def refuse(_: object) -> None:
        raise WithdrawalRefused("reads may still write: req=r")

    with monkeypatch.context() as refused:
        refused.setattr(FerryWorker, "drain", refuse)
        with pytest.raises(WithdrawalRefused, match="req=r"):
            sleeper.core.sleep(1)
    assert not sleeper.taken
    assert not sleeper.core.model_executor.is_sleeping
    assert sleeper.core.wake_up()
    assert sleeper.hand_over() == 1


@promise(2)
def test_a_worker_whose_sibling_cannot_withdraw_keeps_its_pages(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sibling_failed(*_: object) -> None:
        raise SiblingFailed("worker 1: WithdrawalRefused: reads may still write")

    with monkeypatch.context() as failed:
        failed.setattr(
            "kvferry.connector.worker_side.side.gather_workers", sibling_failed
        )
        with pytest.raises(SiblingFailed, match="worker 1"):
            sleeper.core.sleep(1)
    assert not sleeper.taken
    assert sleeper.workers[0].registration.is_registered
    assert sleeper.core.wake_up()
    assert sleeper.hand_over() == 1
    assert sleeper.workers[0].registration.generation == 0


@promise(2)
def test_of_two_engines_in_a_process_the_first_stays_withdrawn_if_the_second_refuses(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's allocator would have taken the pages of both. It keeps them all, and wakes no engine, for none sleeps."""
    assert sleeper.hand_over() == 1
    (first,) = sleeper.workers
    (second,) = sleeper.consumer.ferry_workers
    nodes = (sleeper.producer, sleeper.consumer)
    sides = [ferry_of(worker).worker_side for node in nodes for worker in node.workers]
    monkeypatch.setattr(sleep, "guarded", InOrder(sides))
    drain = FerryWorker.drain

    def drain_the_first(worker: FerryWorker) -> None:
        if worker is second:
            raise WithdrawalRefused("reads may still write: req=r")
        drain(worker)

    with monkeypatch.context() as refused:
        refused.setattr(FerryWorker, "drain", drain_the_first)
        with pytest.raises(WithdrawalRefused, match="req=r"):
            sleeper.core.sleep(1)
    assert not sleeper.taken
    assert second.registration.is_registered
    assert sleeper.core.wake_up()
    assert first.registration.state is MemoryState.WITHDRAWN
    # Its peers compute, and the next sleep with its wake-up ends that.
    assert sleeper.hand_over() > 1
    sleeper.core.sleep(1)
    assert sleeper.core.wake_up()
    assert sleeper.hand_over() == 1
    assert [each.registration.generation for each in (first, second)] == [1, 1]


@promise(2)
def test_an_engine_that_has_ended_is_not_registered_again_when_another_of_its_process_wakes(
    sleeper: Sleeper,
) -> None:
    """Its caches may be another's memory by then."""
    assert sleeper.hand_over() == 1
    (ended,) = sleeper.consumer.ferry_workers
    for each in sleeper.consumer.workers:
        sleep.guarded.add(ferry_of(each).worker_side)
        ferry_of(each).shutdown()
    level(1)(sleeper.core)
    assert sleeper.taken
    assert ended.registration.generation == 0
    assert ended.snapshot(1.0) is None, "it has no thread"


def test_peers_are_answered_again_after_a_sleep_that_was_refused(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 passes no descriptions on when an engine is resumed that has not slept."""

    def refuse(_: object) -> None:
        raise WithdrawalRefused("reads may still write: req=r")

    sleep.guarded.clear()
    monkeypatch.setattr(sleep, "has_sleep_hooks", lambda: True)
    monkeypatch.setattr("tests.harness.core.sleeper.has_sleep_hooks", lambda: True)
    with monkeypatch.context() as refused:
        refused.setattr(FerryWorker, "drain", refuse)
        with pytest.raises(WithdrawalRefused):
            sleeper.core.sleep(1)
    assert sleeper.core.wake_up(["scheduling"])
    assert sleeper.hand_over() == 1


@promise(2)
def test_a_refused_release_of_the_caches_is_undone_by_waking(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's executor takes the caches for gone then, though their pages are there."""
    assert sleeper.hand_over() == 1

    def refuse(_: object) -> None:
        raise WithdrawalRefused("reads may still write: req=r")

    sleeper.core.sleep(0)
    with monkeypatch.context() as refused:
        refused.setattr(FerryWorker, "drain", refuse)
        with pytest.raises(WithdrawalRefused, match="req=r"):
            sleeper.core.release_kv_cache_memory()
    assert not sleeper.taken
    assert sleeper.core.model_executor.is_sleeping
    assert sleeper.core.wake_up(["kv_cache"])
    assert sleeper.hand_over() == 1
    assert sleeper.workers[0].registration.generation == 0


def test_requests_that_come_during_a_sleep_wait_for_its_end(sleeper: Sleeper) -> None:
    assert sleeper.hand_over() == 1
    sleeper.core.sleep(1)
    producer = sleeper.producer
    producer.engine.add("late", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    for _ in range(5):
        assert not producer.step().computed
    assert sleeper.core.wake_up()
    params = producer.answer("late").params
    assert params is not None
    producer.step()
    assert sleeper.consumer.decode("d", PROMPT, params, producer) == 1


def test_both_legs_that_come_during_a_sleep_wait_for_its_end(sleeper: Sleeper) -> None:
    assert sleeper.hand_over() == 1
    sleeper.core.sleep(1)
    producer = sleeper.producer
    consumer = sleeper.consumer
    prefill, decode = ids("x")
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=4)
    producer.engine.add(prefill, PROMPT, {"do_remote_decode": True}, max_tokens=1)
    queries = consumer.engine.connector.scheduler_side.queries.queries
    consumer.until(lambda: queries.snapshot().known)
    assert not consumer.engine.answers[decode].tokens
    assert sleeper.core.wake_up()
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    assert consumer.engine.answers[decode].tokens == expected_tokens(PROMPT, 4)
    assert consumer.engine.counted("loads") == 2
    # Nor has it computed what it was refused.
    assert not consumer.engine.counted("failed_loads")


def test_requests_that_are_aborted_during_a_sleep_hold_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(make, monkeypatch, "kv_consumer")
    assert sleeper.hand_over() == 1
    producer = sleeper.producer
    consumer = sleeper.consumer
    params = producer.prefill("p", PROMPT)
    sleeper.core.sleep(1)
    consumer.engine.add("d", PROMPT, params)
    consumer.go_on()
    consumer.engine.abort("d")
    consumer.go_on()
    producer.until(lambda: producer.engine.is_whole)
    producer.step()
    assert producer.engine.counted("leases_released", "release") == 1
    assert sleeper.core.wake_up()
    assert sleeper.hand_over() == 1
    assert not consumer.engine.counted("failed_loads", "withdrawn")


@promise(1)
def test_an_answer_that_is_kept_over_a_sleep_goes_on_as_if_there_was_none(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM computes what it has kept again, of which the pages know nothing any more."""
    sleeper = Sleeper(make, monkeypatch, "kv_consumer")
    consumer = sleeper.consumer
    params = sleeper.producer.prefill("p", PROMPT)
    consumer.engine.add("d", PROMPT, params, max_tokens=6)
    consumer.engine.add("e", PROMPT, max_tokens=6)
    consumer.until(lambda: len(consumer.engine.answers["d"].tokens) == 2)
    sleeper.core.sleep(1, mode="keep")
    assert sleeper.taken
    consumer.engine.abort("e")
    assert sleeper.core.wake_up()
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, 6)
    assert consumer.engine.counted("loads") == 1
    consumer.until(lambda: consumer.engine.is_whole)
    assert sleeper.hand_over() == 1


@promise(2)
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_load_under_way_keeps_the_pages_until_it_is_over(
    make: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """In a process of its own the engine waits for it; vLLM cannot empty caches into which something is loaded."""
    sleeper = Sleeper(make, monkeypatch, "kv_consumer")
    consumer = sleeper.consumer
    params = sleeper.producer.prefill("p", PROMPT)
    consumer.engine.add("d", PROMPT, params)
    consumer.step()
    assert consumer.engine.status("d") == "WAITING_FOR_REMOTE_KVS"
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        sleeper.core.sleep(1, mode=mode)
    assert not sleeper.taken
    assert sleeper.core.wake_up(["scheduling"])
    if mode == "keep":
        assert consumer.answer("d").tokens == expected_tokens(PROMPT, 4)
    consumer.until(lambda: consumer.engine.is_whole)
    level(1)(sleeper.core)
    assert sleeper.workers[0].registration.generation == 1
    assert sleeper.hand_over() == 1


@promise(1)
def test_a_sleep_that_only_the_workers_know_of_costs_handovers_until_vllm_wakes_them(
    sleeper: Sleeper,
) -> None:
    """As by `collective_rpc`: the scheduler side hears nothing of it. That the engine is paused and its prefix cache
    empty is up to the caller, with or without a connector."""
    assert sleeper.hand_over() == 1
    executor = sleeper.core.model_executor
    sleeper.core.pause_scheduler(clear_cache=True)
    executor.collective_rpc("sleep", kwargs={"level": 1})
    assert sleeper.taken
    executor.collective_rpc("wake_up", kwargs={"tags": None})
    sleeper.core.resume_scheduler()
    # Its peers still know the agent that is closed.
    assert sleeper.hand_over() > 1
    assert sleeper.core.wake_up()
    assert sleeper.hand_over() == 1


@promise(2)
def test_a_lease_keeps_the_pages_while_its_consumer_may_read(sleeper: Sleeper) -> None:
    """In a process of its own the engine waits for it too."""
    params = sleeper.producer.prefill("p", PROMPT)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        sleeper.core.sleep(1)
    assert not sleeper.taken
    assert sleeper.core.wake_up(["scheduling"])
    assert sleeper.consumer.decode("d", PROMPT, params, sleeper.producer) == 1


@promise(1)
def test_tickets_of_before_are_of_another_boot_and_key(sleeper: Sleeper) -> None:
    local = sleeper.producer.engine.connector.scheduler_side.channel.local
    before = (local.memory.boot, local.memory.mac_key)
    assert local.memory.boot == local.boot
    level(1)(sleeper.core)
    assert local.memory.generation == 1
    assert local.memory.boot not in (before[0], local.boot)
    assert local.memory.mac_key != before[1]


def test_nothing_is_wrapped_where_vllm_has_hooks(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 calls the connector itself, before the backend, and passes descriptions on after the executor's wake-up."""
    sleep.guarded.clear()
    monkeypatch.setattr(sleep, "has_sleep_hooks", lambda: True)
    monkeypatch.setattr("tests.harness.core.sleeper.has_sleep_hooks", lambda: True)
    assert sleeper.hand_over() == 1
    core = sleeper.core
    core.sleep(1)
    assert core.model_executor.is_sleeping
    core.model_executor.wake_up()
    (described,) = core.model_executor.get_kv_connector_handshake_metadata()
    sleeper.producer.engine.connector.set_xfer_handshake_metadata_pp_aware(described)
    core.resume_scheduler()
    assert sleeper.hand_over() == 1
