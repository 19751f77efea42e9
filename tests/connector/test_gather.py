"""Every worker of an engine learns of all of them, over vLLM's own process groups, each rank a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.connector.gather_rank import Axes, gathered_by_all


@pytest.mark.parametrize(
    "axes",
    [Axes(tp=2), Axes(pp=2), Axes(pp=2, tp=2), Axes(data=2, tp=2), Axes(pcp=2, tp=2), Axes(pp=2, pcp=2)],
    ids=lambda axes: f"{axes.data} engines, pp {axes.pp}, pcp {axes.pcp}, tp {axes.tp}",
)
def test_every_worker_learns_of_all_workers_of_its_own_engine_in_their_order(axes: Axes, tmp_path: Path) -> None:
    each = axes.ranks // axes.data
    for rank, (index, agents) in enumerate(gathered_by_all(axes, f"file://{tmp_path / 'rendezvous'}")):
        first = rank // each * each
        assert agents == [f"rank {first + n}" for n in range(each)]
        assert agents[index] == f"rank {rank}"


def test_a_lone_worker_asks_nobody(tmp_path: Path) -> None:
    assert gathered_by_all(Axes(), f"file://{tmp_path / 'rendezvous'}") == [(0, ["rank 0"])]


def test_a_worker_that_fails_keeps_nobody_waiting(tmp_path: Path) -> None:
    found = gathered_by_all(Axes(pp=2, tp=2, failing=1), f"file://{tmp_path / 'rendezvous'}")
    told = ["SiblingFailed: worker 1: ValueError: no caches"]
    assert [said for _, said in found] == [told, ["ValueError: no caches"], told, told]
