"""Unexpected errors of the fabric and of our own parts: the thread lives, and later loads are good."""

from __future__ import annotations

import pytest

from kvferry.link import limits
from kvferry.link.limits import Backoff
from kvferry.protocol.orders import (
    FailureReason,
    LeaseEnd,
    StepOrders,
    encode_head,
    encode_orders,
)
from kvferry.protocol.slots import (
    EMPTY,
)
from kvferry.worker.fabric.errors import PeerLost, TransferFailed
from kvferry.worker.leases import LeaseTable
from kvferry.worker.peers.plan_cache import PlanCache
from tests.harness.engine import Engine
from tests.harness.inside import thread_of
from tests.harness.rig import Rig
from tests.promises import promise

pytestmark = pytest.mark.slow

ERRORS = {
    "a bug": lambda: RuntimeError("unheard of"),
    "a lost peer": lambda: PeerLost("test", "the test wanted it"),
    "a failed transfer": lambda: TransferFailed("test", "the test wanted it"),
}
ALWAYS = 10**9


@pytest.fixture(autouse=True)
def logs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One traceback a second is logged in a process, whichever test was the last to cause one."""
    monkeypatch.setattr(
        "kvferry.worker.fabric.errors.internal_errors._quiet_until_s", 0.0
    )


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AVOID", Backoff(0.01, 0.02))


def recovers(rig: Rig, producer: Engine, consumer: Engine) -> None:
    """Without further faults everything comes back: blocks, entries, transfers, and the next load is good."""
    rig.settle()
    rig.until_good(producer, consumer)


@promise(6)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "method", ["post_read", "post_data_read", "poll", "poll_data_read", "telemetry"]
)
def test_errors_of_a_method_that_raises_again_and_again_fail_the_load(
    rig: Rig, method: str, error: str
) -> None:
    """For errors of single calls see tests/faults/test_every_call.py."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    consumer.fabric.fail(method, ERRORS[error], ALWAYS)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    if (method, error) == ("poll_data_read", "a bug"):
        assert consumer.seen.alive == {load.request_id}, (
            "it is unknown whether the read has ended"
        )
    if method == "poll":
        assert not consumer.seen.alive, "a read of the slot writes into no block"
    recovers(rig, producer, consumer)


def test_a_producer_that_cannot_be_notified_does_not_spoil_the_load(rig: Rig) -> None:
    producer, consumer = rig.pair(lease_s=0.3)
    rig.transfer(producer, consumer)
    consumer.fabric.fail("notify", ERRORS["a lost peer"])
    offer = producer.prefill(tokens=10)
    assert rig.until_over(consumer, consumer.load(offer.params)) is None
    rig.step_until(
        lambda: consumer.seen.counts["failed_notifications"] == 1, "it is counted"
    )
    rig.step_until(lambda: offer.request_id in producer.seen.sent, "the lease runs out")


def test_a_fabric_without_notifications_stops_neither_the_ends_of_leases_nor_loads(
    rig: Rig,
) -> None:
    one, other = rig.pair()
    rig.transfer(other, one)
    one.fabric.fail("take_notifications", ERRORS["a bug"], ALWAYS)
    held = one.prefill(tokens=10)
    load = one.load(other.prefill(tokens=10, seed=4).params)
    assert rig.until_over(one, load) is None
    one.give_away(held)
    assert one.word(held) == EMPTY
    one.fabric.faults.clear()
    rig.transfer(one, other)


def test_loads_are_carried_out_although_the_leases_of_their_step_cannot_be(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    params = producer.prefill(tokens=10).params
    assert consumer.loads.offer("decode", params, 10, 0.0) is None
    blocks = consumer.take_blocks(10)
    consumer.loads.allocated(
        "decode", consumer.loads.matched_tokens("decode", 0), (blocks,)
    )
    end = LeaseEnd(request_id="held", slot=0, epoch=params.kvferry.lease_epoch)
    orders = StepOrders(
        boot=consumer.boot, loads=consumer.loads.take_orders().loads, ends=(end,)
    )

    def broken(*_: object) -> None:
        raise RuntimeError("unheard of")

    with monkeypatch.context() as patched:
        patched.setattr(LeaseTable, "end", broken)
        consumer.worker.carry_out(encode_head(orders), encode_orders(orders))
        rig.step_until(lambda: "decode" in consumer.seen.loaded, "the load is good")
    consumer.loads.finished("decode")
    recovers(rig, producer, consumer)


def test_leases_become_ready_although_the_peer_registry_is_broken(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = rig.pair()
    rig.transfer(other, one)

    def broken(*_: object) -> bool:
        raise RuntimeError("unheard of")

    monkeypatch.setattr(thread_of(one.worker).registry, "step", broken)
    rig.transfer(one, other)
    rig.transfer(other, one)


def test_bugs_are_shown_as_bugs_and_do_not_flood_the_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    caplog.clear()
    consumer.fabric.fail("poll", ERRORS["a bug"], ALWAYS)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    polls = consumer.fabric.calls["poll"]
    rig.step_until(
        lambda: consumer.fabric.calls["poll"] > polls + 20, "it is asked for often"
    )
    with_traceback = [record for record in caplog.records if record.exc_info]
    assert 1 <= len(with_traceback) < 10
    recovers(rig, producer, consumer)


def test_a_handshake_with_an_internal_error_is_a_failed_handshake(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = rig.pair()

    def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError("unheard of")

    with monkeypatch.context() as patched:
        patched.setattr(
            "kvferry.worker.peers.first_contact.SideChannelClient.describe", broken
        )
        load = consumer.load(producer.prefill(tokens=3).params)
        assert rig.until_over(consumer, load) is FailureReason.HANDSHAKE
    assert "ZeroDivisionError" in caplog.text
    recovers(rig, producer, consumer)


def test_an_engine_starts_and_loads_although_its_own_plan_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    producer = rig.engine("P")
    monkeypatch.setattr(
        "kvferry.worker.fabric.errors.internal_errors._quiet_until_s", 0.0
    )
    with monkeypatch.context() as failing:
        failing.setattr(PlanCache, "plan", fail)
        consumer = rig.engine("C")
    assert "a first contact could not be prepared" in caplog.text
    rig.transfer(producer, consumer, tokens=23, seed=3)
