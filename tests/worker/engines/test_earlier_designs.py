"""`TransferTopology.register_remote_engine`: here the peer registry knows other engines.

The rest of the earlier designs is answered by the plan: tests/plan/test_assignment.py.
"""

from __future__ import annotations

from kvferry.protocol.orders import FailureReason
from tests.harness.rig import Rig


def test_registering_a_remote_engine_again_changes_nothing(rig: Rig) -> None:
    """Many loads, one handshake, one plan, one set of prepared descriptors."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    known, prepared = set(consumer.fabric.peers), consumer.fabric.prepared()
    for seed in range(2, 5):
        rig.transfer(producer, consumer, seed=seed)
    assert producer.counters.total("handshakes_served") == 1
    assert consumer.fabric.calls["add_peer"] == 1
    assert (consumer.fabric.peers, consumer.fabric.prepared()) == (known, prepared)


def test_every_remote_engine_is_registered_by_itself(rig: Rig) -> None:
    producer, consumer = rig.pair()
    second = rig.engine("Q")
    rig.transfer(producer, consumer, seed=1)
    rig.transfer(second, consumer, seed=2)
    rig.transfer(producer, consumer, seed=3)
    assert [engine.counters.total("handshakes_served") for engine in (producer, second)] == [1, 1]
    assert len(consumer.fabric.peers) == 2


def test_an_engine_never_registers_itself(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10)
    load = consumer.load(producer.changed(offer, remote_engine_id="C", remote_port=consumer.port))
    assert rig.until_over(consumer, load) is FailureReason.HANDSHAKE
    assert consumer.counters.total("handshakes_served") == 0
    assert consumer.fabric.calls["add_peer"] == 0
