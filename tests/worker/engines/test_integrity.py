"""The integrity check of the tests' workers: whatever is taken and has no owner is found, with all sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.exported import slots_of
from tests.harness.inside import memory_of, thread_of
from tests.harness.integrity import check_every_turn, check_worker
from tests.harness.rig import Rig
from tests.waiting import wait_until


def _steal_an_entry(engine: Engine) -> Callable[[], object]:
    entries = memory_of(engine.worker).slot_reads.try_take(1)
    assert entries is not None
    return lambda: memory_of(engine.worker).slot_reads.give_back(entries)


def _free_an_entry_twice(engine: Engine) -> Callable[[], object]:
    slot_reads = memory_of(engine.worker).slot_reads
    slot_reads.give_back((3,))
    return lambda: slot_reads.try_take(1)


def _steal_a_wave(engine: Engine) -> Callable[[], object]:
    wave = engine.pool.try_take("no load", "peer", 256)
    assert wave is not None
    return lambda: engine.pool.give_back(wave)


def _prepare_a_list(engine: Engine) -> Callable[[], object]:
    slot_reads = memory_of(engine.worker).slot_reads
    row = (int(slot_reads.words.ctypes.data), 8, 0, 8, 1)
    made = engine.fabric.inner.prepare_local(
        DescriptorRows.from_tuples(MemoryKind.DRAM, [row])
    )
    return lambda: engine.fabric.inner.release(made)


def _post_a_read(engine: Engine) -> Callable[[], object]:
    registry = thread_of(engine.worker).registry
    (peer,) = registry.peers()
    zero = np.zeros(1, dtype=np.int32)
    into = memory_of(engine.worker).slot_reads.descriptors
    slots = peer.routes[0].slots.descriptors
    made = engine.fabric.inner.post_read(into, zero, slots, zero)
    return lambda: engine.fabric.inner.release(made)


def _write_a_word(engine: Engine) -> Callable[[], object]:
    slots_of(engine.worker).words[7] = 99
    return lambda: slots_of(engine.worker).words.__setitem__(7, 0)


BREAKS = {
    "an entry without an owner": (
        _steal_an_entry,
        "4608 entries are not 4607 free + 0 taken",
    ),
    "an entry that is free twice": (
        _free_an_entry_twice,
        "4608 entries are not 4609 free + 0 taken",
    ),
    "a wave without an owner": (_steal_a_wave, "the pool gave out"),
    "a list without an owner": (_prepare_a_list, "prepared,"),
    "a transfer without an owner": (
        _post_a_read,
        "the fabric has 1 transfers, 0 are known",
    ),
    "a word without a lease": (
        _write_a_word,
        "1 words are not empty, and there are 0 leases",
    ),
}


@pytest.mark.parametrize(("wrong", "text"), BREAKS.values(), ids=BREAKS)
def test_what_does_not_add_up_is_found_with_all_the_sums(
    rig: Rig, wrong: Callable[[Engine], Callable[[], object]], text: str
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    check_worker(consumer.worker, idle=True)
    mend = wrong(consumer)
    with pytest.raises(LocalProtocolError) as error:
        check_worker(consumer.worker)
    assert text in str(error.value)
    for sums in (
        "loads: 0 waiting",
        "entries: 4608 =",
        "peers: 1 ready",
        "the fabric has OpenHandles(",
        "pool: ",
        "leases:",
    ):
        assert sums in str(error.value)
    mend()
    check_worker(consumer.worker, idle=True)


def test_a_load_under_way_adds_up_and_is_not_idle(rig: Rig) -> None:
    producer = rig.engine(
        "P",
        shape=CacheShape(axes="bht"),
        settings=replace(SETTINGS, direct_min_bytes=1 << 20),
    )
    consumer = rig.engine(
        "C",
        shape=CacheShape(axes="bth"),
        settings=replace(
            SETTINGS, direct_min_bytes=1 << 20, staging_pool_bytes=8 << 10
        ),
    )
    broken = check_every_turn(consumer.worker)
    rig.transfer(producer, consumer)
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    load = consumer.load(producer.prefill(tokens=30).params)
    wait_until(lambda: consumer.fabric.calls["post_data_read"] > 2, "it reads", 60.0)
    check_worker(consumer.worker)
    with pytest.raises(LocalProtocolError, match="1 loads run or are quarantined"):
        check_worker(consumer.worker, idle=True)
    rig.network.thaw(producer.fabric.agent_name)
    assert rig.until_over(consumer, load) is None
    assert broken == [], "in every turn they were right"


def test_an_error_that_is_gone_when_the_test_looks_is_found_all_the_same(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    broken = check_every_turn(consumer.worker)
    rig.transfer(producer, consumer)
    assert broken == []
    mend = _steal_an_entry(consumer)
    thread_of(consumer.worker).wake()
    wait_until(lambda: bool(broken), "a turn has found it", 60.0)
    mend()
    check_worker(consumer.worker)
    assert broken == ["4608 entries are not 4607 free + 0 taken"]
    rig.transfer(producer, consumer)  # it goes on


def test_a_thread_that_is_stuck_is_reported_as_stuck(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    go_on = [False]
    consumer.fabric.on_data_read = lambda: wait_until(
        lambda: go_on[0], "the test lets go", 60.0
    )
    load = consumer.load(producer.prefill(tokens=5).params)
    wait_until(
        lambda: consumer.fabric.calls["post_data_read"] == 2, "it is stuck", 60.0
    )
    monkeypatch.setattr("tests.harness.integrity.ANSWER_WITHIN_S", 0.05)
    with pytest.raises(LocalProtocolError, match="has not answered within"):
        check_worker(consumer.worker)
    go_on[0] = True
    assert rig.until_over(consumer, load) is None
