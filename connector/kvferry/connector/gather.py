"""The descriptions of all workers of this engine: each needs them, because reads are spread over the whole engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed

from kvferry.protocol.handshake import WorkerDescription, decode_worker, encode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def engine_groups() -> list[ProcessGroup]:
    """The CPU groups in which this worker meets all others of its engine, from the innermost axis out: tensor parallel,
    prefill context parallel, pipeline. Those of one rank are left out. Not vLLM's world group: with data parallelism it
    spans several engines.
    """
    from vllm.distributed import parallel_state

    axes: list[Any] = [parallel_state.get_tp_group(), parallel_state.get_pcp_group(), parallel_state.get_pp_group()]
    return [axis.cpu_group for axis in axes if axis.world_size > 1]


def gather_workers(mine: WorkerDescription, groups: Sequence[ProcessGroup]) -> tuple[WorkerDescription, ...]:
    """What every worker of the engine says of itself, in the order of `worker_index`.

    All workers must call it, with equal axes in equal order; it waits for them. Without groups nobody is asked.

    Args:
        groups: one process group per axis, the innermost first; see `engine_groups`.

    Raises:
        InvalidMessage: a worker's description cannot be read.
    """
    known: list[bytes] = [encode(mine)]
    for group in groups:
        told: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(told, known, group=group)
        known = [description for rank in told for description in rank]
    return tuple(decode_worker(description) for description in known)
