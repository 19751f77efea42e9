"""The brute-force model of a cache, written from the definition of a paged tensor and from nothing else.

Every byte that a cache holds has a name: (layer, kind, global head, tokens of its cell, index in the cell). A name is
packed into one integer, so that a whole cache is an array of names and "the right byte" is equality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.protocol.geometry import Interleave, PagedTensor

Ints = npt.NDArray[np.int64]

NULL_BLOCK = 0
UNNAMED = -1
"""Content of memory outside the request's bytes."""

_BYTE_BITS, _TOKEN_BITS, _HEAD_BITS = 12, 13, 10


@dataclass(frozen=True)
class Cells:
    """The cells of one request in one tensor, all local heads.

    Attributes:
        blocks: kernel blocks, int64 `[n]`.
        tiles: tiles in their blocks, int64 `[n]`.
        tokens: tokens of each cell, int64 `[n, tile_tokens]`; of a state the one token 0.
    """

    blocks: Ints
    tiles: Ints
    tokens: Ints


def token_of(slots: Ints, interleave: Interleave) -> Ints:
    """The tokens in a worker's local slots: the inverse of the definition.

    Token `t` is on rank `(t div I) mod S`, in slot `(t div (I·S))·I + t mod I`.

    Example: 2 ranks, runs of 4: rank 1 has the tokens 4, 5, 6, 7, 12, 13 … in its slots 0, 1, 2 …
    """
    run, ranks = interleave.run_tokens, interleave.ranks
    return (slots // run) * (run * ranks) + interleave.rank * run + slots % run


def cells_of(
    tensor: PagedTensor,
    policy: str,
    ids: Sequence[int],
    leading: int,
    block_tokens: int,
) -> Cells:
    """The cells of the scheduler blocks `ids`, null blocks apart, in the order of the sequence.

    Args:
        leading: scheduler blocks of the sequence before the first of `ids`.
        block_tokens: local slots per scheduler block.
    """
    if policy == "state":
        # The last block holds the state of the whole sequence, in one cell.
        return Cells(
            np.array([ids[-1]]), np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
        )
    held = np.flatnonzero(np.asarray(ids) != NULL_BLOCK)
    ratio, tiles = block_tokens // tensor.block_tokens, tensor.tiles
    # [held block, kernel block in it, tile in that]
    shape = (len(held), ratio, tiles)
    kernel = (
        np.asarray(ids, np.int64)[held][:, None, None] * ratio
        + np.arange(ratio)[None, :, None]
    )
    first_slot = (held + leading)[:, None, None] * block_tokens + np.arange(ratio)[
        None, :, None
    ] * tensor.block_tokens
    tile = np.arange(tiles)[None, None, :]
    slots = (first_slot + tile * tensor.tile_tokens)[..., None] + np.arange(
        tensor.tile_tokens
    )
    return Cells(
        np.broadcast_to(kernel, shape).ravel(),
        np.broadcast_to(tile, shape).ravel(),
        token_of(slots.reshape(-1, tensor.tile_tokens), tensor.interleave),
    )


def byte_addresses(tensor: PagedTensor, cells: Cells) -> Ints:
    """The address of every byte, int64 `[cells, local heads, cell_bytes]`: the definition, word for word."""
    byte = np.arange(tensor.cell_bytes)
    if tensor.element_bytes:
        byte = (
            byte // tensor.element_bytes * tensor.element_stride
            + byte % tensor.element_bytes
        )
    return np.asarray(
        tensor.base
        + (cells.blocks * tensor.block_stride + cells.tiles * tensor.tile_stride)[
            :, None, None
        ]
        + (np.arange(len(tensor.heads)) * tensor.head_stride)[None, :, None]
        + byte[None, None, :],
        dtype=np.int64,
    )


def byte_names(
    tensor: PagedTensor, cells: Cells, numbers: Mapping[tuple[str, str], int]
) -> Ints:
    """The name of every byte, int64 `[cells, local heads, cell_bytes]`.

    Args:
        numbers: a number for every (layer, kind).
    """
    first, extra = cells.tokens[:, 0], cells.tokens[:, -1] - cells.tokens[:, 0]
    head = np.arange(tensor.heads.start, tensor.heads.stop)
    name = np.full(1, numbers[tensor.name], np.int64)
    name = (name << _HEAD_BITS) + head
    tokens = (first << _TOKEN_BITS) + extra
    name = (name[None, :] << (2 * _TOKEN_BITS)) + tokens[:, None]
    return np.asarray(
        (name[:, :, None] << _BYTE_BITS) + np.arange(tensor.cell_bytes), dtype=np.int64
    )


def number_of(names: Ints) -> Ints:
    """The numbers of the (layer, kind) of named bytes; negative where bytes have no name."""
    return names >> (_BYTE_BITS + 2 * _TOKEN_BITS + _HEAD_BITS)


def head_of(names: Ints) -> Ints:
    """The global heads of named bytes."""
    return (names >> (_BYTE_BITS + 2 * _TOKEN_BITS)) & ((1 << _HEAD_BITS) - 1)


def byte_of(names: Ints) -> Ints:
    """The indices of named bytes in their cells."""
    return names & ((1 << _BYTE_BITS) - 1)


def spell(name: int, numbers: Mapping[tuple[str, str], int]) -> str:
    """A name in words."""
    if name == UNNAMED:
        return "a byte that is not the request's"
    rest, byte = divmod(int(name), 1 << _BYTE_BITS)
    rest, extra = divmod(rest, 1 << _TOKEN_BITS)
    rest, first = divmod(rest, 1 << _TOKEN_BITS)
    number, head = divmod(rest, 1 << _HEAD_BITS)
    layer, kind = next(name for name, found in numbers.items() if found == number)
    tokens = f"token {first}" if not extra else f"tokens {first}…{first + extra}"
    return f"{layer}/{kind} head {head} {tokens} byte {byte}"


class Memory:
    """The allocations of one worker, one array element a byte.

    Args:
        addresses, sizes: of every allocation.
    """

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        order = np.argsort(np.asarray(addresses, np.int64))
        self._starts = np.asarray(addresses, np.int64)[order]
        self._sizes = np.asarray(sizes, np.int64)[order]
        self._offsets = np.concatenate(([0], np.cumsum(self._sizes)))
        self.num_bytes = int(self._offsets[-1])

    def index(self, addresses: Ints) -> Ints:
        """Where in an array of `num_bytes` elements every address is. Raises IndexError outside of the memory."""
        if not addresses.size:
            return np.zeros(addresses.shape, np.int64)
        if not len(self._starts):
            raise IndexError("an address of a worker that has no memory")
        found = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = addresses - self._starts[found]
        if bool(((found < 0) | (inside >= self._sizes[found])).any()):
            raise IndexError("an address outside of the worker's memory")
        return np.asarray(self._offsets[found] + inside, np.int64)
