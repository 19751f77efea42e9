"""Unclaimed leases, and prompts that wait for their blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.scheduler.block_references import BlockReferences
from tests.engine_core.slow_router import HEARTBEAT_S, LEASE_S, PROMPT_TOKENS, REMOTE_DECODE
from tests.harness.core.scheduler import tokens


@pytest.mark.parametrize("fraction", [1.0, 0.5], ids=["for need", "for the cap"])
def test_a_router_that_never_comes_back_does_not_stop_prefills(make_slow: Any, fraction: float) -> None:
    """Eight prompts fill the cache. Left to their leases alone, 40 would take five of them: 300 s."""
    slow = make_slow(max_leased_fraction=fraction)
    slow.prefill(*(f"p{index}" for index in range(40)))
    started_s = slow.now_s
    while slow.answered() < 40:
        slow.step()
        assert slow.now_s < started_s + 5 * 2 * HEARTBEAT_S + 20, f"{slow.answered()} of 40 prompts"
    assert slow.engine.counted("leases_released", "evicted") >= 32
    assert slow.engine.counted("leases_released", "expired") == 0
    slow.step(round(LEASE_S) + 2)
    assert slow.engine.is_whole


def test_leases_alone_keep_no_more_than_their_share_for_longer_than_it_takes_to_know(make_slow: Any) -> None:
    slow = make_slow(max_leased_fraction=0.5)
    slow.prefill(*(f"p{index}" for index in range(8)))
    slow.step(round(2 * HEARTBEAT_S) + 12)
    assert slow.answered() == 8
    assert slow.held == {"p4", "p5", "p6", "p7"}, "16 blocks of 32, and the oldest went"


def test_without_want_and_below_the_cap_a_lease_lives_as_long_as_it_was_promised(make_slow: Any) -> None:
    slow = make_slow()
    slow.prefill("p0", "p1")
    slow.step(round(LEASE_S) - 2)
    assert slow.held == {"p0", "p1"}


def test_a_lease_that_a_running_request_shares_all_blocks_with_is_not_ended_in_vain(make_slow: Any) -> None:
    slow = make_slow(max_leased_fraction=1.0)
    shared = tokens(PROMPT_TOKENS, seed=5)
    slow.engine.add("shared", shared, REMOTE_DECODE, max_tokens=1)
    slow.step(2)
    runs = [*shared, *tokens(300, seed=6)]
    slow.engine.add("runs", runs, max_tokens=60)
    slow.step(4)
    slow.prefill("waits", length=300)
    slow.step(30)
    assert slow.held == {"shared"}
    assert slow.engine.status("runs") == "RUNNING"


@pytest.mark.parametrize(("fraction", "counts"), [(1.0, 0), (0.5, 1)], ids=["for need", "for the cap"])
def test_blocks_are_counted_one_by_one_only_beyond_the_cap_and_not_in_every_step(
    make_slow: Any, monkeypatch: pytest.MonkeyPatch, fraction: float, counts: int
) -> None:
    """It takes a while where leases keep tens of thousands."""
    counted: list[int] = []
    count = BlockReferences.num_leased

    def counting(references: BlockReferences) -> int:
        counted.append(len(references))
        return count(references)

    monkeypatch.setattr(BlockReferences, "num_leased", counting)
    monkeypatch.setattr("kvferry.connector.scheduler_side.lease_eviction._COUNT_S", 1.0)
    slow = make_slow(max_leased_fraction=fraction)
    slow.prefill(*(f"p{index}" for index in range(9)))
    slow.step(round(2 * HEARTBEAT_S) + 12)
    assert slow.answered() == 9
    assert slow.engine.counted("leases_released", "evicted") >= 1
    assert counts <= len(counted) <= 4 * counts, counted
