"""Sleeps amid handovers, as `bench.sleep` has them by the thousand. A read of pages that are away ends the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bench.sleep_soak import (
    HYBRID,
    HYBRID_MAPPED,
    HybridPair,
    ToyPair,
    soak,
)

from tests.geometry.handmade import hybrid, pair, side
from tests.promises import promise

MODEL = hybrid()
PAIR = pair(MODEL, side(MODEL, tp=2), side(MODEL, tp=1), tokens=45)
PAIRS: dict[str, Callable[[], ToyPair | HybridPair]] = {
    "nixl": lambda: ToyPair(1, mapped=False),
    "tcp": lambda: ToyPair(2, mapped=False),
    "mapped": lambda: ToyPair(3, mapped=True),
    "hybrid": lambda: HybridPair(PAIR, 4, HYBRID),
    "hybrid, mapped": lambda: HybridPair(PAIR, 5, HYBRID_MAPPED),
}


@promise(1)
@promise(2)
@pytest.mark.parametrize("kind", PAIRS)
def test_sleeps_under_load_leave_no_wrong_byte_and_nothing_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "tcp":
        # Reads by messages, which the agent of the memory's owner answers.
        monkeypatch.setenv("UCX_TLS", "tcp")
    seen = soak(PAIRS[kind], sleeps=4)
    assert seen.good, "loads succeed between the sleeps"
    assert not seen.wrong
    assert not +seen.left, seen.left
