"""Gathers the descriptions of all workers of this engine: each needs them, because reads span the whole engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.handshake import WorkerDescription, decode_worker, encode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def engine_groups() -> list[ProcessGroup]:
    """The CPU groups that this worker shares with the engine's other workers, innermost axis first: tensor parallel,
    prefill context parallel, pipeline. Groups of one rank are left out. vLLM's world group is not used: with data
    parallelism it spans several engines.
    """
    from vllm.distributed import parallel_state

    axes: list[Any] = [parallel_state.get_tp_group(), parallel_state.get_pcp_group(), parallel_state.get_pp_group()]
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
    known: list[bytes | str] = [f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else encode(mine)]
    for group in groups:
        reported: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(reported, known, group=group)
        known = [description for rank in reported for description in rank]
    if isinstance(mine, Exception):
        raise mine
    failed = [f"worker {index}: {error}" for index, error in enumerate(known) if isinstance(error, str)]
    if failed:
        raise SiblingFailed("; ".join(failed))
    return tuple(decode_worker(description) for description in known if isinstance(description, bytes))
