"""The fence, attacked: leases of 50 ms, 24 blocks, and a consumer that is held up for as long as it takes until the
leases have run out and other prompts have its blocks. NIXL is the real one. Changed bytes are found by a checksum
of the blocks; every load in which they did must be reported failed, and no other may be reported good.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest

from kvferry.worker.loads.load import Load
from tests.faults.fence_attack import (
    PLACINGS,
    PROMPTS,
    Attack,
    Counts,
    consumer_of,
    producer_of,
)

CHANGED_LOADS = 200
HOLDS = {
    "direct": {"before the data": (0.0, False), "in the middle of it": (0.5, False), "after it": (1.0, False)},
    "staged": {
        "before the data": (0.0, False),
        "in the middle of a wave": (0.5, False),
        "between waves": (0.0, True),
        "after a wave": (1.0, True),
    },
}


def attack(placing: str, changed_loads: int) -> Counts:
    """Hold loads up in all ways in turn until so many have got other bytes than they were promised."""
    with contextlib.closing(producer_of()) as producer, consumer_of(placing) as consumer:
        attacked = Attack(producer, consumer)
        for at_once, waves_first in itertools.cycle(HOLDS[placing].values()):
            attacked.round(at_once, waves_first)
            if attacked.counts.changed >= changed_loads:
                return attacked.counts
        raise AssertionError("unreachable")


@pytest.mark.parametrize("placing", PLACINGS)
def test_no_load_whose_bytes_changed_is_ever_reported_good(placing: str) -> None:
    counts = attack(placing, CHANGED_LOADS)
    print(f"{placing}: {counts}")
    assert counts.changed >= CHANGED_LOADS
    assert counts.detected == counts.changed
    assert counts.believed == counts.good == 0, "every lease had ended before its load went on"
    assert counts.detected + counts.cautious == counts.loads


@pytest.mark.parametrize("placing", PLACINGS)
def test_with_half_a_fence_the_same_attack_shows_wrong_bytes(placing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above is able to fail."""
    monkeypatch.setattr(Load, "_check_fence", lambda _load, _peer: iter(()))
    counts = attack(placing, 2 * PROMPTS)
    print(f"{placing}, with half a fence: {counts}")
    assert counts.believed == counts.changed >= 2 * PROMPTS
