"""The pace of a worker: how often its thread polls, when a load is reported, and how long runs of reads are."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from kvferry.protocol.slots import (
    SlotState,
)
from kvferry.worker import transfer_thread
from kvferry.worker.fabric.port import PeerAgent, Transfer, TransferState
from kvferry.worker.loads.results import StepResults
from kvferry.worker.loads.state import LoadState
from kvferry.worker.transfer_thread import PollPace
from kvferry.worker.worker import FerryWorker
from tests.harness.engine import Engine, Offer, OrderedLoad
from tests.harness.inside import wait_for_link
from tests.harness.integrity import snapshot_of
from tests.harness.rig import Rig, rig_of
from tests.waiting import wait_until
from tests.worker.engines.test_staging import (
    HEADS_OUTER,
    STAGED,
    TOKENS_OUTER,
    staged_pair,
)

WINDOW_S = 0.4


class InOrder:
    """Gives out the lowest free blocks, one after the other."""

    def shuffle(self, free: list[int]) -> None:
        free.sort(reverse=True)


def test_blocks_that_follow_one_another_on_both_sides_are_read_in_long_runs() -> None:
    """20 blocks in each of 3 layers."""
    with rig_of("nixl") as rig:
        producer, consumer = rig.pair()
        rig.transfer(producer, consumer)
        rig.transfer(producer, consumer, tokens=80)
        producer.draw = consumer.draw = InOrder()  # type: ignore[assignment]
        rig.transfer(producer, consumer, tokens=80)
        scattered, merged = consumer.seen.totals[-2:]
    assert scattered.planned_descriptors == merged.planned_descriptors == 60
    assert scattered.descriptors > 30
    assert merged.descriptors == 3


def test_a_load_is_reported_before_its_producer_is_notified(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    notify = consumer.fabric.notify
    reported_before: list[set[str]] = []

    def noted(peer: PeerAgent, message: bytes) -> None:
        reported_before.append(consumer.worker.take_results().loaded)
        notify(peer, message)

    consumer.fabric.notify = noted  # type: ignore[method-assign]
    load = consumer.load(producer.prefill(tokens=10).params)
    wait_until(lambda: reported_before, "the producer is notified")
    assert reported_before == [{load.request_id}]


def test_while_nothing_comes_a_producer_looks_for_notifications_less_and_less_often(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: list[float] = []
    took_expected = PollPace.took_expected

    def noted(now: PollPace, *, has_arrived: bool) -> None:
        took_expected(now, has_arrived=has_arrived)
        if not has_arrived:
            pauses_s.append(now.notification_backoff_s)

    monkeypatch.setattr(PollPace, "took_expected", noted)
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = producer.prefill(tokens=10)
    wait_until(
        lambda: pauses_s[-1:] == [transfer_thread.MAX_NOTIFICATION_BACKOFF_S],
        "it has backed off",
    )
    before = producer.fabric.calls["take_notifications"]
    begun_s = time.monotonic()
    time.sleep(WINDOW_S)
    looks = producer.fabric.calls["take_notifications"] - before
    # A busy machine sleeps longer than it is told. Each end of the window has a look that may fall on either side, and
    # a wait for 20 ms may end up to a millisecond early.
    assert looks <= (time.monotonic() - begun_s) / 19e-3 + 2
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is None
    rig.step_until(
        lambda: offer.request_id in producer.seen.sent, "what comes is taken"
    )


POLLS = 3
"""Polls that find a read in flight, as over TCP or RDMA, where a post returns at once."""


@pytest.fixture
def polling_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest backoff would grow with it."""
    monkeypatch.setattr(transfer_thread, "_POLLING_SHARE", 0)


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
    wait_until(
        lambda: producer.word(offer) & 0xF == SlotState.READY, "the blocks may be read"
    )
    return offer


class NotedPace(PollPace):
    """The pace of a worker's transfer thread, which notes its turns from `begin` on, while loads are in hand.

    Attributes:
        backoff_us: after each turn, what it would pause for.
        vain: of those without progress, the same and what it took to look at all loads, in µs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backoff_us: list[int] = []
        self.vain: list[tuple[int, float]] = []
        self._worker: FerryWorker | None = None

    def begin(self, worker: FerryWorker) -> None:
        """Begin once nothing else is due."""
        wait_until(lambda: snapshot_of(worker).is_idle, "nothing else is due")
        # The last action of a handshake is to wake the transfer thread, which may have taken its result before.
        wait_for_link(worker)
        self._worker = worker

    def polled(self, round_s: float, *, has_progressed: bool) -> None:
        super().polled(round_s, has_progressed=has_progressed)
        if self._note() and not has_progressed:
            self.vain.append((self.backoff_us[-1], round_s * 1e6))

    def _note(self) -> bool:
        in_hand = (LoadState.WAITING, LoadState.RUNNING, LoadState.RESUMED)
        if self._worker is None or not self._worker.count_loads(*in_hand):
            return False
        self.backoff_us.append(round(self.backoff_s * 1e6))
        return True


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> list[NotedPace]:
    """Of the engines, in the order in which they are made."""
    made: list[NotedPace] = []

    def make() -> NotedPace:
        made.append(NotedPace())
        return made[-1]

    monkeypatch.setattr("kvferry.worker.transfer_thread.PollPace", make)
    return made


def _finish(rig: Rig, consumer: Engine, load: OrderedLoad, seed: int) -> None:
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed)


@pytest.mark.usefixtures("polling_takes_no_time")
def test_each_stage_of_a_load_begins_with_the_shortest_backoff(
    rig: Rig, paces: list[NotedPace]
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = _ready_prefill(producer)
    _asynchronous(consumer)
    paces[1].begin(consumer.worker)
    backoff_us = paces[1].backoff_us
    _finish(rig, consumer, consumer.load(offer.params), seed=2)
    assert backoff_us == 3 * [50, 100, 200], "the fence, the data, the fence again"


@pytest.mark.usefixtures("polling_takes_no_time")
def test_each_wave_of_a_staged_load_resets_the_backoff(
    rig: Rig, paces: list[NotedPace]
) -> None:
    producer, consumer = staged_pair(rig, HEADS_OUTER, TOKENS_OUTER, STAGED)
    rig.transfer(producer, consumer)
    offer = _ready_prefill(producer, tokens=64)
    _asynchronous(consumer)
    paces[1].begin(consumer.worker)
    backoff_us = paces[1].backoff_us
    _finish(rig, consumer, consumer.load(offer.params), seed=2)
    assert consumer.seen.totals[-1].waves > 4
    assert max(backoff_us) <= 200
    assert backoff_us.count(50) >= consumer.seen.totals[-1].waves / 2


@pytest.mark.usefixtures("polling_takes_no_time")
def test_a_load_that_merely_polls_is_polled_less_and_less_often(
    rig: Rig, paces: list[NotedPace]
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = _ready_prefill(producer)
    paces[1].begin(consumer.worker)
    backoff_us = paces[1].backoff_us
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    load = consumer.load(offer.params)
    wait_until(lambda: len(backoff_us) > 20, "it is polled again and again")
    rig.network.thaw(producer.fabric.agent_name)
    _finish(rig, consumer, load, seed=2)
    assert backoff_us[:20] == [50, 100, 200, 400, 800] + 15 * [1000]


def test_the_longer_it_takes_to_look_at_all_loads_the_less_often_that_is_done(
    rig: Rig, paces: list[NotedPace]
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = _ready_prefill(producer)
    paces[1].begin(consumer.worker)
    rig.network.freeze(producer.fabric.agent_name)
    poll = consumer.fabric.poll

    def slowly(transfer: Transfer) -> TransferState:
        time.sleep(2e-3)
        return poll(transfer)

    consumer.fabric.poll = slowly  # type: ignore[method-assign]
    load = consumer.load(offer.params)
    wait_until(lambda: len(paces[1].vain) > 20, "it is polled again and again")
    rig.network.thaw(producer.fabric.agent_name)
    _finish(rig, consumer, load, seed=2)
    assert max(backoff_us for backoff_us, _ in paces[1].vain) >= 3 * 2_000
    for backoff_us, round_us in paces[1].vain:
        assert backoff_us <= max(1_000, 3 * round_us + 1)


LONG_S = 30.0


def test_a_step_waits_for_a_load_that_is_under_way_and_for_nothing_else(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    may_go_on = threading.Event()
    consumer.fabric.on_data_read = lambda: wait_until(
        may_go_on.is_set, "the step waits", LONG_S
    )
    load, taken = consumer.load(producer.prefill(10, 2).params), list[StepResults]()
    step = threading.Thread(
        target=lambda: taken.append(consumer.worker.take_results(LONG_S))
    )
    step.start()
    producer.step()  # by which the lease is ready
    may_go_on.set()
    step.join(LONG_S)
    assert [results.loaded for results in taken] == [{load.request_id}]
    started_s = time.monotonic()
    consumer.worker.take_results(LONG_S)
    producer.worker.take_results(LONG_S)
    assert time.monotonic() - started_s < LONG_S / 2
