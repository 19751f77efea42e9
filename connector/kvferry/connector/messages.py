"""The messages that kvferry sends through vLLM's own channels between scheduler and workers; vLLM pickles them.

Also the exchange of descriptions among an engine's workers: each needs all of them, as reads span the whole engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.protocol.errors import InvalidConfig, KvferryError
from kvferry.protocol.geometry import Place
from kvferry.protocol.handshake import MAX_ENGINE_TENSORS, WorkerDescription, decode_worker, encode
from kvferry.trace.events import LoadEnded
from kvferry.worker.loads.results import WorkerGauges

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class FerryMetadata(KVConnectorMetadata):
    """One step's orders, encoded; empty when there are none.

    Attributes:
        head: the part that workers read before their step goes on (`encode_head`).
        frame: all orders (`encode_orders`).
        wants_report: whether every worker must report `FerryWorkerMetadata.over`, even if it is empty.
        is_idle: whether the step computes nothing, so that it may wait a moment for a load.
    """

    head: bytes = b""
    frame: bytes = b""
    wants_report: bool = False
    is_idle: bool = False


@dataclass(frozen=True)
class FerryHandshake(KVConnectorHandshakeMetadata):
    """Encoded worker descriptions.

    vLLM keeps one of these per pipeline stage and tensor-parallel rank, from any one of the replicas of prefill
    context parallelism. So each carries the descriptions of all replicas.

    Attributes:
        is_child: whether the worker's connector is a child of a MultiConnector; the scheduler's side cannot see that.
    """

    frames: tuple[bytes, ...]
    is_child: bool = False

    @classmethod
    def from_workers(cls, place: Place, workers: Iterable[WorkerDescription]) -> FerryHandshake:
        """The handshake of the worker at `place`: it and its replicas, out of all workers of the engine."""
        return cls(
            tuple(
                encode(one)
                for one in workers
                if (one.place.pp, one.place.tp) == (place.pp, place.tp)
            )
        )


def workers_of(handshakes: Iterable[object]) -> tuple[WorkerDescription, ...]:
    """The described workers, each once, in the order of `worker_index`.

    Raises:
        InvalidMessage: a description cannot be read.
        InvalidConfig: it is another connector's. A MultiConnector passes on the metadata of one child only, so at most
            one of its children may hand prompts over. Or there are more tensors than an engine reads of another.
    """
    frames: list[bytes] = []
    for one in handshakes:
        if not isinstance(one, FerryHandshake):
            raise InvalidConfig(
                "connectors",
                type(one).__name__,
                "one child that hands prompts over: FerryConnector",
            )
        frames.extend(one.frames)
    by_place = {worker.place: worker for worker in map(decode_worker, frames)}
    tensors = sum(len(worker.tensors) for worker in by_place.values())
    if tensors > MAX_ENGINE_TENSORS:
        raise InvalidConfig(
            "parallel sizes",
            f"{tensors} paged tensors of all workers",
            f"at most {MAX_ENGINE_TENSORS}",
        )
    places = sorted(by_place, key=lambda place: (place.pp, place.pcp, place.tp))
    return tuple(by_place[place] for place in places)


def engine_groups() -> list[ProcessGroup]:
    """The CPU groups that this worker shares with the engine's other workers, innermost axis first: tensor parallel,
    prefill context parallel, pipeline. Groups of one rank are left out. vLLM's world group is not used: with data
    parallelism it spans several engines.
    """
    from vllm.distributed import parallel_state

    axes: list[Any] = [
        parallel_state.get_tp_group(),
        parallel_state.get_pcp_group(),
        parallel_state.get_pp_group(),
    ]
    return [axis.cpu_group for axis in axes if axis.world_size > 1]


class SiblingFailed(KvferryError):
    """Another worker of this engine failed to make its description, so none of them can start."""


def gather_workers(
    mine: WorkerDescription | Exception, groups: Sequence[ProcessGroup]
) -> tuple[WorkerDescription, ...]:
    """The descriptions of all workers of the engine, in the order of `worker_index`.

    A collective call: all workers must make it, with equal axes in equal order, and it waits for them. A worker that
    has failed also calls it, with its error, so that the others do not wait for ever. Without groups it is local.

    Args:
        mine: this worker's description, or its error.
        groups: one process group per axis, the innermost first; see `engine_groups`.

    Raises:
        SiblingFailed: another worker has failed.
        InvalidMessage: a worker's description cannot be read.
        Exception: `mine`, if it is an error.
    """
    known: list[bytes | str] = [
        f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else encode(mine)
    ]
    for group in groups:
        reported: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(reported, known, group=group)
        known = [description for rank in reported for description in rank]
    if isinstance(mine, Exception):
        raise mine
    failed = [
        f"worker {index}: {error}" for index, error in enumerate(known) if isinstance(error, str)
    ]
    if failed:
        raise SiblingFailed("; ".join(failed))
    return tuple(
        decode_worker(description) for description in known if isinstance(description, bytes)
    )


@dataclass
class FerryWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' reports of one step, by worker. A worker without an entry has no news.

    Attributes:
        alive: requests whose blocks may still be written after their load failed.
        over: held requests whose slots have been cleared, each reported once. vLLM's own `finished_sending` is only
            for requests that vLLM holds.
        gauges: the workers' latest values.
        loads: the worker's ended loads, where OpenTelemetry is on.
    """

    alive: dict[int, frozenset[str]] = field(default_factory=dict)
    over: dict[int, frozenset[str]] = field(default_factory=dict)
    gauges: dict[int, WorkerGauges] = field(default_factory=dict)
    loads: dict[int, tuple[LoadEnded, ...]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryWorkerMetadata:
        if isinstance(other, FerryWorkerMetadata):
            self.alive.update(other.alive)
            self.over.update(other.over)
            self.gauges.update(other.gauges)
            self.loads.update(other.loads)
        return self
