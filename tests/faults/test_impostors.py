"""A producer has died, and another process listens at its address."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import pytest

from tests.faults.checks import (
    check_survivor,
    transfer,
    until_idle,
    until_over,
    warmed_up,
)
from tests.faults.impostors import GARBAGE, HTTP, HUGE_FRAME, tcp_impostor, zmq_impostor
from tests.harness.child import Start
from tests.harness.process import SLACK_S, Fleet
from tests.ports import free_port
from tests.promises import promise

HANDSHAKE_S = 2.0
Listen = Callable[[int], AbstractContextManager[None]]


def tcp(says: bytes) -> Listen:
    return lambda port: tcp_impostor(port, says)


def answers(*frames: bytes) -> Listen:
    return lambda port: zmq_impostor(port, *frames)


IMPOSTORS: dict[str, tuple[Listen, str]] = {
    "one that accepts and says nothing": (tcp(b""), "handshake"),
    "one that says garbage": (tcp(GARBAGE), "handshake"),
    "an HTTP server": (tcp(HTTP), "handshake"),
    "one that begins an endless frame": (tcp(HUGE_FRAME), "handshake"),
    "a ZMQ server that answers garbage": (answers(GARBAGE), "refused"),
    "a ZMQ server that answers nothing": (answers(b""), "refused"),
    "a ZMQ server of another protocol": (
        answers(msgspec.msgpack.encode({"type": "ok"})),
        "refused",
    ),
}


@promise(6)
def test_an_impostor_at_a_dead_producers_port_fails_that_load_and_no_later_one(
    fleet: Fleet,
) -> None:
    start = Start(name="P", port=free_port())
    consumer = fleet.engine("C", handshake_timeout_s=HANDSHAKE_S)
    (producer,) = fleet.start(start)
    before = warmed_up(producer, consumer)
    for name, (listen, expected) in IMPOSTORS.items():
        producer.kill()
        (unmet,) = fleet.start(start)
        params = unmet.prefill(13, 5)
        unmet.kill()
        with listen(start.port):
            began_s = time.monotonic()
            assert (
                until_over(consumer, consumer.load(params, 5), HANDSHAKE_S + SLACK_S)
                == expected
            ), name
            assert time.monotonic() - began_s < HANDSHAKE_S + SLACK_S
        (producer,) = fleet.start(start)
        transfer(producer, consumer)
    check_survivor(consumer, before)


@promise(1)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_another_engine_at_a_dead_producers_port_is_recognised(
    fleet: Fleet, known: bool
) -> None:
    """It neither answers for the dead one nor loses a lease to what is said to the dead one."""
    port = free_port()
    consumer, dead = fleet.start(
        Start(name="C", port=free_port()), Start(name="P", port=port)
    )
    if known:
        transfer(dead, consumer)
    params = dead.prefill(13, 5)
    dead.kill()
    other = fleet.engine("Q", port)
    held = other.prefill(13, 6)
    reason = until_over(consumer, consumer.load(params, 5), SLACK_S + SLACK_S)
    assert reason == ("transfer" if known else "refused")
    until_idle(consumer, SLACK_S)  # the release of the dead one's lease has been sent
    assert other.state().in_hand["leases"] == 1
    assert until_over(consumer, consumer.load(held, 6), SLACK_S) is None
    until_idle(other, SLACK_S)
    until_idle(consumer, SLACK_S)
