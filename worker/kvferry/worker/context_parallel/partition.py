"""Which rank computes which tokens of a step: DualChunkSwap, a frozen value made by a pure function.

Shapes: `N` requests, `T` scheduled tokens, `L` rows on each rank, `R` ranks, `P = R·L`.

A prefill is padded to `2R` chunks of `c` tokens; rank `r` computes chunk `r` (its head) and chunk `2R-1-r` (its tail).
A token attends to all tokens before it, so a cheap and an expensive chunk together cost every rank the same. A decode
(at most `reorder_threshold` scheduled tokens, after at least one computed token) is computed by every rank. So each
rank has the same number of rows, and their all-gather needs no lengths.

The same rows appear in three orders:

- *scheduled*: the `T` tokens in the scheduler's order, request by request;
- *padded*: the `P` rows, request by request: a prefill's chunks from the first to the last, a decode `R` times;
- *gathered*: the `P` rows as an all-gather delivers them, rank by rank.

Example: 2 ranks, a decode of one token (A, request 0) and a prefill of 6 tokens (B … G, request 1) in 4 chunks of 2:

    scheduled       A B C D E F G
    padded          A A B C D E F G · ·
    rank 0          A B C · ·                   chunks 0 and 3
    rank 1          A D E F G                   chunks 1 and 2
    req_indices     0 1 1 1 1                   of either rank
    gathered        A B C · · A D E F G
    restore_index   0 5 1 2 6 7 8 9 3 4         padded = gathered[restore_index]
    unpad_mask      1 0 1 1 1 1 1 1 0 0         scheduled = padded[unpad_mask]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.protocol.errors import InputError

Ints: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


class InvalidBatch(InputError):
    """The tokens, slots or rows of a step are not valid. It is raised before a collective begins."""

    what = "batch"


def check_integer(field: str, value: object, minimum: int, maximum: int) -> None:
    """Check a number of the caller's.

    Raises:
        InvalidBatch: `value` is not an integer from `minimum` to `maximum`.
    """
    expected = f"an integer from {minimum} to {maximum}"
    # In Python a bool is an int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidBatch(field, value, expected)
    if not minimum <= value <= maximum:
        raise InvalidBatch(field, value, expected)


def as_counts(field: str, value: Counts, maximum: int) -> Ints:
    """The numbers as int64 `[n]`, a copy.

    Raises:
        InvalidBatch: they are not integers in one row, from 0 to `maximum`.
    """
    expected = f"a row of integers from 0 to {maximum}"
    try:
        counts = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidBatch(field, value, expected) from error
    if counts.ndim != 1:
        raise InvalidBatch(field, value, expected)
    # An empty list is an array of floats, which have no wrong number.
    if not counts.size:
        return counts.astype(np.int64)
    if counts.dtype.kind not in "iu":
        raise InvalidBatch(field, value, expected)
    outside = np.flatnonzero((counts < 0) | (counts > maximum))
    if outside.size:
        index = outside[0]
        raise InvalidBatch(
            f"{field}[{index}]", int(counts[index]), f"an integer from 0 to {maximum}"
        )
    return counts.astype(np.int64)


Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_ROWS = 1 << 24
"""Rows of a step, all ranks together: it bounds what a wrong number of tokens can make a worker allocate."""

MAX_RANKS = 1024
MAX_POSITION = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One step's tokens, divided among the ranks. Arrays are read-only.

    Attributes:
        ranks: `R`.
        scheduled_tokens, computed_tokens: int64 `[N]`, those of this step and of earlier ones.
        chunk_tokens: int64 `[N]`, the `c` of every prefill; the tokens of every decode.
        is_decode: bool `[N]`; False for a request of no tokens.
        restore_index: int64 `[P]`, `padded = gathered[restore_index]`.
        unpad_mask: bool `[P]`, `scheduled = padded[unpad_mask]`.
    """

    ranks: int
    scheduled_tokens: Ints
    computed_tokens: Ints
    chunk_tokens: Ints
    is_decode: Bools
    restore_index: Ints
    unpad_mask: Bools

    @property
    def num_tokens(self) -> int:
        """`T`."""
        return int(self.scheduled_tokens.sum())

    @property
    def num_rows(self) -> int:
        """`P`."""
        return len(self.restore_index)

    @property
    def rank_rows(self) -> int:
        """`L`."""
        return self.num_rows // self.ranks

    @property
    def rank_tokens(self) -> Ints:
        """Rows of every request on each rank, padding included: int64 `[N]`."""
        return _rank_tokens(self.chunk_tokens, self.is_decode)


class RankInputs(NamedTuple):
    """The rows that one rank computes, request by request; of a prefill the head chunk and then the tail chunk.

    Padding repeats its request's last token, so that every index and every position is one of a real token.

    Attributes:
        tokens: int64 `[L]`, which tokens of the scheduled order.
        req_indices: int64 `[L]`, which request each row belongs to, as `num_scheduled_tokens` counts them.
        positions: int64 `[L]`, where they are in their sequences.
        is_padding: bool `[L]`.
    """

    tokens: Ints
    req_indices: Ints
    positions: Ints
    is_padding: Bools


def partition_step(
    num_scheduled_tokens: Counts,
    num_computed_tokens: Counts,
    *,
    ranks: int,
    reorder_threshold: int | None = 1,
) -> Partition:
    """Divide a step's tokens among the ranks.

    Args:
        num_scheduled_tokens: `[N]`, per request, new tokens only; a request of none takes no part.
        num_computed_tokens: `[N]`, the tokens of each request that earlier steps have computed: its context.
        reorder_threshold: up to how many scheduled tokens a request with context is a decode, as the attention backend
            has it (vLLM's `reorder_batch_threshold`); None, of a backend without decodes of its own: all are prefills.

    Raises:
        InvalidBatch: a number is not an integer, out of bounds, the two rows are not of one length, or there would be
            more than `MAX_ROWS` rows.
    """
    check_integer("ranks", ranks, 1, MAX_RANKS)
    max_decode_tokens = _max_decode_tokens(reorder_threshold)
    scheduled = as_counts("num_scheduled_tokens", num_scheduled_tokens, MAX_ROWS)
    computed = as_counts("num_computed_tokens", num_computed_tokens, MAX_POSITION)
    if len(computed) != len(scheduled):
        raise InvalidBatch(
            "num_computed_tokens",
            len(computed),
            f"one for each of {len(scheduled)} requests",
        )
    # A short prompt is not a decode: it has no context to attend to, and all ranks would do the
    # same work.
    is_decode = (scheduled > 0) & (scheduled <= max_decode_tokens) & (computed > 0)
    chunk = np.where(is_decode, scheduled, -(-scheduled // (2 * ranks)))
    rank_tokens = _rank_tokens(chunk, is_decode)
    rank_rows = int(rank_tokens.sum())
    if rank_rows * ranks > MAX_ROWS:
        raise InvalidBatch(
            "num_scheduled_tokens",
            rank_rows * ranks,
            f"at most {MAX_ROWS} rows on all ranks together",
        )
    # Where every padded row is gathered. A request has R times as many of them as rows on one rank.
    row, request = _ranges(rank_tokens * ranks)
    size = chunk[request]
    chunk_number = row // size
    row_in_chunk = row % size
    is_tail = ~is_decode[request] & (chunk_number >= ranks)
    rank = np.where(is_tail, 2 * ranks - 1 - chunk_number, chunk_number)
    chunk_start = _starts(rank_tokens)[request] + np.where(is_tail, size, 0)
    return Partition(
        ranks=ranks,
        scheduled_tokens=_frozen(scheduled),
        computed_tokens=_frozen(computed),
        chunk_tokens=_frozen(chunk),
        is_decode=_frozen(is_decode),
        restore_index=_frozen(rank * rank_rows + chunk_start + row_in_chunk),
        unpad_mask=_frozen(row < scheduled[request]),
    )


def rank_inputs(partition: Partition, rank: int) -> RankInputs:
    """The rows of a step that `rank` computes.

    Raises:
        InvalidBatch: there is no such rank.
    """
    check_integer("rank", rank, 0, partition.ranks - 1)
    scheduled = partition.scheduled_tokens
    row, request = _ranges(partition.rank_tokens)
    size = partition.chunk_tokens[request]
    # The head chunk begins r chunks into the request. The tail chunk begins 2R-1-r chunks into it,
    # and one chunk into this rank's rows.
    skipped_chunks = np.where(row < size, rank, 2 * partition.ranks - 2 - rank)
    unclamped = row + np.where(partition.is_decode[request], 0, skipped_chunks * size)
    is_padding = unclamped >= scheduled[request]
    token = np.minimum(unclamped, scheduled[request] - 1)
    return RankInputs(
        tokens=_frozen(_starts(scheduled)[request] + token),
        req_indices=_frozen(request),
        positions=_frozen(partition.computed_tokens[request] + token),
        is_padding=_frozen(is_padding),
    )


def max_rank_rows(
    max_tokens: int, max_requests: int, *, ranks: int, reorder_threshold: int | None = 1
) -> int:
    """The most rows that a step of so many tokens and requests can give a rank: the size of buffers."""
    decode_tokens = min(_max_decode_tokens(reorder_threshold), max_tokens)
    # A prefill of n tokens gives at most (n + 2R-1) / R rows, a decode n <= reorder_threshold. So a
    # request gives at most n / R and either (2R-1) / R or reorder_threshold·(R-1) / R.
    excess = max(2 * ranks - 1, decode_tokens * (ranks - 1))
    # There are never more than two rows for a token, its own and one of padding.
    return min((max_tokens + max_requests * excess) // ranks, 2 * max_tokens)


def _max_decode_tokens(reorder_threshold: int | None) -> int:
    if reorder_threshold is None:
        return 0
    check_integer("reorder_threshold", reorder_threshold, 0, MAX_ROWS)
    return reorder_threshold


def _rank_tokens(chunk: Ints, is_decode: Bools) -> Ints:
    return np.where(is_decode, chunk, 2 * chunk)


def _starts(lengths: Ints) -> Ints:
    """The start of each of several runs of these lengths that follow one another."""
    return np.cumsum(lengths) - lengths


def _ranges(lengths: Ints) -> tuple[Ints, Ints]:
    """For each element of runs that follow one another, its index in its run, and its run."""
    run = np.repeat(np.arange(len(lengths)), lengths)
    return np.arange(len(run)) - _starts(lengths)[run], run


def _frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array
