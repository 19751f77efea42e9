"""The transfer thread's pause is reset by any progress of a load, and grows while polls find none."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from kvferry.protocol.ids import SlotState
from kvferry.worker import transfer_thread
from kvferry.worker.fabric.port import Transfer, TransferState
from tests.harness.engine import Engine, Offer, OrderedLoad
from tests.harness.rig import Rig
from tests.waiting import wait_until
from tests.worker.engines.test_staging import HEADS_OUTER, STAGED, TOKENS_OUTER, staged_pair

POLLS = 3
"""Polls that find a read in flight, as over TCP or RDMA, where a post returns at once."""


@pytest.fixture(autouse=True)
def _looking_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_thread, "_LOOKING_SHARE", 0)  # the longest backoff would grow with it


def _asynchronous(consumer: Engine) -> None:
    """Make the reads of an engine take `POLLS` more polls from now on."""
    poll, polled = consumer.fabric.poll, Counter[Transfer]()

    def in_flight_first(transfer: Transfer) -> TransferState:
        polled[transfer] += 1
        return TransferState.IN_FLIGHT if polled[transfer] <= POLLS else poll(transfer)

    consumer.fabric.poll = in_flight_first  # type: ignore[method-assign]


def _ready_prefill(producer: Engine, tokens: int = 10) -> Offer:
    """An offer whose lease is READY: before that, a load reads the slot again and again, without progress."""
    offer = producer.prefill(tokens=tokens, seed=2)
    wait_until(lambda: producer.word(offer) & 0xF == SlotState.READY, "the blocks may be read")
    return offer


def _note_backoff(consumer: Engine) -> list[int]:
    """The backoff of loads from now on, in µs, one entry after every round of the thread."""
    thread = consumer.worker._thread
    wait_until(lambda: thread._is_idle() and not _is_connecting() and thread._inbox.empty(), "nothing else is due")
    step, backoff_us = thread._step, list[int]()

    def noted() -> None:
        step()
        if thread.runner.busy():
            backoff_us.append(round(thread._backoff_s * 1e6))

    thread._step = noted  # type: ignore[method-assign]
    return backoff_us


def _is_connecting() -> bool:
    """Whether a handshake's thread is alive. Its last action is to wake the transfer thread, which may have taken its
    result and ended the load before."""
    return any(thread.name == "kvferry-handshake" for thread in threading.enumerate())


def _load(rig: Rig, consumer: Engine, load: OrderedLoad, seed: int) -> None:
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed)


def test_each_stage_of_a_load_begins_with_the_shortest_backoff(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = _ready_prefill(producer)
    _asynchronous(consumer)
    backoff_us = _note_backoff(consumer)
    _load(rig, consumer, consumer.load(offer.params), seed=2)
    assert backoff_us == 3 * [50, 100, 200], "the fence, the data, the fence again"


def test_each_wave_of_a_staged_load_resets_the_backoff(rig: Rig) -> None:
    producer, consumer = staged_pair(rig, HEADS_OUTER, TOKENS_OUTER, STAGED)
    rig.transfer(producer, consumer)
    offer = _ready_prefill(producer, tokens=64)
    _asynchronous(consumer)
    backoff_us = _note_backoff(consumer)
    _load(rig, consumer, consumer.load(offer.params), seed=2)
    assert consumer.seen.totals[-1].waves > 4
    assert max(backoff_us) <= 200
    assert backoff_us.count(50) >= consumer.seen.totals[-1].waves / 2


@pytest.mark.parametrize("staged", [False, True])
def test_a_load_that_merely_polls_is_polled_less_and_less_often(rig: Rig, staged: bool) -> None:
    producer, consumer = staged_pair(rig, HEADS_OUTER, TOKENS_OUTER, STAGED) if staged else rig.pair()
    rig.transfer(producer, consumer)
    offer = _ready_prefill(producer)
    backoff_us = _note_backoff(consumer)
    consumer.fabric.on_data_read = lambda: rig.network.freeze(producer.fabric.agent_name)
    load = consumer.load(offer.params)
    wait_until(lambda: len(backoff_us) > 20, "it is polled again and again")
    rig.network.thaw(producer.fabric.agent_name)
    _load(rig, consumer, load, seed=2)
    assert backoff_us[:20] == [50, 100, 200, 400, 800] + 15 * [1000]


def test_asking_a_producer_again_that_still_computes_is_no_progress(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = producer.finish_prefill(producer.start_prefill(10, seed=2))
    backoff_us = _note_backoff(consumer)
    asked = consumer.fabric.calls["post_read"]
    load = consumer.load(offer.params)
    wait_until(lambda: consumer.fabric.calls["post_read"] >= asked + 5, "it has asked again")
    waiting_us = list(backoff_us)
    _load(rig, consumer, load, seed=2)
    assert waiting_us == ([50, 100, 200, 400, 800] + len(waiting_us) * [1000])[: len(waiting_us)]
