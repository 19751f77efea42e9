"""The fabric raises unexpected errors, from each call in turn: the thread lives, and later loads are good."""

from __future__ import annotations

import pytest

from kvferry.protocol.ids import EMPTY
from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.errors import PeerLost, TransferFailed
from tests.harness.engine import Engine
from tests.harness.rig import Rig
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ERRORS = {
    "a bug": lambda: RuntimeError("unheard of"),
    "a lost peer": lambda: PeerLost("test", "the test wanted it"),
    "a failed transfer": lambda: TransferFailed("test", "the test wanted it"),
}
AT_FIRST_CONTACT = ("add_peer", "prepare_local", "prepare_remote", "post_read", "poll", "telemetry", "release")
AFTERWARDS = ("post_read", "post_data_read", "poll", "telemetry")
ALWAYS = 10**9


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.peers.handshakes.FIRST_S", 0.01)
    monkeypatch.setattr("kvferry.worker.peers.handshakes.LONGEST_S", 0.02)


def recovers(rig: Rig, producer: Engine, consumer: Engine) -> None:
    """Without further faults everything comes back: blocks, entries, transfers, and the next load is good."""
    consumer.fabric.faults.clear()
    rig.step_until(lambda: not consumer.seen.alive, "the quarantine is over")
    rig.step_until(lambda: len(producer.leases) == 0, "the producer's blocks are free")
    wait_until(lambda: not consumer.worker._thread.registry.closing(), "the failed peer is closed")
    rig.step_until(lambda: _works(rig, producer, consumer), "a later load is good")
    assert consumer.all_entries_are_free()


def _works(rig: Rig, producer: Engine, consumer: Engine) -> bool:
    offer = producer.prefill(tokens=6, seed=9)
    load = consumer.load(offer.params)
    good = rig.until_over(consumer, load) is None
    if good:
        consumer.check_bytes(load, seed=9)
    rig.step_until(lambda: offer.request_id in producer.seen.sent, "the blocks are free")
    consumer.free(load)
    return good


@pytest.mark.parametrize("times", [1, ALWAYS])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", AT_FIRST_CONTACT)
def test_at_first_contact(rig: Rig, method: str, error: str, times: int) -> None:
    producer, consumer = rig.pair()
    consumer.fabric.fail(method, ERRORS[error], times)
    load = consumer.load(producer.prefill(tokens=10).params)
    reason = rig.until_over(consumer, load)
    if method == "release":
        assert reason is None, "a handle that is not taken back is given back again later; the load does not fail"
    else:
        assert reason in (FailureReason.HANDSHAKE, FailureReason.TRANSFER)
    recovers(rig, producer, consumer)


@pytest.mark.parametrize("times", [1, ALWAYS])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", AFTERWARDS)
def test_at_a_peer_that_is_well_known(rig: Rig, method: str, error: str, times: int) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    consumer.fabric.fail(method, ERRORS[error], times)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    if (method, error, times) == ("poll", "a bug", ALWAYS):
        assert consumer.seen.alive == {load.request_id}, "it is unknown whether the read has ended"
    recovers(rig, producer, consumer)


@pytest.mark.parametrize("error", ["a lost peer", "a bug"])
def test_a_producer_that_cannot_be_notified_does_not_spoil_the_load(rig: Rig, error: str) -> None:
    producer, consumer = rig.pair(lease_s=0.3)
    rig.transfer(producer, consumer)
    consumer.fabric.fail("notify", ERRORS[error])
    offer = producer.prefill(tokens=10)
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is None
    rig.step_until(lambda: consumer.seen.counts["failed_notifications"] == 1, "it is counted")
    rig.step_until(lambda: offer.request_id in producer.seen.sent, "the lease runs out")


def test_a_fabric_without_notifications_stops_neither_the_ends_of_leases_nor_loads(rig: Rig) -> None:
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


def test_leases_become_ready_although_the_peer_registry_is_broken(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = rig.pair()
    rig.transfer(other, one)

    def broken(*_: object) -> bool:
        raise RuntimeError("unheard of")

    monkeypatch.setattr(one.worker._thread.registry, "step", broken)
    rig.transfer(one, other)
    rig.transfer(other, one)


def test_bugs_are_shown_as_bugs_and_do_not_flood_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    caplog.clear()
    consumer.fabric.fail("poll", ERRORS["a bug"], ALWAYS)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    polls = consumer.fabric.calls["poll"]
    rig.step_until(lambda: consumer.fabric.calls["poll"] > polls + 20, "it is asked for often")
    with_traceback = [record for record in caplog.records if record.exc_info]
    assert 1 <= len(with_traceback) < 10
    recovers(rig, producer, consumer)


def test_a_handshake_with_an_internal_error_is_a_failed_handshake(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = rig.pair()

    def broken(*_: object) -> object:
        raise ZeroDivisionError("unheard of")

    with monkeypatch.context() as patched:
        patched.setattr("kvferry.worker.peers.first_contact.SideChannelClient.fetch_description", broken)
        load = consumer.load(producer.prefill(tokens=3).params)
        assert rig.until_over(consumer, load) is FailureReason.HANDSHAKE
    assert "ZeroDivisionError" in caplog.text
    recovers(rig, producer, consumer)
