"""A load that is over posts a read behind its message to the producer: the next load does not wait for the answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.fabric.errors import FabricError, PeerLost, TransferFailed
from tests.harness.cache_engine import wait_until_idle
from tests.harness.engine import Engine
from tests.harness.integrity import check_worker
from tests.harness.rig import Rig
from tests.waiting import wait_until


def _with_each_message(consumer: Engine, then: Callable[[], object]) -> list[int]:
    """Call a function after each message. Returns how many reads had been posted by then, for each message."""
    notify, reads = consumer.fabric.notify, list[int]()

    def notified(peer: str, message: bytes) -> None:
        notify(peer, message)  # type: ignore[arg-type]
        reads.append(consumer.fabric.calls["post_read"])
        then()

    consumer.fabric.notify = notified  # type: ignore[method-assign]
    return reads


def _wait_for_read_behind(consumer: Engine, reads: list[int]) -> None:
    wait_until(lambda: reads and consumer.fabric.calls["post_read"] == reads[-1] + 1, "a read follows the message")


def test_a_read_is_posted_behind_the_message_that_ends_a_load(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    wait_until_idle(consumer.worker)
    reads = _with_each_message(consumer, lambda: None)
    rig.transfer(producer, consumer)
    _wait_for_read_behind(consumer, reads)
    wait_until_idle(consumer.worker)
    assert consumer.fabric.calls["post_read"] == reads[-1] + 1


def test_a_load_is_over_while_the_read_behind_its_message_is_in_flight(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    wait_until_idle(consumer.worker)
    reads = _with_each_message(consumer, lambda: rig.network.freeze(producer.fabric.agent_name))
    load = consumer.load(producer.prefill(tokens=10, seed=2).params)
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=2)
    _wait_for_read_behind(consumer, reads)
    with pytest.raises(LocalProtocolError, match="1 flushing"):
        check_worker(consumer.worker, idle=True)
    check_worker(consumer.worker)
    rig.network.thaw(producer.fabric.agent_name)
    wait_until_idle(consumer.worker)
    assert consumer.all_entries_are_free()


@pytest.mark.parametrize("error", [PeerLost("test", "gone"), TransferFailed("test", "of the test")])
def test_a_read_behind_a_message_that_cannot_be_posted_costs_the_load_nothing(rig: Rig, error: FabricError) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    wait_until_idle(consumer.worker)
    _with_each_message(consumer, lambda: consumer.fabric.fail("post_read", lambda: error))
    rig.transfer(producer, consumer)
    wait_until(lambda: consumer.fabric.failures_left("post_read") == 0, "it was tried")
    consumer.worker._thread.reader.grace_s = 0.0
    wait_until_idle(consumer.worker)
    assert consumer.seen.counts["failed_notifications"] == 0
