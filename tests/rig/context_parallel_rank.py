"""One rank of a context parallel producer: it computes its tokens, and gets those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from kvferry.protocol.geometry import PagedTensor
from kvferry.worker.context_parallel.manager import PCPManager
from tests.geometry.cells import Cells, Ints, byte_names
from tests.rig.memory import Bytes, Numbers, noise


@dataclass(frozen=True)
class Step:
    """One step of the producer.

    Attributes:
        requests: the requests of the step; 0 is the request that is handed over.
        scheduled, computed: tokens of each, of this step and of those before.
        slots: of every scheduled token.
    """

    requests: tuple[int, ...]
    scheduled: tuple[int, ...]
    computed: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """The rows that a replica writes to its cache in a step.

    Attributes:
        rows: uint8 `[P, row_bytes]`, the tokens' entries in all layers, see `token_rows`.
        slots: int64 `[P]`.
        computed: rows that this rank computed itself.
    """

    rows: Bytes
    slots: npt.NDArray[np.int64]
    computed: int


def token_rows(
    tensors: Sequence[PagedTensor], numbers: Numbers, positions: Ints, requests: Ints
) -> Bytes:
    """The K and V of tokens: a function of layer, kind, head and position, another one for every request.

    Returns:
        uint8 `[tokens, row_bytes]`: tensor by tensor, head by head.
    """
    none = np.zeros(0, np.int64)
    names = [
        byte_names(tensor, Cells(none, none, positions[:, None]), numbers)
        for tensor in tensors
    ]
    found = noise(
        np.concatenate([one.reshape(len(positions), -1) for one in names], axis=1)
    )
    return np.asarray(found ^ (requests * 0x35 % 256).astype(np.uint8)[:, None])


def compute_steps(
    group: dist.ProcessGroup,
    device: torch.device,
    tensors: tuple[PagedTensor, ...],
    numbers: Numbers,
    steps: Sequence[Step],
) -> list[Written]:
    """All steps of a prefill on one rank. For padding it computes noise that belongs to no token."""
    manager = PCPManager(
        group,
        device=device,
        max_tokens=max(len(step.slots) for step in steps),
        max_requests=max(len(step.requests) for step in steps),
        max_row_bytes=sum(len(tensor.heads) * tensor.cell_bytes for tensor in tensors),
    )
    found = []
    for step in steps:
        own = manager.partition_inputs(step.scheduled, step.computed)
        request = np.array(step.requests, np.int64)[own.req_indices.numpy()]
        rows = torch.from_numpy(
            token_rows(tensors, numbers, own.positions.numpy(), request)
        )
        rows[own.is_padding] = 0xEE
        everybody = manager.gather_padded(rows)
        slots = manager.pad_slot_mapping(torch.tensor(step.slots))
        found.append(Written(everybody.numpy(), slots.numpy().copy(), len(rows)))
    return found
