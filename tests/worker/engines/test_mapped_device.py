"""Loads from a producer of this host whose caches lie on a device and are mapped by CUDA IPC: on a fake device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker import worker_memory
from kvferry.worker.device import Device
from kvferry.worker.loads import runner
from kvferry.worker.peer_memory.mapping import WorkerMapping
from kvferry.worker.peer_memory.port import NotMappable
from kvferry.worker.settings import MappedReadsOption
from tests.fakes.cuda import FakeCuda
from tests.fakes.ipc_driver import FakeIpcDriver
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.inside import thread_of
from tests.harness.rig import Rig
from tests.waiting import step_until, wait_until
from tests.worker.engines.test_mapped_reads import check_mapped_loads

IPC = replace(SETTINGS, mapped_reads=MappedReadsOption.CUDA_IPC)
CONSUMERS = {
    "equal": CacheShape(),
    "tokens outermost": CacheShape(axes="bth"),
    "other blocks": CacheShape(blocks=24, block_tokens=12),
    "all layers in one allocation": CacheShape(one_storage=True),
}

ALIKE = CacheShape()
Pair = Callable[..., tuple[Engine, Engine]]


@pytest.fixture
def pair(rig: Rig, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Makes a producer whose caches can be opened, and a consumer, on one fake device."""
    monkeypatch.setattr(worker_memory, "CudaIpcDriver", FakeIpcDriver)

    def make(
        *, producer: Any = IPC, consumer: Any = IPC, shape: CacheShape = ALIKE
    ) -> tuple[Engine, Engine]:
        return (
            rig.engine("P", shared=True, device=cuda.device, settings=producer),
            rig.engine("C", shape=shape, device=cuda.device, settings=consumer),
        )

    yield make
    cuda.check()


@pytest.mark.parametrize("shape", CONSUMERS.values(), ids=CONSUMERS)
def test_every_byte_is_copied_and_the_fabric_reads_nothing(
    rig: Rig, pair: Pair, shape: CacheShape
) -> None:
    producer, consumer = pair(shape=shape)
    check_mapped_loads(rig, producer, consumer)
    # One for the slot of the first contact, one for the proof of the lease table's file.
    assert consumer.fabric.calls["post_read"] == 2


def test_a_lease_that_has_ended_fails_the_load(rig: Rig, pair: Pair) -> None:
    producer, consumer = pair()
    rig.transfer(producer, consumer)
    offer = producer.prefill(10, 3)
    producer.give_away(offer)
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is FailureReason.FENCE


def test_a_long_load_is_as_many_launches_as_the_relayout_wants(
    rig: Rig, cuda: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are tables: those that follow wait for the device."""
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    producer, consumer = pair()
    rig.transfer(producer, consumer, tokens=4)
    blocks = 3 * worker_memory.MAPPED_TABLES
    monkeypatch.setattr(TritonRelayout, "most_units", lambda *_: 1)
    for stream in cuda.streams:
        stream.hold()
    before = cuda.names().count("launch")
    load = consumer.load(producer.prefill(tokens=4 * blocks, seed=3).params)
    wait_until(
        lambda: cuda.names().count("launch") - before == worker_memory.MAPPED_TABLES,
        "all tables are in use",
    )
    for stream in cuda.streams:
        stream.release()
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)
    assert cuda.names().count("launch") - before == blocks


def test_a_load_is_reported_when_its_last_launch_has_ended(
    rig: Rig, cuda: FakeCuda, pair: Pair
) -> None:
    """Of whole blocks: nothing is zeroed behind them, which would be waited for too."""
    producer, consumer = pair()
    rig.transfer(producer, consumer)
    launches = cuda.names().count("launch")
    for stream in cuda.streams:
        stream.hold()
    load = consumer.load(producer.prefill(tokens=12, seed=3).params)
    wait_until(
        lambda: cuda.names().count("launch") > launches, "the copy has been launched"
    )
    asked = cuda.asked.total()
    step_until(
        lambda: (
            consumer.seen.is_over(load.request_id) or cuda.asked.total() > asked + 20
        ),
        "the device is asked again and again",
        consumer,
    )
    assert not consumer.seen.is_over(load.request_id)
    for stream in cuda.streams:
        stream.release()
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)


OFF = replace(SETTINGS, mapped_reads=MappedReadsOption.AUTO)
REASON = "CUDA IPC is off by default until it has been tried on a GPU"
TURNED_ON = {
    "neither": (OFF, OFF, REASON),
    "the producer": (IPC, OFF, REASON),
    "the consumer": (OFF, IPC, f"the producer's memory cannot be shared: {REASON}"),
}


@pytest.mark.parametrize("who", TURNED_ON)
def test_where_it_is_not_turned_on_the_fabric_reads_and_the_log_says_why(
    rig: Rig, pair: Pair, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    producer_settings, consumer_settings, said = TURNED_ON[who]
    producer, consumer = pair(producer=producer_settings, consumer=consumer_settings)
    with caplog.at_level(logging.INFO, "kvferry"):
        rig.transfer(producer, consumer)
    (record,) = consumer.seen.totals
    assert not record.mapped_bytes
    assert record.transferred_bytes == record.planned_bytes > 0
    (line,) = [line for line in caplog.messages if " connected in " in line]
    assert f"over the fabric, not mapped: {said}" in line


@pytest.mark.parametrize("fault", ["refused", "spoiled", "no driver"])
def test_what_cannot_be_opened_is_read_over_the_fabric_and_the_log_says_why(
    rig: Rig,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    said = {
        "refused": "cuIpcOpenMemHandle: CUDA_ERROR_MAP_FAILED",
        "spoiled": "is not the producer's memory",
        "no driver": "cuda-bindings is missing",
    }[fault]

    def broken(device: Device) -> FakeIpcDriver:
        driver = FakeIpcDriver(device)
        driver.spoiled = fault == "spoiled"
        if fault == "refused":
            driver.refused = NotMappable(said)
        if fault == "no driver":
            raise NotMappable(said)
        return driver

    monkeypatch.setattr(worker_memory, "CudaIpcDriver", broken)
    producer, consumer = pair()
    with caplog.at_level(logging.INFO, "kvferry"):
        rig.transfer(producer, consumer)
    assert not consumer.seen.totals[0].mapped_bytes
    (line,) = [line for line in caplog.messages if " connected in " in line]
    assert said in line


def test_a_producers_memory_stays_mapped_while_a_kernel_reads_it(
    rig: Rig, cuda: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has ended and it is forgotten; the load that is under way is the last user of the map."""
    producer, consumer = pair()
    rig.transfer(producer, consumer)
    # The log's records, which pytest keeps, have the failed load.
    monkeypatch.setattr(runner.logger, "disabled", True)
    assert cuda.device.mapped
    for stream in cuda.streams:
        stream.hold()
    launches = cuda.names().count("launch")
    # Whole blocks: nothing is zeroed behind them, so that the launch is the copy's.
    load = consumer.load(producer.prefill(tokens=12, seed=3).params)
    wait_until(
        lambda: cuda.names().count("launch") > launches, "the copy has been launched"
    )
    monkeypatch.setattr(WorkerMapping, "has_exited", lambda _: True)
    registry = thread_of(consumer.worker).registry
    step_until(lambda: not registry.ready, "it is forgotten", consumer)
    assert cuda.device.mapped, "the kernel reads it"
    for stream in cuda.streams:
        stream.release()
    step_until(
        lambda: consumer.seen.is_over(load.request_id), "the load is over", consumer
    )
    # What was read of a process that has ended does not count.
    assert consumer.seen.failed[load.request_id] is FailureReason.TRANSFER
    step_until(lambda: not cuda.device.mapped, "it is unmapped", consumer)


def test_what_was_read_of_a_producer_that_dies_meanwhile_does_not_count(
    rig: Rig, cuda: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words say READY for ever, and nobody knows whose its memory is: the load fails, when the kernel has ended."""
    producer, consumer = pair()
    rig.transfer(producer, consumer)
    for stream in cuda.streams:
        stream.hold()
    launches = cuda.names().count("launch")
    load = consumer.load(producer.prefill(tokens=12, seed=3).params)
    wait_until(
        lambda: cuda.names().count("launch") > launches, "the copy has been launched"
    )
    with monkeypatch.context() as patch:
        patch.setattr(WorkerMapping, "may_be_freed", lambda _: True)
        for stream in cuda.streams:
            stream.release()
        assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    rig.step_until(
        lambda: load.request_id not in consumer.seen.alive, "its blocks are safe"
    )
    rig.until_good(producer, consumer)
