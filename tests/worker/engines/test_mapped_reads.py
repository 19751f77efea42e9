"""Loads from a producer of this host whose memory is mapped: the fabric reads only what proves the map."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.peer_memory.mapping import WorkerMapping
from kvferry.worker.peers import mapped_route, peer
from kvferry.worker.settings import MappedReadsOption
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.inside import thread_of
from tests.harness.rig import HASTY, Rig, maps_of
from tests.waiting import step_until, wait_until

CONSUMERS = {
    "equal": CacheShape(),
    "tokens outermost": CacheShape(axes="bth"),
    "blocks outermost last": CacheShape(axes="htb", gap_bytes=24),
    "other blocks": CacheShape(blocks=24, block_tokens=12),
    "all layers in one allocation": CacheShape(one_storage=True),
}


def pair(rig: Rig, **consumer: object) -> tuple[Engine, Engine]:
    """A producer whose memory can be mapped, and a consumer."""
    return rig.engine("P", shared=True), rig.engine("C", **consumer)


def check_mapped_loads(rig: Rig, producer: Engine, consumer: Engine) -> None:
    """Three loads put every byte in place, all of them from mapped memory and none over the fabric."""
    for number in range(1, 4):
        rig.transfer(producer, consumer, tokens=13, seed=number)
    for record in consumer.seen.totals:
        assert record.mapped_bytes == record.planned_bytes > 0
        assert not record.transferred_bytes
        assert not record.staged_bytes
    assert consumer.fabric.calls["post_data_read"] == 0


@pytest.mark.parametrize("shape", CONSUMERS.values(), ids=CONSUMERS)
def test_every_byte_is_copied_and_the_fabric_reads_nothing(
    any_rig: Rig, shape: CacheShape
) -> None:
    producer, consumer = pair(any_rig, shape=shape)
    check_mapped_loads(any_rig, producer, consumer)
    # One for the slot of the first contact, one for the proofs.
    assert consumer.fabric.calls["post_read"] == 2
    assert consumer.all_entries_are_free()


def test_long_loads_are_copied_launch_by_launch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_route, "LAUNCH_BYTES", 1)
    producer, consumer = pair(rig)
    rig.transfer(producer, consumer, tokens=13)
    (route,) = next(thread_of(consumer.worker).registry.peers()).mapped_routes
    assert route.relayout.launches == 4, "one for each unit"


def test_a_lease_that_has_ended_fails_the_load(any_rig: Rig) -> None:
    producer, consumer = pair(any_rig)
    any_rig.transfer(producer, consumer)
    offer = producer.prefill(10, 3)
    producer.give_away(offer)
    load = consumer.load(offer.params)
    assert any_rig.until_over(consumer, load) is FailureReason.FENCE


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_where_it_is_off_on_either_side_the_fabric_reads(rig: Rig, side: str) -> None:
    off = replace(SETTINGS, mapped_reads=MappedReadsOption.OFF)
    producer = rig.engine(
        "P", shared=True, **{"settings": off} if side == "producer" else {}
    )
    consumer = rig.engine("C", **{"settings": off} if side == "consumer" else {})
    rig.transfer(producer, consumer)
    (record,) = consumer.seen.totals
    assert not record.mapped_bytes
    assert record.transferred_bytes == record.planned_bytes > 0


def test_caches_in_private_memory_are_read_over_the_fabric_and_the_log_says_why(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = rig.pair()
    with caplog.at_level(logging.INFO, "kvferry"):
        rig.transfer(producer, consumer)
    assert not consumer.seen.totals[0].mapped_bytes
    (line,) = [line for line in caplog.messages if " connected in " in line]
    assert line.endswith(
        "; over the fabric, not mapped: the producer's memory cannot be shared: "
        "the engine has its caches in memory of its own process"
    )


def test_the_log_says_that_a_peer_is_mapped(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = pair(rig)
    with caplog.at_level(logging.INFO, "kvferry"):
        rig.transfer(producer, consumer)
    (line,) = [line for line in caplog.messages if " connected in " in line]
    assert " mapped, " in line
    assert "not mapped" not in line


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message for record in caplog.records if record.levelno == logging.WARNING
    ]


def test_a_pair_of_one_host_that_reads_slowly_is_a_warning_with_what_helps(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    monkeypatch.setattr(peer, "ipc_namespace", lambda: "ipc:[1]")
    rig.transfer(producer, consumer)
    assert [line for line in warnings_of(caplog) if line.endswith("the two are apart")]


@pytest.mark.parametrize(
    "why", ["mapped", "another host", "one namespace", "it does not know its own"]
)
def test_no_other_pair_is_warned_of(
    rig: Rig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    producer, consumer = pair(rig) if why == "mapped" else rig.pair()
    if why == "it does not know its own":
        monkeypatch.setattr(peer, "ipc_namespace", lambda: None)
    elif why != "one namespace":
        monkeypatch.setattr(peer, "ipc_namespace", lambda: "ipc:[1]")
    if why == "another host":
        monkeypatch.setattr(peer, "machine_id", lambda: "another")
    rig.transfer(producer, consumer)
    assert warnings_of(caplog) == []


def test_a_map_of_other_memory_than_the_fabric_reads_is_not_used(
    any_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = pair(any_rig, settings=HASTY)

    def other_proofs(mapping: WorkerMapping) -> np.ndarray:
        return np.ones((len(mapping.allocations), 2), dtype=np.uint64)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerMapping, "proofs", other_proofs)
        load = consumer.load(producer.prefill(10, 1).params)
        assert any_rig.until_over(consumer, load) is FailureReason.HANDSHAKE
        assert consumer.caches.holds(load.blocks, 0xA5)
    any_rig.until_good(producer, consumer)


def test_what_is_mapped_is_unmapped_when_the_peer_is_forgotten(rig: Rig) -> None:
    producer = rig.engine("P", shared=True)
    own = maps_of(producer)
    consumer = rig.engine("C", settings=replace(SETTINGS, peer_ttl_s=0.05))
    rig.transfer(producer, consumer)
    step_until(lambda: maps_of(producer) == own, "it is unmapped", producer, consumer)
    rig.transfer(producer, consumer)


def test_a_peer_whose_process_has_ended_is_forgotten_without_a_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = pair(rig)
    own = maps_of(producer)
    rig.transfer(producer, consumer)
    assert maps_of(producer) == 2 * own
    calls = consumer.fabric.calls["post_read"]
    monkeypatch.setattr(WorkerMapping, "has_exited", lambda _: True)
    step_until(lambda: maps_of(producer) == own, "it is unmapped", consumer)
    assert consumer.fabric.calls["post_read"] == calls


def test_a_load_that_waits_for_a_producer_is_failed_when_its_process_has_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of a process that is gone never change."""
    producer, consumer = pair(rig)
    rig.transfer(producer, consumer)
    offer = producer.finish_prefill(producer.start_prefill(5, seed=5))
    load = consumer.load(offer.params)
    wait_until(lambda: consumer.parked_loads(), "it is parked")
    monkeypatch.setattr(WorkerMapping, "has_exited", lambda _: True)
    step_until(
        lambda: consumer.seen.is_over(load.request_id), "it has failed", consumer
    )
    assert consumer.seen.failed[load.request_id] is FailureReason.TRANSFER


def test_a_load_that_is_parked_goes_on_when_the_producer_is_ready(any_rig: Rig) -> None:
    """What it waits for is looked up without a read, too."""
    producer, consumer = pair(any_rig)
    any_rig.transfer(producer, consumer)
    reads = consumer.fabric.calls["post_read"]
    offer = producer.finish_prefill(producer.start_prefill(5, seed=5))
    load = consumer.load(offer.params)
    wait_until(lambda: consumer.parked_loads(), "it is parked")
    assert any_rig.until_over(consumer, load) is None
    consumer.check_bytes(load, 5)
    assert consumer.fabric.calls["post_read"] == reads
