"""The functions that ranks run in the tests of the executor, with their arguments and results."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from kvferry.protocol.errors import KvferryError
from kvferry.worker.context_parallel.manager import PCPManager
from tests.worker.context_parallel.model import Batch

POISON = 0xEE
"""The byte that a rank computes for padding."""


@dataclass(frozen=True)
class Rows:
    """Rows to gather, of `shape` in `dtype`; their bytes follow from `seed` and the token."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def content(self, tokens: int) -> npt.NDArray[np.uint8]:
        """The bytes of every scheduled token, uint8 `[T, row_bytes]`."""
        return np.random.default_rng(self.seed).integers(
            0, 256, (tokens, self.row_bytes), np.uint8
        )


@dataclass(frozen=True)
class StepResult:
    """One rank's results of one step: bytes `[T, row_bytes]` and `[P, row_bytes]`, the shapes, the slots `[P]`.

    Those of the second cache group are 5 slots further on.
    """

    hidden: npt.NDArray[np.uint8]
    padded: npt.NDArray[np.uint8]
    hidden_shape: tuple[int, ...]
    slots: list[npt.NDArray[np.int64]]
    req_indices: list[int]
    positions: list[int]
    process: int


def run_steps(
    group: dist.ProcessGroup,
    device: torch.device,
    steps: list[Batch],
    rows: Rows,
    slots: list[list[int]],
) -> list[StepResult]:
    """Several steps with one manager, whose buffers are as small as its limits allow."""
    manager = PCPManager(
        group,
        device=device,
        max_tokens=max(1, *(sum(step.scheduled) for step in steps)),
        max_requests=max(
            1, *(sum(count > 0 for count in step.scheduled) for step in steps)
        ),
        max_row_bytes=rows.row_bytes,
        reorder_threshold=steps[0].reorder_threshold,
        cache_groups=2,
    )
    results = []
    for step, mapping in zip(steps, slots, strict=True):
        own = manager.partition_inputs(step.scheduled, step.computed)
        computed = torch.from_numpy(rows.content(sum(step.scheduled))).to(device)[
            own.tokens
        ]
        computed[own.is_padding] = POISON
        typed = (
            computed.view(rows.dtype).view(-1, *rows.shape)
            if len(computed)
            else _no_rows(rows, device)
        )
        hidden, padded = (
            manager.restore_hidden_states(typed),
            manager.gather_padded(typed),
        )
        slots_of_both = [
            manager.pad_slot_mapping(
                torch.tensor(mapping, dtype=torch.int64, device=device)
                + 5 * cache_group,
                cache_group,
            )
            for cache_group in range(2)
        ]
        results.append(
            StepResult(
                hidden=_bytes(hidden, rows),
                padded=_bytes(padded, rows),
                hidden_shape=tuple(hidden.shape),
                slots=[slots.cpu().numpy().copy() for slots in slots_of_both],
                req_indices=own.req_indices.tolist(),
                positions=own.positions.tolist(),
                process=os.getpid(),
            )
        )
    return results


def refusals(group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    """The errors of a manager of 8 tokens, 3 requests and 16 bytes a row for invalid input; then it still works."""

    def make(**sizes: Any) -> PCPManager:
        return PCPManager(group, **{**_SIZES, "device": device, **sizes})

    manager = make()
    found = {
        "no step": _refusal(lambda: manager.restore_hidden_states(torch.zeros(0))),
        "a warm-up": str(manager.pad_slot_mapping(torch.arange(3)).tolist()),
        "the largest warm-up": str(
            sorted(set(manager.pad_slot_mapping(torch.arange(8)).tolist()))
        ),
        "too long a warm-up": _refusal(
            lambda: manager.pad_slot_mapping(torch.zeros(9, dtype=torch.int64))
        ),
        "a warm-up of no dimension": _refusal(
            lambda: manager.pad_slot_mapping(torch.zeros(()))
        ),
    }
    own = manager.partition_inputs([1, 6], [3, 0])
    count = len(own.tokens)
    found |= {
        "too many tokens": _refusal(lambda: manager.partition_inputs([1, 8], [0, 0])),
        "too many requests": _refusal(
            lambda: manager.partition_inputs([1] * 4, [0] * 4)
        ),
        "computed of others": _refusal(lambda: manager.partition_inputs([2, 3], [0])),
        "too few rows": _refusal(
            lambda: manager.restore_hidden_states(torch.zeros(count - 1, 2))
        ),
        "no dimension": _refusal(lambda: manager.gather_padded(torch.zeros(()))),
        "long rows": _refusal(
            lambda: manager.restore_hidden_states(torch.zeros(count, 5))
        ),
        "too few slots": _refusal(
            lambda: manager.pad_slot_mapping(torch.zeros(6, dtype=torch.int64))
        ),
        "slots in fractions": _refusal(
            lambda: manager.pad_slot_mapping(torch.zeros(7))
        ),
        "no such cache group": _refusal(
            lambda: manager.pad_slot_mapping(torch.zeros(7, dtype=torch.int64), 1)
        ),
        "no tokens at all": _refusal(lambda: make(max_tokens=0)),
        "fractions of a request": _refusal(lambda: make(max_requests=1.5)),
        "rows of no bytes": _refusal(lambda: make(max_row_bytes=0)),
        "a negative threshold": _refusal(lambda: make(reorder_threshold=-1)),
        "no cache groups": _refusal(lambda: make(cache_groups=0)),
    }
    hidden = manager.restore_hidden_states(own.tokens.to(torch.float32)[:, None])
    found["the step before"] = str(hidden[:, 0].int().tolist())
    return found


_SIZES = {"max_tokens": 8, "max_requests": 3, "max_row_bytes": 16}


def _refusal(call: Any) -> str:
    try:
        call()
    except KvferryError as refused:
        return f"{type(refused).__name__}: {refused}"
    return "nothing"


def _no_rows(rows: Rows, device: torch.device) -> torch.Tensor:
    return torch.empty((0, *rows.shape), dtype=rows.dtype, device=device)


def _bytes(found: torch.Tensor, rows: Rows) -> npt.NDArray[np.uint8]:
    if not len(found):
        return np.empty((0, rows.row_bytes), np.uint8)
    return np.asarray(found.cpu().reshape(len(found), -1).view(torch.uint8).numpy())
