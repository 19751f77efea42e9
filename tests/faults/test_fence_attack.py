"""The fence, attacked: leases of 50 ms, 24 blocks, and a consumer that is held up for as long as it takes until the
leases have run out and other prompts have its blocks; or the prompts are still computed, and are preempted or aborted.
NIXL is the real one. Changed bytes are found by a checksum of the blocks; every load in which they did must be reported
failed, and no other may be reported good, but for those that read a preempted prompt again after that.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest

from kvferry.scheduler.producer.ledger import PublishedStreams
from kvferry.worker.loads.load import LeaseFence
from tests.faults.fence_attack import (
    PLACINGS,
    PROMPTS,
    Attack,
    Counts,
    StreamAttack,
    consumer_of,
    producer_of,
    streaming_producer,
)
from tests.promises import promise

CHANGED_LOADS = 200
HOLDS = {
    "direct": {
        "before the data": (0.0, False),
        "in the middle of it": (0.5, False),
        "after it": (1.0, False),
    },
    "mapped": {
        "before the data": (0.0, False),
        "in the middle of it": (0.5, False),
        "after it": (1.0, False),
    },
    "staged": {
        "before the data": (0.0, False),
        "in the middle of a wave": (0.5, False),
        "between waves": (0.0, True),
        "after a wave": (1.0, True),
    },
}


def attack(placing: str, changed_loads: int) -> Counts:
    """Hold loads up in all ways in turn until so many have got other bytes than they were promised."""
    with (
        contextlib.closing(producer_of()) as producer,
        consumer_of(placing) as consumer,
    ):
        attacked = Attack(producer, consumer)
        for at_once, waves_first in itertools.cycle(HOLDS[placing].values()):
            attacked.round(at_once, waves_first)
            if attacked.counts.changed >= changed_loads:
                return attacked.counts
        raise AssertionError("unreachable")


def attack_streams(placing: str, changed_loads: int, *, aborted: bool) -> Counts:
    """The same for prompts that are computed meanwhile."""
    with (
        contextlib.closing(streaming_producer()) as producer,
        consumer_of(placing) as consumer,
    ):
        attacked = StreamAttack(producer, consumer)
        for at_once in itertools.cycle((0.0, 0.5, 1.0)):
            attacked.round(at_once, aborted=aborted)
            if attacked.counts.changed >= changed_loads:
                return attacked.counts
        raise AssertionError("unreachable")


@promise(1)
@pytest.mark.parametrize("placing", PLACINGS)
def test_no_load_whose_bytes_changed_is_ever_reported_good(placing: str) -> None:
    counts = attack(placing, CHANGED_LOADS)
    print(f"{placing}: {counts}")
    assert counts.changed >= CHANGED_LOADS
    assert counts.detected == counts.changed
    assert counts.believed == counts.good == 0, (
        "every lease had ended before its load went on"
    )
    assert counts.detected + counts.cautious == counts.loads


@pytest.mark.parametrize("placing", PLACINGS)
def test_with_half_a_fence_the_same_attack_shows_wrong_bytes(
    placing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above is able to fail."""
    monkeypatch.setattr(LeaseFence, "check_after", lambda _fence, _peer: iter(()))
    counts = attack(placing, 2 * PROMPTS)
    print(f"{placing}, with half a fence: {counts}")
    assert counts.believed == counts.changed >= 2 * PROMPTS


@promise(1, 2)
@pytest.mark.parametrize("placing", PLACINGS)
def test_no_load_of_a_prompt_that_was_aborted_while_it_was_read_is_ever_reported_good(
    placing: str,
) -> None:
    counts = attack_streams(placing, CHANGED_LOADS, aborted=True)
    print(f"{placing}: {counts}")
    assert counts.detected == counts.changed >= CHANGED_LOADS
    assert counts.believed == counts.good == 0
    assert counts.detected + counts.cautious == counts.loads


@promise(1)
@pytest.mark.parametrize("placing", PLACINGS)
def test_every_load_of_a_prompt_that_was_preempted_while_it_was_read_ends_with_the_right_bytes(
    placing: str,
) -> None:
    counts = attack_streams(placing, CHANGED_LOADS, aborted=False)
    print(f"{placing}: {counts}")
    assert counts.believed == 0
    assert counts.followed == counts.changed >= CHANGED_LOADS
    assert counts.followed + counts.good == counts.loads


@pytest.mark.parametrize("placing", PLACINGS)
def test_under_one_epoch_the_same_preemptions_show_wrong_bytes(
    placing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublishedStreams, "restart", lambda *_: None)
    counts = attack_streams(placing, 2 * PROMPTS, aborted=False)
    print(f"{placing}, under one epoch: {counts}")
    assert counts.believed == counts.changed >= 2 * PROMPTS
