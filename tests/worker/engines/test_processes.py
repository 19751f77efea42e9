"""Engines in processes of their own, over the real fabric and the real side channel; some of them are killed."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cache_engine import free_port
from tests.harness.child import Start
from tests.harness.process import TCP, EngineProcess, Fleet
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FAILED_WITHIN_S = 8.0  # the load's deadline is 5 s; the rest is for a busy machine


def start_of(name: str, port: int | None = None, **settings: Any) -> Start:
    """Of an engine that gives up soon."""
    port = free_port() if port is None else port
    return Start(name=name, port=port, blocks=256, handshake_timeout_s=1.0, load_timeout_s=5.0, **settings)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """The processes that a test starts, killed after it."""
    with contextlib.closing(Fleet()) as made:
        yield made


def _transfer(producer: EngineProcess, consumer: EngineProcess, seed: int) -> None:
    answer = consumer.answer(consumer.load(producer.prefill(13, seed), seed))
    assert answer["reason"] is None
    assert answer["good"]


@pytest.mark.parametrize("needs_help", [False, True], ids=["as NIXL comes", "tcp"])
def test_loads_survive_a_producer_that_is_killed_and_started_again(fleet: Fleet, needs_help: bool) -> None:
    environ = TCP if needs_help else {}
    seed = random.randrange(2**31)
    print(f"seed={seed}")
    draw = random.Random(seed)
    port = free_port()
    producer, consumer = fleet.start(start_of("P", port, environ=environ), start_of("C", environ=environ))

    # Random lengths, several at once, every byte compared.
    for _ in range(6):
        seeds = [draw.randrange(10**6) for _ in range(8)]
        loads = [consumer.load(producer.prefill(draw.randint(1, 60), each), each) for each in seeds]
        answers = [consumer.answer(load) for load in loads]
        assert [answer["reason"] for answer in answers] == [None] * 8
        assert all(answer["good"] for answer in answers)
    wait_until(lambda: producer.state().in_hand["leases"] == 0, "all blocks are free")

    # Killed during loads: it stands still first, so that they are under way where they need its help. The kernel reads
    # from a process that stands still as well, so there they are good, and must have their bytes.
    spare, *offers = [producer.prefill(60, each) for each in range(9)]
    producer.freeze()
    loads = [consumer.load(params, each) for each, params in enumerate(offers, 1)]
    consumer.state()  # the loads have been ordered
    producer.kill()
    began_s = time.monotonic()
    answers = [consumer.answer(load, FAILED_WITHIN_S) for load in loads]
    assert all(answer["good"] or answer["reason"] for answer in answers), "reported good without its bytes"
    if needs_help:
        assert {answer["reason"] for answer in answers} == {"transfer"}

    # Killed before a load: that one notices.
    answer = consumer.answer(consumer.load(spare, seed=0), FAILED_WITHIN_S)
    assert answer["reason"] in ("transfer", "handshake")
    wait_until(lambda: consumer.state().in_hand["alive"] == 0, "nothing may be written any more", FAILED_WITHIN_S)
    assert time.monotonic() - began_s < 2 * FAILED_WITHIN_S

    # Back at the same address with another boot.
    (again,) = fleet.start(start_of("P", port, environ=environ))
    _transfer(again, consumer, seed=3)
    wait_until(lambda: not consumer.state().in_hand, "nothing is left")


def test_a_consumer_that_is_killed_costs_the_producer_a_lease_and_no_more(fleet: Fleet) -> None:
    producer, consumer = fleet.start(start_of("P", lease_s=1.0), start_of("C"))
    _transfer(producer, consumer, seed=1)
    for each in range(5):
        consumer.load(producer.prefill(60, each), each)
    consumer.kill()
    began_s = time.monotonic()
    wait_until(lambda: producer.state().in_hand["leases"] == 0, "all blocks are free")
    assert time.monotonic() - began_s < FAILED_WITHIN_S
