"""Withdrawn memory: what has ended before the pages go, and what peers see of the next generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.orders import FailureReason
from kvferry.worker import transfer_thread, worker
from kvferry.worker.fabric.errors import FabricUnavailable
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.runner import LoadRunner
from kvferry.worker.loads.slot_watch import SlotPoll
from kvferry.worker.registration import MemoryState, WithdrawalRefused
from kvferry.worker.staging.host_buffer import HostMirror
from kvferry.worker.transfer_thread import TransferThread
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import Engine
from tests.harness.fault_fabric import Point
from tests.harness.inside import thread_of
from tests.harness.integrity import snapshot_of
from tests.harness.rig import Rig, maps_of, rig_of
from tests.promises import promise
from tests.waiting import step_until, wait_until
from tests.worker.engines.streams import STREAMS


@dataclass(frozen=True)
class Pair:
    """Two engines whose pages can go."""

    rig: Rig
    producer: Engine
    consumer: Engine


@pytest.fixture(params=["memory", "nixl", "mapped"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """On the fake fabric, on the real one, and with a producer whose memory is mapped."""
    is_mapped = request.param == "mapped"
    kind = "nixl" if is_mapped else request.param
    with rig_of(kind, STREAMS) as rig:
        producer = rig.engine("P", sleeps=True, shared=is_mapped)
        yield Pair(rig, producer, rig.engine("C", sleeps=True))


def test_both_ends_hand_over_again_after_every_sleep(pair: Pair) -> None:
    rig = pair.rig
    producer = pair.producer
    consumer = pair.consumer
    rig.transfer(producer, consumer, seed=1)
    for seed, sleeper in enumerate((producer, consumer, producer, consumer), start=2):
        sleeper.sleep()
        sleeper.wake_up()
        load = rig.transfer(producer, consumer, seed=seed)
        assert load.request_id in consumer.seen.loaded
    assert producer.description.generation == 2
    assert not consumer.seen.failed, "the first load after a wake-up is good at once"


@promise(1)
def test_a_lease_from_before_a_sleep_is_never_good_after_it(pair: Pair) -> None:
    rig = pair.rig
    producer = pair.producer
    consumer = pair.consumer
    rig.transfer(producer, consumer, seed=1)
    offer = producer.prefill(tokens=10, seed=2)
    producer.sleep()
    producer.wake_up()
    step_until(
        lambda: offer.request_id in producer.seen.sent, "its blocks are free", producer
    )
    # In the same slot.
    again = producer.prefill(tokens=10, seed=2)
    assert again.slot == offer.slot
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is not None
    # Nor with the ticket's boot and MAC of now: the epoch is none of this generation.
    forged = producer.changed(offer, ticket={"boot": producer.boot})
    load = consumer.load(forged)
    assert rig.until_over(consumer, load) is FailureReason.FENCE
    load = consumer.load(again.params)
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=2)


@promise(1)
@pytest.mark.parametrize("point", [Point.FENCE, Point.DATA, Point.SECOND_FENCE])
def test_a_read_that_a_sleep_overlaps_is_reported_failed(
    any_rig: Rig, point: Point
) -> None:
    producer, consumer = any_rig.pair(sleeps=True)
    any_rig.transfer(producer, consumer, seed=1)
    there = threading.Event()
    consumer.fabric.stops.stop_at(point, lambda _: there.set())
    load = consumer.load(producer.prefill(10, seed=2).params)
    step_until(there.is_set, "it stands still", consumer)
    producer.sleep()
    consumer.fabric.stops.go()
    step_until(lambda: consumer.seen.is_over(load.request_id), "it is over", consumer)
    assert load.request_id in consumer.seen.failed
    producer.wake_up()
    any_rig.transfer(producer, consumer, seed=3)


@promise(1)
def test_a_read_that_ends_before_the_agent_is_closed_does_not_count(
    any_rig: Rig,
) -> None:
    """Between the two the workers of an engine wait for each other."""
    producer, consumer = any_rig.pair(sleeps=True)
    any_rig.transfer(producer, consumer, seed=1)
    there = threading.Event()
    consumer.fabric.stops.stop_at(Point.SECOND_FENCE, lambda _: there.set())
    load = consumer.load(producer.prefill(10, seed=2).params)
    step_until(there.is_set, "it stands still", consumer)
    producer.worker.drain()
    consumer.fabric.stops.go()
    step_until(lambda: consumer.seen.is_over(load.request_id), "it is over", consumer)
    assert consumer.seen.failed == {load.request_id: FailureReason.FENCE}
    producer.worker.keep()
    any_rig.transfer(producer, consumer, seed=3)


@promise(2)
def test_no_agent_answers_for_pages_that_may_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP the agent of the memory's owner answers reads, of registered memory or not."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with rig_of("nixl") as rig:
        producer, consumer = rig.pair(sleeps=True)
        rig.transfer(producer, consumer, seed=1)
        offer = producer.prefill(10, seed=2)
        producer.withdraw()
        load = consumer.load(offer.params)
        step_until(
            lambda: consumer.seen.is_over(load.request_id), "it is over", consumer
        )
        # Not FENCE: nobody has told it that the slot is empty.
        assert consumer.seen.failed == {load.request_id: FailureReason.TRANSFER}
        producer.restore()
        rig.until_good(producer, consumer)


def test_an_agent_stays_until_peers_that_know_of_it_have_connected(
    any_rig: Rig,
) -> None:
    """One that goes meanwhile could end their process, by an assertion in UCX."""
    producer, consumer = any_rig.pair(sleeps=True)
    there = threading.Event()
    consumer.fabric.stops.stop_at(Point.FIRST_CONTACT, lambda _: there.set())
    load = consumer.load(producer.prefill(10, seed=1).params)
    step_until(there.is_set, "it has the description", consumer)
    withdrawing = threading.Thread(target=producer.withdraw)
    withdrawing.start()
    # Far longer than it takes where nobody connects.
    withdrawing.join(0.5)
    consumer.fabric.stops.go()
    step_until(lambda: consumer.seen.is_over(load.request_id), "it is over", consumer)
    withdrawing.join()
    # It was connected, whatever it then found.
    failure = consumer.seen.failed.get(load.request_id)
    assert failure is not FailureReason.HANDSHAKE
    producer.restore()
    any_rig.until_good(producer, consumer)


def test_what_was_mapped_is_unmapped_before_the_consumer_sleeps(rig: Rig) -> None:
    producer = rig.engine("P", shared=True)
    consumer = rig.engine("C", sleeps=True)
    own = maps_of(producer)
    rig.transfer(producer, consumer, seed=1)
    assert maps_of(producer) == 2 * own
    consumer.withdraw()
    assert maps_of(producer) == own
    consumer.restore()
    rig.transfer(producer, consumer, seed=2)


@promise(1)
def test_a_read_in_flight_when_its_producer_falls_asleep_has_failed(rig: Rig) -> None:
    producer, consumer = rig.pair(sleeps=True)
    rig.transfer(producer, consumer, seed=1)
    name = producer.fabric.agent_name
    consumer.fabric.on_data_read = lambda: rig.network.freeze(name)
    load = consumer.load(producer.prefill(10, seed=2).params)
    step_until(lambda: consumer.fabric.reading(), "it reads", consumer)
    producer.sleep()
    rig.network.thaw_all()
    step_until(lambda: consumer.seen.is_over(load.request_id), "it is over", consumer)
    assert load.request_id in consumer.seen.failed
    producer.wake_up()
    rig.transfer(producer, consumer, seed=3)


def test_loads_under_way_fail_and_leave_nothing_in_the_pages(pair: Pair) -> None:
    rig = pair.rig
    producer = pair.producer
    consumer = pair.consumer
    rig.transfer(producer, consumer, seed=1)
    name = producer.start_prefill(10, seed=2)
    computed = producer.begin_prefill(10, seed=3)
    producer.step()
    computed.offer()
    assert computed.params is not None
    waiting = consumer.load(computed.params)
    step_until(consumer.parked_loads, "it waits for its producer", consumer)
    held = producer.prefill(10, seed=4)
    loads = [waiting, consumer.load(held.params)]
    try:
        consumer.sleep()
    except WithdrawalRefused as refused:
        pytest.fail(f"a load keeps it awake that only waits: {refused}")
    consumer.step()
    for load in loads:
        assert consumer.seen.is_over(load.request_id)
    assert not consumer.seen.alive
    consumer.wake_up()
    consumer.step()
    offer = producer.finish_prefill(name)
    producer.step()
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=2)


@promise(1)
def test_what_was_loaded_and_not_reported_before_a_sleep_has_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair(sleeps=True)
    rig.transfer(producer, consumer, seed=1)
    with monkeypatch.context() as patch:
        # Nor has the step that orders it, which may last longer than the load.
        patch.setattr(consumer, "collect", list)
        load = consumer.load(producer.prefill(10, seed=2).params)
    wait_until(
        lambda: snapshot_of(consumer.worker).untaken.loaded == {load.request_id},
        "it is loaded, and no step has heard of it",
    )
    consumer.sleep()
    consumer.step()
    assert consumer.seen.failed == {load.request_id: FailureReason.WITHDRAWN}
    assert load.request_id not in consumer.seen.loaded
    consumer.wake_up()
    rig.transfer(producer, consumer, seed=3)


@promise(2)
def test_a_read_that_does_not_end_keeps_the_pages_and_says_why(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DRAIN_MARGIN_S", 0.1)
    producer, consumer = rig.pair(sleeps=True)
    rig.transfer(producer, consumer, seed=1)
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    load = consumer.load(producer.prefill(10, seed=2).params)
    step_until(lambda: consumer.fabric.reading(), "it reads", consumer)
    with pytest.raises(WithdrawalRefused, match=f"req={load.request_id} peer="):
        consumer.sleep()
    assert consumer.pages is not None
    assert not consumer.pages.is_asleep
    assert rig.until_over(consumer, load) is FailureReason.WITHDRAWN
    assert consumer.seen.alive == {load.request_id}, "its blocks are not given away"
    rig.network.thaw_all()
    rig.step_until(lambda: not consumer.seen.alive, "the read has ended")
    # It goes on with what it was, and the next attempt succeeds.
    assert consumer.description.generation == 0
    rig.transfer(producer, consumer, seed=3)
    consumer.sleep()
    consumer.wake_up()
    rig.transfer(producer, consumer, seed=4)


@promise(2)
def test_a_thread_that_is_stuck_in_a_call_keeps_the_pages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DRAIN_MARGIN_S", 0.0)
    monkeypatch.setattr(transfer_thread, "_STUCK_S", 0.1)
    producer, consumer = rig.pair(
        sleeps=True, settings=replace(SETTINGS, failed_read_grace_s=0.0)
    )
    rig.transfer(producer, consumer, seed=1)
    entered, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        entered.set()
        go_on.wait(60.0)

    consumer.fabric.on_data_read = stand_still
    load = consumer.load(producer.prefill(10, seed=2).params)
    step_until(entered.is_set, "it is stuck", consumer)
    with pytest.raises(WithdrawalRefused, match="stuck in a call"):
        consumer.sleep()
    # The engine goes on before the thread does: a prompt that it computes meanwhile can be read.
    meanwhile = consumer.prefill(10, seed=4)
    go_on.set()
    assert rig.until_over(consumer, load) is None, "it has gone on with its load"
    assert rig.until_over(producer, producer.load(meanwhile.params)) is None
    wait_until(lambda: snapshot_of(consumer.worker).is_idle, "it goes on")
    rig.transfer(producer, consumer, seed=3)


def sleep_that_is_given_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> threading.Event:
    """The thread has just looked whether the sleep was given up, and then it is. Returns what lets the thread go on."""
    has_looked, go_on = threading.Event(), threading.Event()

    class GivenUpLate(Future[None]):
        def cancelled(self) -> bool:
            is_cancelled = super().cancelled()
            has_looked.set()
            go_on.wait(60.0)
            return is_cancelled

        def result(self, timeout: float | None = None) -> None:
            assert has_looked.wait(60.0)
            return super().result(0.0)

    with monkeypatch.context() as patch:
        patch.setattr(transfer_thread, "Future", GivenUpLate)
        with pytest.raises(WithdrawalRefused, match="stuck in a call"):
            engine.sleep()
    return go_on


def test_a_lease_that_is_opened_after_a_sleep_was_given_up_does_not_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair(sleeps=True)
    rig.transfer(producer, consumer, seed=1)
    go_on = sleep_that_is_given_up(producer, monkeypatch)
    meanwhile = producer.prefill(10, seed=2)
    go_on.set()
    snapshot_of(producer.worker)  # the thread has taken all messages before this one
    load = consumer.load(meanwhile.params)
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=2)


@pytest.mark.parametrize("end", ["refused", "given up", "kept"])
def test_after_a_sleep_that_did_not_come_new_producers_are_connected(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    consumer = rig.engine("C", sleeps=True)
    rig.transfer(rig.engine("P"), consumer, seed=1)
    with monkeypatch.context() as patch:
        if end == "refused":
            patch.setattr(worker, "DRAIN_MARGIN_S", 0.0)
            patch.setattr(TransferThread, "_may_write", lambda _: ["req=r"])
            with pytest.raises(WithdrawalRefused, match="req=r"):
                consumer.sleep()
        elif end == "given up":
            sleep_that_is_given_up(consumer, monkeypatch).set()
        else:
            consumer.worker.drain()
            consumer.worker.keep()
    rig.transfer(rig.engine("Q"), consumer, seed=2)


@promise(2)
def test_a_first_read_that_does_not_end_keeps_the_pages_and_leaves_no_peer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DRAIN_MARGIN_S", 0.0)
    producer, consumer = rig.pair(sleeps=True)
    rig.network.freeze(producer.fabric.agent_name)
    load = consumer.load(producer.prefill(10, seed=1).params)
    wait_until(lambda: snapshot_of(consumer.worker).first_reads, "it is connecting")
    with pytest.raises(WithdrawalRefused, match="the first read of peer=P@"):
        consumer.sleep()
    assert rig.until_over(consumer, load) is FailureReason.WITHDRAWN
    rig.network.thaw_all()
    wait_until(lambda: not snapshot_of(consumer.worker).first_reads, "it has ended")
    assert not snapshot_of(consumer.worker).peers.ready
    consumer.sleep()
    consumer.wake_up()
    rig.transfer(producer, consumer, seed=2)


@promise(2)
def test_a_read_of_a_slot_that_does_not_end_keeps_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "DRAIN_MARGIN_S", 0.0)
    with rig_of("memory", STREAMS) as rig:
        producer, consumer = rig.pair(sleeps=True)
        rig.transfer(producer, consumer, seed=1)
        computed = producer.begin_prefill(10, seed=2)
        producer.step()
        computed.offer()
        assert computed.params is not None
        load = consumer.load(computed.params)
        step_until(consumer.parked_loads, "it waits for its producer", consumer)
        rig.network.freeze(producer.fabric.agent_name)

        def polls() -> bool:
            holders = snapshot_of(consumer.worker).holders
            return any(each.state is None and each.transfers for each in holders)

        # In both: the first may be one of before, which is over at the thread's next turn.
        wait_until(lambda: polls() and polls(), "a poll stands still")
        with pytest.raises(WithdrawalRefused, match="a slot of peer=P@"):
            consumer.sleep()
        assert rig.until_over(consumer, load) is FailureReason.WITHDRAWN
        assert not consumer.seen.alive, "its blocks are safe"
        rig.network.thaw_all()
        consumer.sleep()
        consumer.wake_up()


@promise(2)
def test_a_copy_to_host_memory_that_goes_on_keeps_the_pages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DRAIN_MARGIN_S", 0.0)
    settings = replace(SETTINGS, host_buffer=True)
    producer, consumer = rig.pair(sleeps=True, settings=settings)
    rig.transfer(producer, consumer, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(HostMirror, "is_copying", property(lambda _: True))
        with pytest.raises(WithdrawalRefused, match="a copy of blocks to host memory"):
            producer.sleep()
    producer.sleep()
    producer.wake_up()
    rig.transfer(producer, consumer, seed=2)


@promise(2)
def test_a_worker_is_drained_when_its_thread_has_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the thread uses the agent, and what a thread after it would use."""
    producer, consumer = rig.pair(sleeps=True)
    rig.transfer(producer, consumer, seed=1)
    stop = LoadRunner.stop
    ended: list[bool] = []

    def take_long(runner: LoadRunner) -> list[Load | SlotPoll]:
        time.sleep(0.1)
        ended.append(True)
        return stop(runner)

    with monkeypatch.context() as patch:
        patch.setattr(LoadRunner, "stop", take_long)
        producer.worker.drain()
        assert ended
    producer.worker.keep()
    rig.transfer(producer, consumer, seed=2)


def test_orders_that_come_during_a_sleep_are_answered_at_once(rig: Rig) -> None:
    producer, consumer = rig.pair(sleeps=True)
    rig.transfer(producer, consumer, seed=1)
    offer = producer.prefill(10, seed=2)
    consumer.withdraw()
    load = consumer.load(offer.params)
    consumer.step()
    assert consumer.seen.failed == {load.request_id: FailureReason.WITHDRAWN}
    own = consumer.prefill(10, seed=4)
    assert own.request_id in consumer.seen.sent
    consumer.restore()
    rig.transfer(producer, consumer, seed=3)


def test_handshakes_are_refused_during_a_sleep(rig: Rig) -> None:
    producer, consumer = rig.pair(sleeps=True)
    offer = producer.prefill(10, seed=2)
    producer.sleep()
    load = consumer.load(offer.params)
    step_until(lambda: consumer.seen.is_over(load.request_id), "it is over", consumer)
    assert consumer.seen.failed == {load.request_id: FailureReason.REFUSED}
    producer.wake_up()
    rig.transfer(producer, consumer, seed=3)


def test_hooks_that_come_twice_change_nothing(pair: Pair) -> None:
    rig = pair.rig
    producer = pair.producer
    consumer = pair.consumer
    producer.restore()
    rig.transfer(producer, consumer, seed=1)
    producer.sleep()
    producer.withdraw()
    producer.wake_up()
    boot = producer.boot
    producer.restore()
    assert producer.boot == boot
    rig.transfer(producer, consumer, seed=2)


def test_an_engine_that_ends_while_it_sleeps_touches_no_page(pair: Pair) -> None:
    rig = pair.rig
    rig.transfer(pair.producer, pair.consumer, seed=1)
    for engine in (pair.consumer, pair.producer):
        engine.sleep()
        rig.retire(engine)
        assert engine.worker.registration.state is MemoryState.WITHDRAWN


def test_an_agent_is_not_closed_under_reads(rig: Rig) -> None:
    (engine,) = (rig.engine("P", sleeps=True),)
    with pytest.raises(LocalProtocolError, match="DEREGISTERED cannot happen"):
        engine.worker.deregister()
    # One of several workers was refused: the others go on.
    engine.worker.drain()
    engine.worker.keep()
    rig.transfer(engine, rig.engine("C"), seed=1)


def test_memory_that_the_fabric_refuses_stays_withdrawn_until_it_does_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair(sleeps=True)
    producer.sleep()

    def refuse(*_: object) -> None:
        raise FabricUnavailable("register", "of the test")

    with monkeypatch.context() as refused:
        refused.setattr("tests.harness.fault_fabric.FaultFabric.register", refuse)
        with pytest.raises(FabricUnavailable):
            producer.wake_up()
    assert producer.worker.registration.state is MemoryState.WITHDRAWN
    producer.restore()
    rig.transfer(producer, consumer, seed=1)


def test_producers_of_the_configuration_are_connected_before_the_first_load(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair(sleeps=True)
    rig.transfer(producer, consumer, seed=1)
    (key,) = snapshot_of(consumer.worker).peers.ready
    thread_of(consumer.worker).registry.prewarm_static(key, 0.0)
    consumer.sleep()
    consumer.wake_up()
    wait_until(
        lambda: snapshot_of(consumer.worker).peers.ready == (key,), "it is connected"
    )
