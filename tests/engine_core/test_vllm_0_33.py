"""What vLLM 0.33 does that 0.32 does not, and a connector meets.

Under 0.32 the tests of what it cannot do are skipped (`tests/next_vllm` runs them under 0.33); where the same calls can
be made there, they run under both.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.distributed.aux_output_connector.connector import (
    AuxOutputSchedulerConnector,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.messages import FerryWorkerMetadata
from tests.engine_core.believed import settle
from tests.engine_core.offers import Eavesdropper, offer
from tests.engine_core.test_consumer import loads
from tests.harness.core.node import Node, between_processes
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.harness.core.toy_model import expected_tokens
from tests.waiting import wait_until

PROMPT = tokens(40)
REMOTE_DECODE = {"do_remote_decode": True}


def only_if(*, it_has: bool, what: str) -> pytest.MarkDecorator:
    """A test of something that this vLLM may not have."""
    return pytest.mark.skipif(not it_has, reason=f"this vLLM has no {what}")


replays = only_if(
    it_has=hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"),
    what="replay of a failed step's reports",
)
cuts = only_if(
    it_has=hasattr(AuxOutputSchedulerConnector, "cap_external_hit"),
    what="cut of loads to what is kept of routed experts",
)
refuses = only_if(
    it_has=hasattr(EngineCoreProc, "_reject_add_while_paused"),
    what="refusal of requests while paused",
)


@pytest.fixture
def defers_loads(make_engine: Any) -> Any:
    """Makes consumers whose loads wait for the steps in flight, as of 0.33 with HiSparse's pages."""

    def build(**config: Any) -> SchedulerEngine:
        engine: SchedulerEngine = make_engine("kv_consumer", overlap=True, **config)
        if not hasattr(engine.scheduler, "defer_async_loads"):
            pytest.skip("this vLLM has no loads that wait for steps in flight")
        assert engine.scheduler.defer_block_free, "steps overlap"
        engine.scheduler.defer_async_loads = True
        return engine

    return build


# Reports of a step that failed in another worker are replayed with the next step's.


def reports_of_failed_step(node: Node) -> list[KVConnectorOutput]:
    """The workers' reports of a step whose outputs vLLM throws away, since another worker has failed."""
    step = node.engine.schedule()
    step.output.kv_connector_metadata = between_processes(
        step.output.kv_connector_metadata
    )
    reports = [runner.step(step.output) for runner in node.runners]
    return [between_processes(report) for report in reports if report is not None]


@replays
def test_leases_whose_end_was_reported_in_a_failed_step_are_over_after_the_next(
    make: Any,
) -> None:
    producer: Node = make("kv_producer", tp=2)
    consumer: Node = make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    consumer.decode("d", PROMPT, params)
    settle(producer)
    deferred: list[KVConnectorOutput] = []

    def have_told() -> bool:
        deferred.extend(reports_of_failed_step(producer))
        told = [report.kv_connector_worker_meta for report in deferred]
        over = [ended for meta in told if meta for ended in meta.sent.values()]
        return sum(map(len, over)) == len(producer.workers)

    wait_until(have_told, "all workers have told that the lease is over")
    producer.aggregator.ft_defer_kv_connector_outputs(deferred)
    assert not producer.engine.is_whole
    producer.step()
    assert producer.engine.is_whole


@replays
def test_a_load_whose_end_was_reported_in_a_failed_step_is_used_after_the_next(
    make: Any,
) -> None:
    producer: Node = make("kv_producer")
    consumer: Node = make("kv_consumer", tp=2)
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=3)
    consumer.step()
    deferred: list[KVConnectorOutput] = []

    def have_told() -> bool:
        deferred.extend(reports_of_failed_step(consumer))
        told = [report for report in deferred if "d" in (report.finished_recving or ())]
        return len(told) == len(consumer.workers)

    wait_until(have_told, "all workers have told that the load is over")
    consumer.aggregator.ft_defer_kv_connector_outputs(deferred)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, 3)
    assert consumer.engine.counted("loads") == 1


def test_two_reports_of_a_worker_are_one_with_the_news_of_both() -> None:
    earlier, later = (
        FerryWorkerMetadata(
            still_written={0: frozenset({name}), worker: frozenset()},
            sent={0: frozenset({name}), worker: frozenset()},
        )
        for name, worker in (("a", 1), ("b", 2))
    )
    both = earlier.aggregate(later)
    assert both.sent == {0: {"a", "b"}, 1: frozenset(), 2: frozenset()}
    assert both.still_written == {0: {"b"}, 1: frozenset(), 2: frozenset()}, (
        "a state: the last"
    )


# Loads that are ordered later than their blocks are allocated.


def test_a_load_that_waits_for_a_step_in_flight_is_ordered_after_it(
    defers_loads: Any,
) -> None:
    engine = defers_loads()
    engine.add("other", tokens(20, seed=9), max_tokens=8)
    first = engine.schedule()
    engine.add("d", PROMPT, offer(PROMPT))
    second = engine.schedule()
    assert loads(second) == {}, "its blocks may still be read by the first step"
    held = engine.block_ids("d")
    engine.finish(first)
    third = engine.schedule()
    assert loads(third) == {"d": (0, 40)}
    assert third.orders.loads[0].local_blocks == (tuple(held),)
    engine.finish(second)
    engine.finish(third, loaded={"d"})
    assert engine.run()["d"].finish_reason == "length"
    assert engine.is_whole


def test_an_abort_before_the_load_was_ordered_gives_the_lease_and_the_blocks_back(
    defers_loads: Any, eavesdropper: Eavesdropper
) -> None:
    engine = defers_loads()
    engine.add("other", tokens(20, seed=9), max_tokens=8)
    first = engine.schedule()
    engine.add("d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=4))
    second = engine.schedule()
    engine.abort("d")
    assert eavesdropper.released() == [4]
    engine.finish(first)
    third = engine.schedule()
    assert loads(third) == {}
    engine.finish(second)
    engine.finish(third)
    engine.run()
    assert engine.is_whole


# What may be loaded is cut to what another connector has as well.


class KeepsNothing:
    """In the place of vLLM's connector for routed experts, which lacks this prompt's: no load has them either."""

    def max_cache_hit(self, request: Any) -> int:
        return int(request.num_tokens) - 1

    def cap_external_hit(self, request: Any, num_local: int, num_external: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@cuts
def test_an_offer_that_is_cut_to_nothing_is_given_back_and_computed_here(
    make_engine: Any, eavesdropper: Eavesdropper
) -> None:
    engine = make_engine("kv_consumer")
    engine.scheduler.aux_output_connector = KeepsNothing()
    engine.add("d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=5))
    step = engine.step()
    assert (loads(step), step.computed) == ({}, {"d": 40})
    assert eavesdropper.released() == [5]
    assert engine.run()["d"].finish_reason == "length"
    assert engine.is_whole


# A paused engine.


@refuses
@pytest.mark.parametrize("paused", [True, False])
def test_a_request_that_a_paused_engine_refuses_gives_its_lease_back(
    make_engine: Any, eavesdropper: Eavesdropper, paused: bool
) -> None:
    engine: SchedulerEngine = make_engine("kv_consumer")
    sent: list[Any] = []
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler = engine.scheduler
    core.reject_new_requests = paused
    core.add_request = MethodType(EngineCore.add_request, core)
    core.output_queue = SimpleNamespace(put_nowait=sent.append)
    request = engine.made("d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=6))
    assert core._reject_add_while_paused(request) is paused
    if not paused:
        return
    (_, answer), *_ = sent
    assert answer.outputs[0].error.retryable, "the client is told at once"
    assert eavesdropper.released() == [6]
    assert loads(engine.step()) == {}
    assert engine.is_whole


# A request that cannot be scheduled yet goes back to its queue, where it used to end the scan of all that wait.


@only_if(it_has=not vllm.__version__.startswith("0.32."), what="requeue")
def test_a_prefill_that_cannot_be_scheduled_yet_keeps_no_load_behind_it_and_is_offered_later(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: SchedulerEngine = make_engine("kv_both", checks_steps=True)
    with monkeypatch.context() as held:
        held.setattr(
            engine.scheduler,
            "_reserve_prefill_lookahead",
            lambda request, start, count: 0 if request.request_id == "p" else count,
        )
        engine.add("p", tokens(40, seed=2), REMOTE_DECODE, max_tokens=1)
        engine.add("d", PROMPT, offer(PROMPT))
        step = engine.step()
        assert (loads(step), step.computed) == ({"d": (0, 40)}, {})
        assert engine.step(loaded={"d"}).computed == {}
    assert engine.step().computed == {"p": 40, "d": 1}
    answers = engine.run()
    assert answers["d"].finish_reason == "length"
    assert answers["p"].params is not None, "it is offered"


# Handshake metadata that is published again, as after waking up.


def test_metadata_that_is_published_again_is_taken_by_peers_of_before_and_after(
    make: Any,
) -> None:
    producer: Node = make("kv_producer")
    before: Node = make("kv_consumer")
    before.decode("d1", PROMPT, producer.prefill("p1", PROMPT), producer)
    metadata = {(0, 0): producer.workers[0].get_handshake_metadata()}
    producer.engine.connector.set_xfer_handshake_metadata_pp_aware(
        between_processes(metadata)
    )
    after: Node = make("kv_consumer")
    for name, consumer in (("d2", before), ("d3", after)):
        prompt = tokens(60, seed=len(name) + ord(name[1]))
        consumer.decode(name, prompt, producer.prefill(f"p{name}", prompt), producer)
    assert before.engine.counted("peer_loads") == 2
    assert after.engine.counted("peer_loads") == 1
    producer.until(lambda: producer.engine.is_whole)
