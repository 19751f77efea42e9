"""One rank of an engine, in its own process: vLLM's process groups over gloo, and the result of `gather_workers`.

Engines of a data-parallel deployment are one world: each must come to know its own workers only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.forkserver import forkserver

if TYPE_CHECKING:
    from kvferry.connector.messages import FerryHandshake
    from kvferry.protocol.geometry import Place

TIMEOUT_S = 300.0
"""A gather takes a second or two; the first one also waits for the import of vLLM."""


@dataclass(frozen=True)
class Axes:
    """Parallel sizes of a deployment. The rank `failing` has no caches to describe."""

    data: int = 1
    pp: int = 1
    pcp: int = 1
    tp: int = 1
    dcp: int = 1
    failing: int | None = None

    @property
    def ranks(self) -> int:
        return self.data * self.pp * self.pcp * self.tp


@dataclass(frozen=True)
class Rank:
    """The result of one rank of the world.

    Attributes:
        index: among its engine's workers.
        agents: that it learns of, in order.
        handshake: what it gives its scheduler, and the key under which vLLM keeps that.
    """

    index: int
    agents: list[str]
    place: Place | None = None
    key: tuple[int, int] = (0, 0)
    handshake: FerryHandshake | None = None


def gathered_by_all(axes: Axes, rendezvous: str) -> list[Rank]:
    """The results of all ranks of the world, in order."""
    context = forkserver()
    answers: Any = context.Queue()
    processes = [
        context.Process(target=_one, args=(axes, rank, rendezvous, answers))
        for rank in range(axes.ranks)
    ]
    found: dict[int, Rank] = {}
    for process in processes:
        process.start()
    try:
        found |= dict(_answer(answers, processes) for _ in processes)
    finally:
        for process in processes:
            process.join(TIMEOUT_S if found else 0.0)
            process.kill()
    return [found[rank] for rank in range(axes.ranks)]


def _answer(answers: Any, processes: list[Any]) -> tuple[int, Rank]:
    """The next answer; fails if a rank has died."""
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(queue.Empty):
            answer: tuple[int, Rank] = answers.get(timeout=1.0)
            return answer
        if any(process.exitcode for process in processes):
            break
    raise AssertionError(
        f"no answer; exit codes {[process.exitcode for process in processes]}"
    )


def _one(axes: Axes, rank: int, rendezvous: str, answers: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    from kvferry.connector.engine.facts import place_of_this_worker, worker_index
    from kvferry.connector.messages import (
        FerryHandshake,
        SiblingFailed,
        engine_groups,
        gather_workers,
    )
    from kvferry.protocol.geometry import Topology
    from kvferry.protocol.handshake import LeaseTableAddress, WorkerDescription
    from tests.vllm_preload import CONFIG

    os.environ.update(VLLM_CPU_DIST_TIMEOUT=f"{TIMEOUT_S:g}", GLOO_SOCKET_IFNAME="lo")
    # vLLM asks for it on processors with AVX-512. Ranks that differ in it talk over gloo, not over shared memory, where
    # they would spin.
    os.environ["VLLM_DIST_IDENT"] = f"rank {rank}"
    with set_current_vllm_config(CONFIG):
        parallel_state.init_distributed_environment(
            axes.ranks, rank, rendezvous, rank, "gloo"
        )
        CONFIG.parallel_config.data_parallel_size = (
            axes.data
        )  # not before: vLLM would look for a rendezvous of its own
        parallel_state.initialize_model_parallel(
            axes.tp, axes.pp, axes.pcp, axes.dcp, backend="gloo"
        )
    place = place_of_this_worker()
    mine = WorkerDescription(
        place=place,
        agent=f"rank {rank}",
        agent_metadata=bytes([rank]) * 1000,
        memory="DRAM",
        device=0,
        lease_table=LeaseTableAddress(address=4096 * (rank + 1), slots=16),
        tensors=(),
    )
    index = worker_index(Topology(pp=axes.pp, pcp=axes.pcp, tp=axes.tp), place)
    try:
        reported = gather_workers(
            ValueError("no caches") if rank == axes.failing else mine, engine_groups()
        )
    except (SiblingFailed, ValueError) as error:
        answers.put((rank, Rank(index, [f"{type(error).__name__}: {error}"])))
    else:
        # As vLLM keys it: with both kinds of context parallelism the replicas have keys of their own.
        apart = axes.pcp > 1 and axes.dcp > 1
        key = (place.pp, place.tp + (place.pcp * axes.tp if apart else 0))
        answers.put(
            (
                rank,
                Rank(
                    index,
                    [one.agent for one in reported],
                    place,
                    key,
                    FerryHandshake.from_workers(place, reported),
                ),
            )
        )
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
