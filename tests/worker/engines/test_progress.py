"""What counts as a load's progress, and what does not: a load that progresses is not failed, one that does not is."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import EMPTY, SlotState, epoch_from_text, slot_word
from kvferry.worker.loads import state as load_state
from tests.harness.cache_engine import HOST, SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.exported import slots_of
from tests.harness.integrity import standing_still
from tests.harness.rig import Rig
from tests.harness.slow_link import SlowLink
from tests.promises import promise
from tests.waiting import wait_until

TIMEOUT_S = 0.6
READ_S = 0.25
"""Three reads one after the other take longer than the deadline; one does not, also on a busy machine."""
STAGED = replace(SETTINGS, staging_pool_bytes=8 << 10, direct_min_bytes=1 << 20)


def staged_consumer(rig: Rig, *producers: str) -> tuple[Engine, list[Engine]]:
    made = [
        rig.engine(name, shape=CacheShape(axes="bht", blocks=240), settings=STAGED)
        for name in producers
    ]
    consumer = rig.engine(
        "C", shape=CacheShape(axes="bth", blocks=240), settings=STAGED
    )
    for producer in made:
        rig.transfer(producer, consumer)
    return consumer, made


def all_good(rig: Rig, consumer: Engine, loads: list[OrderedLoad]) -> None:
    for number, load in enumerate(loads):
        assert rig.until_over(consumer, load) is None
        assert consumer.has_bytes(load, seed=number + 1)


def test_a_staged_load_whose_waves_end_in_time_is_good_however_many_they_are(
    rig: Rig,
) -> None:
    consumer, (producer,) = staged_consumer(rig, "P")
    offer = producer.prefill(tokens=150, seed=1)
    link = SlowLink(consumer.fabric, READ_S)
    consumer.set_timeouts(load_s=TIMEOUT_S)
    began_s = time.monotonic()
    all_good(rig, consumer, [consumer.load(offer.params)])
    assert link.ended > 3
    assert time.monotonic() - began_s > TIMEOUT_S


@pytest.mark.parametrize("max_loads", [64, 1], ids=["at once", "in turn"])
def test_loads_that_share_a_slow_link_progress_while_the_ones_before_them_end(
    rig: Rig, max_loads: int
) -> None:
    """Each is one read; the link serves them one after the other."""
    producer, consumer = rig.pair(settings=replace(SETTINGS, max_loads=max_loads))
    rig.transfer(producer, consumer)
    offers = [producer.prefill(tokens=10, seed=n + 1) for n in range(5)]
    SlowLink(consumer.fabric, READ_S)
    consumer.set_timeouts(load_s=TIMEOUT_S)
    all_good(rig, consumer, [consumer.load(offer.params) for offer in offers])


def test_a_read_that_is_lost_fails_its_load_although_later_reads_of_that_peer_end(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    link = SlowLink(consumer.fabric, 0.0, loses=lambda _: link.ended == 0)
    lost = consumer.load(producer.prefill(tokens=10).params)
    wait_until(consumer.fabric.reading, "it reads")
    wait_until(lambda: bool(link.ends_s), "it is lost")
    link.loses = lambda _: False
    consumer.set_timeouts(load_s=TIMEOUT_S)
    began_s = time.monotonic()
    while not consumer.seen.is_over(lost.request_id):
        rig.transfer(producer, consumer, tokens=5)
        assert time.monotonic() < began_s + 10 * TIMEOUT_S
    assert consumer.seen.failed == {lost.request_id: FailureReason.DEADLINE}
    assert link.ended > 2
    link.mend()


def test_no_progress_holds_a_load_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All waves end in time, but there are too many of them."""
    monkeypatch.setattr(load_state, "LONGEST", 2)
    consumer, (producer,) = staged_consumer(rig, "P")
    offer = producer.prefill(tokens=300, seed=1)
    link = SlowLink(consumer.fabric, READ_S)
    consumer.set_timeouts(load_s=TIMEOUT_S)
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is FailureReason.DEADLINE
    assert link.ended > 2
    link.mend()


def test_a_handshake_has_its_own_deadline_and_not_that_of_its_load(rig: Rig) -> None:
    with socket.create_server((HOST, 0)) as silent:
        producer, consumer = rig.pair(
            settings=replace(SETTINGS, handshake_timeout_s=1.0)
        )
        consumer.set_timeouts(load_s=0.1, handshake_s=1.0)
        params = producer.changed(
            producer.prefill(10), remote_port=silent.getsockname()[1]
        )
        load = consumer.load(params)
        assert rig.until_over(consumer, load) is FailureReason.HANDSHAKE


def test_a_read_that_ends_while_the_consumer_stands_still_counts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer thread finds its deadline over and the read ended, at once."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    consumer.fabric.stuck = True
    load = consumer.load(producer.prefill(tokens=10, seed=1).params)
    wait_until(consumer.fabric.reading, "it reads")
    post = consumer.fabric.post_read

    def with_time(*args: Any) -> Any:
        consumer.set_timeouts()  # only the read that was under way is late
        return post(*args)

    with standing_still(consumer.worker):
        consumer.set_timeouts(load_s=0.05)
        ends_s = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > ends_s, "the deadline is over")
        consumer.fabric.stuck = False
        monkeypatch.setattr(consumer.fabric, "post_read", with_time)
    all_good(rig, consumer, [load])


def test_a_slot_that_opens_while_the_consumer_stands_still_is_found_open(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a look that began when the time was over shows that it did not open in time."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = producer.prefill(tokens=5, seed=1)
    word = slot_word(epoch_from_text(offer.params.kvferry.lease_epoch), SlotState.READY)
    wait_until(lambda: producer.word(offer) == word, "it is ready")
    words = slots_of(producer.worker).words
    words[offer.slot] = EMPTY
    post, posts = consumer.fabric.post_read, 0

    def then_stand_still(*args: Any) -> Any:
        nonlocal posts
        transfer, posts = post(*args), posts + 1
        if posts == 1:
            over_s = time.monotonic() + 0.3
            wait_until(lambda: time.monotonic() > over_s, "the time is over")
            words[offer.slot] = word
        return transfer

    monkeypatch.setattr(consumer.fabric, "post_read", then_stand_still)
    load = consumer.load(producer.changed(offer, ticket={"opens_within_s": 0.2}))
    all_good(rig, consumer, [load])


@promise(6)
def test_producers_that_stand_still_keep_no_third_one_from_the_staging_pool(
    rig: Rig,
) -> None:
    """Before, two of them had half of it each."""
    consumer, (first, second, third) = staged_consumer(rig, "P", "Q", "R")
    still = {producer.fabric.agent_name for producer in (first, second)}
    link = SlowLink(consumer.fabric, 0.0, loses=lambda read: read.peer in still)
    late = [
        consumer.load(producer.prefill(tokens=60).params)
        for producer in (first, second)
        for _ in range(4)
    ]
    consumer.set_timeouts(load_s=TIMEOUT_S)
    for load in late:
        assert rig.until_over(consumer, load) in (
            FailureReason.DEADLINE,
            FailureReason.STAGING,
        )
    consumer.set_timeouts()
    assert consumer.pool.snapshot().quarantined_bytes >= consumer.pool.capacity // 2
    began_s = time.monotonic()
    rig.transfer(third, consumer, tokens=60, seed=8)
    assert time.monotonic() - began_s < SETTINGS.load_timeout_s / 2
    link.mend()
    rig.step_until(lambda: not consumer.seen.alive, "the reads have ended")
    assert consumer.pool.free_bytes == consumer.pool.capacity


def test_what_cannot_fit_beside_quarantined_waves_fails_soon_and_by_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.worker.loads.runner._NO_ROOM_S", 0.2)
    consumer, (producer,) = staged_consumer(rig, "P")
    pool, waves = consumer.pool, []
    for number in range(60):
        wave = pool.try_take(
            f"load-{number}", f"peer-{number}", pool.largest_wave, at_least=256
        )
        if wave is not None:
            pool.quarantine(wave)
            waves.append(wave)
        pool.withdraw(f"load-{number}")
    load = consumer.load(producer.prefill(tokens=40, seed=1).params)
    assert rig.until_over(consumer, load) is FailureReason.STAGING
    assert not consumer.seen.alive
    assert not pool.waiting
    for wave in waves:
        pool.give_back(wave)
    consumer.free(load)
    rig.transfer(producer, consumer)
