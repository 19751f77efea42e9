"""Every worker of an engine receives all descriptions, over vLLM's own process groups, with a process per rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.connector import messages
from kvferry.connector.messages import FerryHandshake, workers_of
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Place
from tests.connector.gather_rank import Axes, gathered_by_all
from tests.protocol.samples import make_worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "axes",
    [
        Axes(tp=2),
        Axes(pp=2),
        Axes(pp=2, tp=2),
        Axes(data=2, tp=2),
        Axes(pcp=2, tp=2),
        Axes(pp=2, pcp=2),
    ],
    ids=lambda axes: f"{axes.data} engines, pp {axes.pp}, pcp {axes.pcp}, tp {axes.tp}",
)
def test_every_worker_receives_all_descriptions_of_its_engine_in_order(
    axes: Axes, tmp_path: Path
) -> None:
    each = axes.ranks // axes.data
    for rank, found in enumerate(
        gathered_by_all(axes, f"file://{tmp_path / 'rendezvous'}")
    ):
        first = rank // each * each
        assert found.agents == [f"rank {first + n}" for n in range(each)]
        assert found.agents[found.index] == f"rank {rank}"


@pytest.mark.parametrize(
    "axes", [Axes(pcp=2, tp=2), Axes(pcp=2, dcp=2), Axes(tp=4, dcp=2)], ids=str
)
def test_a_scheduler_hears_of_every_worker_although_replicas_share_vllms_key(
    axes: Axes, tmp_path: Path
) -> None:
    ranks = gathered_by_all(axes, f"file://{tmp_path / 'rendezvous'}")
    kept = {rank.key: rank.handshake for rank in ranks}
    assert len(kept) == (axes.ranks if axes.dcp > 1 else axes.tp)
    assert [worker.agent for worker in workers_of(kept.values())] == [
        f"rank {n}" for n in range(axes.ranks)
    ]


@pytest.mark.parametrize(
    ("axes", "shares"),
    [
        (Axes(tp=4, dcp=2), [0, 1, 0, 1]),
        (Axes(tp=2, dcp=2), [0, 1]),
        (Axes(pcp=2, tp=2, dcp=4), [0, 2, 1, 3]),
    ],
    ids=str,
)
def test_a_workers_share_of_the_tokens_is_its_place_in_vllms_own_group(
    axes: Axes, shares: list[int], tmp_path: Path
) -> None:
    """Which runs over the replicas of prefill context parallelism first."""
    ranks = gathered_by_all(axes, f"file://{tmp_path / 'rendezvous'}")
    assert [rank.place.dcp for rank in ranks if rank.place is not None] == shares


def test_a_lone_worker_gathers_without_communication(tmp_path: Path) -> None:
    (alone,) = gathered_by_all(Axes(), f"file://{tmp_path / 'rendezvous'}")
    assert (alone.index, alone.agents) == (0, ["rank 0"])


def test_a_worker_that_fails_keeps_no_other_waiting(tmp_path: Path) -> None:
    found = gathered_by_all(
        Axes(pp=2, tp=2, failing=1), f"file://{tmp_path / 'rendezvous'}"
    )
    reported = ["SiblingFailed: worker 1: ValueError: no caches"]
    assert [rank.agents for rank in found] == [
        reported,
        ["ValueError: no caches"],
        reported,
        reported,
    ]


def test_an_engine_with_more_tensors_than_another_reads_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [make_worker(place=Place(tp=tp)) for tp in range(2)]
    described = [
        FerryHandshake.from_workers(worker.place, workers) for worker in workers
    ]
    tensors = sum(len(worker.tensors) for worker in workers)
    monkeypatch.setattr(messages, "MAX_ENGINE_TENSORS", tensors)
    assert len(workers_of(described)) == 2
    monkeypatch.setattr(messages, "MAX_ENGINE_TENSORS", tensors - 1)
    with pytest.raises(InvalidConfig, match=f"at most {tensors - 1}"):
        workers_of(described)
