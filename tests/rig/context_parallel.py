"""A producer whose prefill context parallel ranks divide the tokens of a prompt; see `tests.rig.engine`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.geometry import PagedTensor
from kvferry.worker.caches import KvCaches
from tests.geometry.requests import Request
from tests.rig.context_parallel_rank import Step, Written, compute_steps, token_rows
from tests.rig.engine import RigEngine
from tests.rig.memory import Numbers
from tests.worker.context_parallel.ranks import RankPool

Read = dict[int, set[tuple[tuple[str, str], int]]]
"""The heads that are read of each producer worker, by tensor name."""


class ContextParallelEngine(RigEngine):
    """Ranks of a process group compute its prefills, each its part, in three steps beside two other requests.

    Every replica writes the tokens of all ranks into its own cache, by the slot mapping.

    Attributes:
        computed_rows: per step, the rows that each rank of one group has computed.
        unequal: the workers whose caches differ from those of one rank that computes everything.
        spoil: for every worker the heads that are made wrong after the prefill, by tensor name.
    """

    def __init__(self, pool: RankPool, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._pool = pool
        self.computed_rows: list[tuple[int, ...]] = []
        self.unequal: list[int] = []
        self.spoil: Read = {}

    def compute(self, request: Request, numbers: Numbers) -> None:
        (group,) = self.description.groups
        steps = _steps(request, group.block_tokens)
        workers = sorted(
            enumerate(self.side.shards.places()),
            key=lambda at: (at[1].pp, at[1].tp, at[1].pcp),
        )
        for _, replicas in groupby(workers, key=lambda at: (at[1].pp, at[1].tp)):
            own = [index for index, _ in replicas]
            tensors = self.memories[own[0]].kv.tensors
            answers: list[list[Written]] = self._pool.run(
                len(own), compute_steps, tensors, numbers, steps
            )
            whole = [_computed_by_one(step, tensors, numbers) for step in steps]
            for index, written in zip(own, answers, strict=True):
                caches = self.memories[index].kv
                wanted = _contents_after(caches, whole)
                _restore(caches, _contents_after(caches, written))
                if not all(map(torch.equal, caches.storages, wanted)):
                    self.unequal.append(index)
            self.computed_rows = [
                tuple(x.computed for x in of_step)
                for of_step in zip(*answers, strict=True)
            ]
        for index, heads in self.spoil.items():
            for tensor in self.memories[index].kv.tensors:
                for head in range(tensor.heads.start, tensor.heads.stop):
                    if (tensor.name, head) in heads:
                        _cells(self.memories[index].kv, tensor)[
                            :, :, head - tensor.heads.start
                        ] ^= 0xFF

    def everything(self) -> Read:
        """All heads of all tensors of all workers."""
        return {
            index: {
                (x.name, head)
                for x in memory.kv.tensors
                for head in range(x.heads.start, x.heads.stop)
            }
            for index, memory in enumerate(self.memories)
        }


def read_by(plans: Sequence[TransferPlan]) -> Read:
    """The heads that the plans of all consumer workers read of each producer worker."""
    found: Read = defaultdict(set)
    for route in (route for plan in plans for route in plan.routes):
        for one in route.slices:
            found[route.worker] |= {
                (one.remote.name, head)
                for head in range(one.heads.start, one.heads.stop)
            }
    return found


def _steps(request: Request, block_tokens: int) -> list[Step]:
    """The request in three chunks, the last of one token, which all ranks compute; and two others around it.

    One of them decodes, the other one is prefilled in one step and waits in the next ones.
    """
    total = request.num_tokens
    first = total * 4 // 9
    blocks = request.remote[0]
    others = [block for block in range(1, max(blocks)) if block not in blocks]
    decode, prefill = others[:2], others[2:3]
    assert prefill, "the cache has blocks for the other requests"

    def slots(ids: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
        return tuple(
            ids[at // block_tokens] * block_tokens + at % block_tokens
            for at in range(start, stop)
        )

    steps = []
    for number, (start, stop) in enumerate(
        ((0, first), (first, total - 1), (total - 1, total))
    ):
        at = block_tokens - 1 + number
        beside = 7 if not number else 0
        steps.append(
            Step(
                requests=(1, 0, 2),
                scheduled=(1, stop - start, beside),
                computed=(at, start, 7 - beside),
                slots=slots(decode, at, at + 1)
                + slots(blocks, start, stop)
                + slots(prefill, 0, beside),
            )
        )
    return steps


def _computed_by_one(
    step: Step, tensors: tuple[PagedTensor, ...], numbers: Numbers
) -> Written:
    positions = [
        done + at
        for count, done in zip(step.scheduled, step.computed, strict=True)
        for at in range(count)
    ]
    requests = np.repeat(np.array(step.requests, np.int64), step.scheduled)
    rows = token_rows(tensors, numbers, np.array(positions, np.int64), requests)
    return Written(rows, np.array(step.slots, np.int64), len(rows))


def _contents_after(caches: KvCaches, steps: Sequence[Written]) -> list[torch.Tensor]:
    """The contents of every allocation after the steps are written; the caches themselves stay as they are."""
    before = [storage.clone() for storage in caches.storages]
    for step in steps:
        _write(caches, step)
    after = [storage.clone() for storage in caches.storages]
    _restore(caches, before)
    return after


def _restore(caches: KvCaches, contents: Sequence[torch.Tensor]) -> None:
    for storage, content in zip(caches.storages, contents, strict=True):
        storage.copy_(content)


def _write(caches: KvCaches, step: Written) -> None:
    """Write the rows that have a slot, as an engine's cache kernel does."""
    kept = step.slots >= 0
    rows, slots = torch.from_numpy(step.rows[kept]), torch.from_numpy(step.slots[kept])
    at = 0
    for tensor in caches.tensors:
        length = len(tensor.heads) * tensor.cell_bytes
        part = rows[:, at : at + length].view(-1, len(tensor.heads), tensor.cell_bytes)
        _cells(caches, tensor)[
            slots // tensor.block_tokens, slots % tensor.block_tokens
        ] = part
        at += length


def _cells(caches: KvCaches, tensor: PagedTensor) -> torch.Tensor:
    """A paged tensor's memory, uint8 `[blocks, block_tokens, heads, cell_bytes]`."""
    assert tensor.tile_tokens == 1
    assert not tensor.element_bytes
    storage = next(
        x for x in caches.storages if 0 <= tensor.base - x.data_ptr() < x.nbytes
    )
    shape = (tensor.blocks, tensor.block_tokens, len(tensor.heads), tensor.cell_bytes)
    strides = (tensor.block_stride, tensor.tile_stride, tensor.head_stride, 1)
    return storage.as_strided(shape, strides, tensor.base - storage.data_ptr())
