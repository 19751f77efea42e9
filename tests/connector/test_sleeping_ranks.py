"""A sleep of an engine of two workers, each in a process of its own: both withdraw their caches, or neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.connector.sleeping_rank import NO_PAGES, RANKS, REFUSAL, Told, run
from tests.harness.children import Child
from tests.promises import promise

pytestmark = pytest.mark.slow


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Child]]:
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    children = [Child(run, rank, rendezvous) for rank in range(RANKS)]
    try:
        for child in children:
            assert not child.receive().error
        yield children
        assert [child.end() for child in children] == [0] * RANKS
    finally:
        for child in children:
            child.kill()


def tell(ranks: Sequence[Child], *commands: str) -> list[Told]:
    """Give each rank its command, all at once, as vLLM's executor does."""
    for rank, command in zip(ranks, commands, strict=True):
        rank.send(command)
    return [rank.receive() for rank in ranks]


@promise(2)
def test_both_workers_withdraw_or_neither_does(ranks: list[Child]) -> None:
    first, second = tell(ranks, "sleep", "sleep_amid_a_read")
    # The one that could is told by the other: vLLM keeps the pages of both.
    assert first.error == f"SiblingFailed: worker 1: WithdrawalRefused: {REFUSAL}"
    assert second.error == f"WithdrawalRefused: {REFUSAL}"
    assert [rank.state for rank in (first, second)] == ["registered"] * RANKS

    asleep = tell(ranks, "sleep", "sleep")
    assert [(rank.error, rank.state) for rank in asleep] == [("", "withdrawn")] * RANKS
    awake = tell(ranks, "wake_up", "wake_up")
    assert [(rank.error, rank.state) for rank in awake] == [("", "registered")] * RANKS
    assert [rank.generation for rank in awake] == [1] * RANKS
    # Four agents: nothing of a former generation is described to peers.
    assert len({rank.agent for rank in (*asleep, *awake)}) == 2 * RANKS

    # A wake-up that fails on one worker is repeated; the other is registered already.
    tell(ranks, "sleep", "sleep")
    first, second = tell(ranks, "wake_up", "wake_up_in_vain")
    assert first.error.startswith("SiblingFailed: worker 1: FabricUnavailable: ")
    assert NO_PAGES in second.error
    assert [rank.state for rank in (first, second)] == ["registered", "withdrawn"]
    # Also after another sleep, of an engine that is half awake.
    asleep = tell(ranks, "sleep", "sleep")
    assert [(rank.error, rank.state) for rank in asleep] == [("", "withdrawn")] * RANKS
    tell(ranks, "wake_up", "wake_up_in_vain")
    awake = tell(ranks, "wake_up", "wake_up")
    assert [(rank.error, rank.state) for rank in awake] == [("", "registered")] * RANKS
