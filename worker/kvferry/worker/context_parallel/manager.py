"""The executor of prefill context parallelism: gathers the results of all ranks in order, over torch.distributed.

All ranks of a group get the same steps; every method documented as a collective is called by all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.context_parallel.partition import (
    MAX_RANKS,
    MAX_ROWS,
    Counts,
    InvalidBatch,
    Partition,
    check_integer,
    max_rank_rows,
    partition_step,
    rank_inputs,
)

PAD_SLOT = -1
"""The slot of a row that is not written to the cache."""

MAX_CACHE_GROUPS = 1024
MAX_ROW_BYTES = 1 << 30


class RankRows(NamedTuple):
    """The rows that this rank computes, as `partition.RankInputs`. On the device, valid until the next step."""

    tokens: torch.Tensor
    req_indices: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """All device buffers, allocated once. Rows are those of one rank (`own`), or of all (`[R·rows]`)."""

    own: RankRows
    restore_index: torch.Tensor
    gathered_rows: torch.Tensor
    padded_rows: torch.Tensor
    slots: torch.Tensor
    gathered: torch.Tensor


class PCPManager:
    """One rank's part in its group. Called on one thread.

    Args:
        group: the ranks among which the tokens are divided, this process among them.
        device: where rows and indices are.
        max_tokens, max_requests: of a step.
        max_row_bytes: of one row that is gathered: a token's hidden state, or its entry in a layer's cache.
        reorder_threshold: up to how many scheduled tokens a request with context is a decode, which every rank
            computes; None: all are prefills. See `partition.partition_step`.
        cache_groups: block tables, each with a slot mapping of its own.

    Raises:
        InvalidBatch: a size is not an integer within its bounds, or this process is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        max_tokens: int,
        max_requests: int,
        max_row_bytes: int,
        reorder_threshold: int | None = 1,
        cache_groups: int = 1,
    ) -> None:
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        check_integer("ranks of the group", self.ranks, 1, MAX_RANKS)
        check_integer("rank in the group", self.rank, 0, self.ranks - 1)
        check_integer("max_tokens", max_tokens, 1, MAX_ROWS)
        check_integer("max_requests", max_requests, 1, MAX_ROWS)
        check_integer("max_row_bytes", max_row_bytes, 1, MAX_ROW_BYTES)
        check_integer("cache_groups", cache_groups, 1, MAX_CACHE_GROUPS)
        self._group = group
        self._device = torch.device(device)
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._max_row_bytes = max_row_bytes
        self._reorder_threshold = reorder_threshold
        rank_rows = max_rank_rows(
            max_tokens,
            max_requests,
            ranks=self.ranks,
            reorder_threshold=reorder_threshold,
        )
        all_rows = rank_rows * self.ranks
        # Before the first step the engine computes `max_tokens` rows on every rank, which may be
        # more than a step gives.
        slots = max(all_rows, max_tokens * self.ranks)
        self._buffers = _Buffers(
            own=RankRows(
                tokens=self._integers(rank_rows),
                req_indices=self._integers(rank_rows),
                positions=self._integers(rank_rows),
                is_padding=torch.empty(rank_rows, dtype=torch.bool, device=device),
            ),
            restore_index=self._integers(all_rows),
            gathered_rows=self._integers(max_tokens),
            padded_rows=self._integers(max_tokens),
            slots=self._integers(cache_groups, slots),
            gathered=torch.empty(
                all_rows * max_row_bytes, dtype=torch.uint8, device=device
            ),
        )
        self._partition: Partition | None = None

    @property
    def partition(self) -> Partition:
        """The partition of the present step.

        Raises:
            LocalProtocolError: there was no step yet.
        """
        if self._partition is None:
            raise LocalProtocolError("no step has been partitioned yet")
        return self._partition

    def partition_inputs(
        self, num_scheduled_tokens: Counts, num_computed_tokens: Counts
    ) -> RankRows:
        """Begin a step: divide its tokens among the ranks. No collective: every rank computes the same result.

        Args:
            num_scheduled_tokens: `[N]`, per request, new tokens only.
            num_computed_tokens: `[N]`, per request, those of earlier steps.

        Raises:
            InvalidBatch: the numbers are not valid, or more than the buffers hold. The step before stays.
        """
        partition = partition_step(
            num_scheduled_tokens,
            num_computed_tokens,
            ranks=self.ranks,
            reorder_threshold=self._reorder_threshold,
        )
        if partition.num_tokens > self._max_tokens:
            raise InvalidBatch(
                "num_scheduled_tokens",
                partition.num_tokens,
                f"at most {self._max_tokens} tokens in all",
            )
        requests = int(np.count_nonzero(partition.scheduled_tokens))
        if requests > self._max_requests:
            raise InvalidBatch(
                "num_scheduled_tokens",
                requests,
                f"at most {self._max_requests} requests with tokens",
            )
        padded_rows = np.flatnonzero(partition.unpad_mask)
        buffers = self._buffers
        _put(buffers.restore_index, partition.restore_index)
        _put(buffers.gathered_rows, partition.restore_index[padded_rows])
        _put(buffers.padded_rows, padded_rows)
        self._partition = partition
        inputs = rank_inputs(partition, self.rank)
        return RankRows(
            tokens=_put(buffers.own.tokens, inputs.tokens),
            req_indices=_put(buffers.own.req_indices, inputs.req_indices),
            positions=_put(buffers.own.positions, inputs.positions),
            is_padding=_put(buffers.own.is_padding, inputs.is_padding),
        )

    def pad_slot_mapping(
        self, slot_mapping: torch.Tensor, cache_group: int = 0
    ) -> torch.Tensor:
        """The cache slot of every row that `gather_padded` returns, int64 `[P]`; `PAD_SLOT` where nothing is written.

        Padding is not written; of a decode, only the first rank's copy is.

        Args:
            slot_mapping: integers `[T]`, the slot of every scheduled token; `PAD_SLOT` for one that this engine
                worker does not keep. Before the first step, any `[T]` of at most `max_tokens`.

        Returns:
            A view of a buffer, valid until the next step or the next call for the same cache group.

        Raises:
            InvalidBatch: there is not one slot for every scheduled token, or no such cache group.
        """
        buffers = self._buffers
        check_integer("cache_group", cache_group, 0, len(buffers.slots) - 1)
        step = self._partition
        if step is None:
            # Before the first step an engine warms up: it computes rows that are of no request, as
            # many on every rank. They must not be written, whatever their slots say. (This was
            # refused at first, and an engine could not have started.)
            if slot_mapping.dim() != 1 or len(slot_mapping) > self._max_tokens:
                expected = f"one dimension of at most {self._max_tokens}, before the first step"
                raise InvalidBatch("slot_mapping", tuple(slot_mapping.shape), expected)
            return buffers.slots[cache_group, : len(slot_mapping) * self.ranks].fill_(
                PAD_SLOT
            )
        is_right_shape = slot_mapping.shape == (step.num_tokens,)
        if not is_right_shape or slot_mapping.dtype not in (torch.int64, torch.int32):
            expected = f"int64 or int32 of shape ({step.num_tokens},)"
            raise InvalidBatch(
                "slot_mapping",
                (slot_mapping.dtype, tuple(slot_mapping.shape)),
                expected,
            )
        slots = buffers.slots[cache_group, : step.num_rows].fill_(PAD_SLOT)
        padded_rows = buffers.padded_rows[: step.num_tokens]
        return slots.index_copy_(
            0, padded_rows, slot_mapping.to(self._device, torch.int64)
        )

    def gather_padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks in the padded order: K and V before they are written. A collective.

        Args:
            rows: `[L, …]`.

        Returns:
            `[P, …]`, a new tensor.

        Raises:
            InvalidBatch: the rows are not this step's, or too long.
        """
        return self._gather(
            rows, self._buffers.restore_index[: self.partition.num_rows]
        )

    def restore_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks in the scheduled order, without padding. A collective.

        Args:
            hidden_states: `[L, …]`.

        Returns:
            `[T, …]`, a new tensor.

        Raises:
            InvalidBatch: the rows are not this step's, or too long.
        """
        return self._gather(
            hidden_states, self._buffers.gathered_rows[: self.partition.num_tokens]
        )

    def _gather(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """All-gather into the buffer, then copy the rows that `index` names.

        Everything is checked before the collective begins: a rank that raised within it would leave the others waiting.
        """
        step = self.partition
        has_step_rows = rows.dim() > 0 and len(rows) == step.rank_rows
        if not has_step_rows or rows.device.type != self._device.type:
            expected = f"{step.rank_rows} rows on {self._device}"
            raise InvalidBatch("rows", (tuple(rows.shape), str(rows.device)), expected)
        if not rows.numel():
            return rows.new_empty((len(index), *rows.shape[1:]))
        # As bytes: one buffer serves rows of any dtype.
        sent = rows.detach().contiguous().view(len(rows), -1).view(torch.uint8)
        row_bytes = sent.shape[1]
        if row_bytes > self._max_row_bytes:
            raise InvalidBatch(
                "bytes of a row", row_bytes, f"at most {self._max_row_bytes}"
            )
        gathered = self._buffers.gathered[: self.ranks * sent.numel()].view(
            -1, row_bytes
        )
        _all_gather(gathered, sent, self._group)
        selected = gathered.view(_widest_integer(row_bytes)).index_select(0, index)
        return selected.view(rows.dtype).view((-1, *rows.shape[1:]))

    def _integers(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self._device)


def _widest_integer(row_bytes: int) -> torch.dtype:
    """The widest integer type whose size divides a row: as bytes, `index_select` would copy them one by one."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0:
            return dtype
    return torch.uint8


def _put(
    buffer: torch.Tensor, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> torch.Tensor:
    """Copy the values to the front of the buffer."""
    # From memory that is not pinned: the copy has read it when this returns, so it can be freed.
    return buffer[: len(values)].copy_(torch.tensor(values))


# PyTorch 2.13 renamed it, and warns of the old name.
_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
