"""A request is aborted while its load waits: the load ends at once, whatever it waits for, and posts no more reads.

What has no read in flight gives its blocks back with the report; the others when their reads have ended.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest

from kvferry.link.limits import AHEAD, FOR_LOADS
from kvferry.protocol.orders import (
    FailureReason,
    StepOrders,
    encode_head,
    encode_orders,
)
from kvferry.worker.loads.state import LoadState
from tests.harness.cache_engine import HOST, SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import POISON, Engine, OrderedLoad
from tests.harness.inside import thread_of
from tests.harness.integrity import snapshot_of
from tests.harness.ledgers import check_loads
from tests.harness.rig import Rig
from tests.waiting import wait_until
from tests.worker.engines.streams import STREAMS, ServedStream

STAGED = replace(SETTINGS, staging_pool_bytes=8 << 10, direct_min_bytes=1 << 20)


class _Busy:
    """A device that never gets to the mark."""

    def mark(self) -> _Busy:
        return self

    def reached(self) -> bool:
        return False


def abort(rig: Rig, consumer: Engine, *loads: OrderedLoad) -> None:
    """The requests are gone, and so are their loads, although their producer takes no step."""
    for load in loads:
        consumer.loads.finished(load.request_id)
    for load in loads:
        rig.step_until(
            lambda load=load: consumer.seen.is_over(load.request_id),  # type: ignore[misc]
            "it is over",
            only=consumer,
        )
        assert consumer.seen.failed[load.request_id] is FailureReason.ABORTED
    assert not consumer.seen.counts["quarantined_loads"]
    check_loads(consumer.loads)


def free(consumer: Engine, *loads: OrderedLoad) -> None:
    for load in loads:
        consumer.unused += load.blocks


def parked(rig: Rig, _: ExitStack) -> tuple[Engine, OrderedLoad]:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    load = consumer.load(
        producer.finish_prefill(producer.start_prefill(5, seed=5)).params
    )
    wait_until(lambda: consumer.parked_loads(), "it is parked")
    return consumer, load


def no_places(consumer: Engine, stack: ExitStack) -> None:
    """From now on other loads have all places."""
    runner = thread_of(consumer.worker).runner
    stack.enter_context(mock.patch.object(runner, "_max_loads", 0))


def resumed(rig: Rig, stack: ExitStack) -> tuple[Engine, OrderedLoad]:
    """Its slot has changed meanwhile."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    running = producer.start_prefill(5, seed=5)
    load = consumer.load(producer.finish_prefill(running).params)
    wait_until(lambda: consumer.parked_loads(), "it is parked")
    no_places(consumer, stack)
    producer.step()
    wait_until(
        lambda: bool(consumer.loads_in(LoadState.RESUMED)), "it waits for a place"
    )
    return consumer, load


def queued(rig: Rig, stack: ExitStack) -> tuple[Engine, OrderedLoad]:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    no_places(consumer, stack)
    load = consumer.load(producer.prefill(10).params)
    wait_until(lambda: consumer.loads_in(LoadState.WAITING), "it waits for a place")
    return consumer, load


def connecting(rig: Rig, stack: ExitStack) -> tuple[Engine, OrderedLoad]:
    """The address of its producer takes connections and says nothing."""
    silent = stack.enter_context(socket.create_server((HOST, 0)))
    producer, consumer = rig.pair(settings=replace(SETTINGS, handshake_timeout_s=5.0))
    params = producer.changed(producer.prefill(10), remote_port=silent.getsockname()[1])
    load = consumer.load(params)
    wait_until(
        lambda: snapshot_of(consumer.worker).peers.handshakes.awaited,
        "the handshake is under way",
    )
    return consumer, load


def on_the_device(rig: Rig, _: ExitStack) -> tuple[Engine, OrderedLoad]:
    """The blocks' last owner still writes."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    with mock.patch.object(consumer.worker, "_device", _Busy()):
        load = consumer.load(producer.prefill(10).params)
    wait_until(
        lambda: snapshot_of(consumer.worker).loads[LoadState.RUNNING],
        "it has had its first turn",
    )
    return consumer, load


def for_the_pool(rig: Rig, stack: ExitStack) -> tuple[Engine, OrderedLoad]:
    producer = rig.engine("P", shape=CacheShape(axes="bht"), settings=STAGED)
    consumer = rig.engine("C", shape=CacheShape(axes="bth"), settings=STAGED)
    rig.transfer(producer, consumer)
    pool = consumer.pool
    for number in range(7):
        wave = pool.try_take(f"other-{number}", f"peer-{number}", pool.largest_wave)
        assert wave is not None
        stack.callback(pool.give_back, wave)
    load = consumer.load(producer.prefill(10).params)
    wait_until(lambda: pool.waiting, "it waits for the pool")
    return consumer, load


def streamed(rig: Rig, _: ExitStack) -> tuple[Engine, OrderedLoad]:
    """A part has been read, and the next one is not computed."""
    producer, consumer = rig.pair(settings=STREAMS)
    stream = ServedStream.begin(rig, producer, consumer, tokens=40, first=5)
    load = stream.order()
    stream.compute(8)
    stream.until_read(13)
    wait_until(lambda: consumer.parked_loads(), "it is parked")
    return consumer, load


WAITS: dict[str, Callable[[Rig, ExitStack], tuple[Engine, OrderedLoad]]] = {
    "its producer": parked,
    "a place, again": resumed,
    "a place": queued,
    "a handshake": connecting,
    "the device": on_the_device,
    "the pool": for_the_pool,
    "the next part": streamed,
}


@pytest.mark.parametrize("bring", WAITS.values(), ids=WAITS)
def test_what_waits_without_a_read_in_flight_frees_its_blocks_at_once(
    rig: Rig, bring: Callable[[Rig, ExitStack], tuple[Engine, OrderedLoad]]
) -> None:
    with ExitStack() as stack:
        consumer, load = bring(rig, stack)
        posts = consumer.fabric.calls["post_data_read"]
        abort(rig, consumer, load)
        assert not consumer.seen.alive
        assert not consumer.fabric.reading()
        assert not len(consumer.loads)
        assert consumer.fabric.calls["post_data_read"] == posts
        pool = snapshot_of(consumer.worker).pool
        assert pool is not None
        assert not pool.waiting


def test_handshakes_that_only_aborted_requests_wait_for_are_not_begun(rig: Rig) -> None:
    """Four with a host are under way at once; the others would have had their turns before those of later requests."""
    with ExitStack() as stack:
        ports = [
            stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1]
            for _ in range(7)
        ]
        producer, consumer = rig.pair(
            settings=replace(SETTINGS, handshake_timeout_s=60.0, max_loads=8)
        )
        offers = [producer.prefill(2) for _ in ports]
        loads = [
            consumer.load(producer.changed(offer, remote_port=port))
            for offer, port in zip(offers, ports, strict=True)
        ]
        wait_until(
            lambda: (
                len(snapshot_of(consumer.worker).peers.handshakes.awaited) == len(ports)
            ),
            "all are awaited",
        )
        abort(rig, consumer, *loads)
        under_way = FOR_LOADS.per_unverified_host + AHEAD.per_unverified_host
        wait_until(
            lambda: len(snapshot_of(consumer.worker).peers.handshakes) <= under_way,
            "those that had not begun are withdrawn",
        )


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_what_is_being_read_is_reported_at_once_and_its_blocks_wait_for_the_read(
    rig: Rig, *, staged: bool
) -> None:
    settings = STAGED if staged else SETTINGS
    producer = rig.engine("P", shape=CacheShape(axes="bht"), settings=settings)
    consumer = rig.engine(
        "C", shape=CacheShape(axes="bth" if staged else "bht"), settings=settings
    )
    rig.transfer(producer, consumer, tokens=60)
    free_blocks = len(consumer.unused)
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    load = consumer.load(producer.prefill(60, seed=4).params)
    wait_until(consumer.fabric.reading, "it reads")
    abort(rig, consumer, load)
    assert consumer.seen.alive == {load.request_id}
    posts = consumer.fabric.calls["post_data_read"]
    rig.network.thaw(producer.fabric.agent_name)
    rig.step_until(lambda: not consumer.seen.alive, "the read has ended")
    assert consumer.fabric.calls["post_data_read"] == posts, (
        "the rest is not read any more"
    )
    if staged:
        assert consumer.pool.free_bytes == consumer.pool.capacity
        written = consumer.caches.cells(0)[list(load.blocks)]
        assert (written == POISON).any(), "nothing is put in place for nobody"
    free(consumer, load)
    assert len(consumer.unused) == free_blocks
    rig.transfer(producer, consumer)


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_what_has_read_no_data_frees_its_blocks_although_its_producer_stands_still(
    rig: Rig, how: str
) -> None:
    """Its read of the slot is in flight, which writes into no block."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = producer.prefill(10)
    rig.network.freeze(producer.fabric.agent_name)
    load = consumer.load(offer.params)
    wait_until(consumer.fabric.transfers, "it reads the slot")
    if how == "abort":
        abort(rig, consumer, load)
    else:
        consumer.set_timeouts(load_s=0.0)
        rig.step_until(
            lambda: consumer.seen.is_over(load.request_id), "it is over", only=consumer
        )
        assert consumer.seen.failed[load.request_id] is FailureReason.DEADLINE
        consumer.set_timeouts()
    assert not consumer.seen.alive
    assert not consumer.seen.counts["quarantined_loads"]
    assert consumer.fabric.transfers(), "it is kept until it has ended"
    assert not consumer.all_entries_are_free()
    rig.network.thaw(producer.fabric.agent_name)
    wait_until(consumer.all_entries_are_free, "it has ended")
    free(consumer, load)
    rig.transfer(producer, consumer)


def test_the_producers_blocks_are_free_when_the_consumer_does_not_want_them(
    any_rig: Rig,
) -> None:
    """Nothing waits for the lease: it is given back. The prompt becomes ready after the abort."""
    producer, consumer = any_rig.pair()
    any_rig.transfer(producer, consumer)
    running = producer.start_prefill(5, seed=5)
    offer = producer.finish_prefill(running)
    load = consumer.load(offer.params)
    wait_until(lambda: consumer.parked_loads(), "it is parked")
    abort(any_rig, consumer, load)
    any_rig.step_until(
        lambda: offer.request_id in producer.seen.sent, "the lease has ended"
    )
    free(consumer, load)
    any_rig.transfer(producer, consumer)


def test_aborts_of_loads_that_have_ended_or_are_unknown_change_nothing(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    load = rig.transfer(producer, consumer)
    orders = StepOrders(boot=consumer.boot, cancels=(load.request_id, "unknown"))
    consumer.worker.carry_out(encode_head(orders), encode_orders(orders))
    _, other = parked_beside(rig, producer, consumer)
    assert rig.until_over(consumer, other) is None
    assert consumer.seen.loaded == [load.request_id, other.request_id]
    assert not consumer.seen.failed


def parked_beside(
    rig: Rig, producer: Engine, consumer: Engine
) -> tuple[str, OrderedLoad]:
    running = producer.start_prefill(5, seed=5)
    load = consumer.load(producer.finish_prefill(running).params)
    return running, load


def test_a_storm_of_aborts_leaves_the_others_alone(rig: Rig) -> None:
    """Every second of many loads that wait for one producer."""
    settings = replace(SETTINGS, lease_slots=256, max_loads=8)
    producer, consumer = rig.pair(
        shape=CacheShape(blocks=300, layers=1), settings=settings
    )
    rig.transfer(producer, consumer)
    running = [producer.start_prefill(tokens=5, seed=5 + n) for n in range(60)]
    loads = [
        consumer.load(producer.finish_prefill(request_id).params)
        for request_id in running
    ]
    wait_until(lambda: consumer.parked_loads() >= len(loads), "they are parked", 60.0)
    abort(rig, consumer, *loads[::2])
    for number, load in list(enumerate(loads))[1::2]:
        assert rig.until_over(consumer, load) is None
        assert consumer.has_bytes(load, seed=5 + number)
    assert consumer.entries_of_loads() == 0
