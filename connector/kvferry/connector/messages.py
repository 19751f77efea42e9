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
from kvferry.protocol.handshake import (
    MAX_ENGINE_TENSORS,
    WorkerDescription,
    decode_worker,
    encode,
)
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
        wants_report: whether every worker must report `FerryWorkerMetadata.sent`, even if it is empty.
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
    def from_workers(
        cls, place: Place, workers: Iterable[WorkerDescription]
    ) -> FerryHandshake:
        """The handshake of the worker at `place`: it and its replicas, out of all workers of the engine."""
        replicas = (
            worker
            for worker in workers
            if worker.place.pp == place.pp and worker.place.tp == place.tp
        )
        return cls(tuple(encode(worker) for worker in replicas))


def workers_of(handshakes: Iterable[object]) -> tuple[WorkerDescription, ...]:
    """The described workers, each once, in the order of `worker_index`.

    Raises:
        InvalidMessage: a description cannot be read.
        InvalidConfig: it is another connector's, or there are more tensors than an engine reads of another.
    """
    by_place: dict[Place, WorkerDescription] = {}
    for handshake in handshakes:
        if not isinstance(handshake, FerryHandshake):
            # A MultiConnector passes on the metadata of one child only. If that is another connector, no peer would
            # ever learn of this one.
            raise InvalidConfig(
                "connectors",
                type(handshake).__name__,
                "one child that hands prompts over: FerryConnector",
            )
        for frame in handshake.frames:
            worker = decode_worker(frame)
            by_place[worker.place] = worker
    num_tensors = sum(len(worker.tensors) for worker in by_place.values())
    if num_tensors > MAX_ENGINE_TENSORS:
        # Refused here, at the engine's own start: peers would refuse it at every handshake.
        raise InvalidConfig(
            "parallel sizes",
            f"{num_tensors} paged tensors of all workers",
            f"at most {MAX_ENGINE_TENSORS}",
        )
    places = sorted(by_place, key=lambda place: (place.pp, place.pcp, place.tp))
    return tuple(by_place[place] for place in places)


def engine_groups() -> list[ProcessGroup]:
    """The CPU groups that this worker shares with the engine's other workers.

    Innermost axis first: tensor parallel, prefill context parallel, pipeline. Groups of one rank are left out.
    """
    from vllm.distributed import parallel_state

    # Not vLLM's world group, which would be one call: with data parallelism it spans several engines.
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

    A collective call: all workers must make it, with equal axes in equal order, and it waits for them. Without groups
    it is local.

    Args:
        mine: this worker's description, or its error.
        groups: one process group per axis, the innermost first; see `engine_groups`.

    Raises:
        SiblingFailed: another worker has failed.
        InvalidMessage: a worker's description cannot be read.
        Exception: `mine`, if it is an error.
    """
    # Bytes are a description, a text is an error. A worker that has failed calls this too, with its error: otherwise
    # the others would wait for it for ever.
    frames: list[bytes | str] = []
    if isinstance(mine, Exception):
        frames.append(f"{type(mine).__name__}: {mine}")
    else:
        frames.append(encode(mine))
    # Each axis gathers what the axes within it have gathered, so the last one has those of all workers.
    for group in groups:
        frames_by_rank: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(frames_by_rank, frames, group=group)
        frames = [frame for rank_frames in frames_by_rank for frame in rank_frames]
    if isinstance(mine, Exception):
        raise mine
    errors = []
    workers = []
    for index, frame in enumerate(frames):
        if isinstance(frame, str):
            errors.append(f"worker {index}: {frame}")
        else:
            workers.append(frame)
    if errors:
        raise SiblingFailed("; ".join(errors))
    return tuple(decode_worker(frame) for frame in workers)


@dataclass
class FerryWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' reports of one step, by worker. A worker without an entry has no news.

    Attributes:
        still_written: requests whose blocks may still be written after their load failed.
        sent: held requests whose slots have been cleared, each reported once. Not in vLLM's own `finished_sending`,
            which is only for requests that vLLM holds.
        gauges: the workers' latest values.
        loads: the worker's ended loads, where OpenTelemetry is on.
    """

    still_written: dict[int, frozenset[str]] = field(default_factory=dict)
    sent: dict[int, frozenset[str]] = field(default_factory=dict)
    gauges: dict[int, WorkerGauges] = field(default_factory=dict)
    loads: dict[int, tuple[LoadEnded, ...]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryWorkerMetadata:
        """Add a later report, of other workers or of the same ones.

        vLLM 0.33 passes on what the workers reported in a step that failed with the next step's reports: then there are
        two of each worker, the failed step's first. What is a state is replaced, what is reported once is added.
        """
        if isinstance(other, FerryWorkerMetadata):
            self.still_written.update(other.still_written)
            self.gauges.update(other.gauges)
            for worker, sent in other.sent.items():
                self.sent[worker] = self.sent.get(worker, frozenset()) | sent
            for worker, loads in other.loads.items():
                self.loads[worker] = self.loads.get(worker, ()) + loads
        return self
