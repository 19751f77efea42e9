"""The required effect on a consumer worker's memory, and checks of a plan: its copies have this effect alone, and its
routes notify every producer worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup, EngineDescription
from tests.geometry.cells import (
    NULL_BLOCK,
    UNNAMED,
    Cells,
    Ints,
    Memory,
    byte_addresses,
    byte_names,
    cells_of,
    spell,
)
from tests.geometry.requests import Request

Bools = npt.NDArray[np.bool_]

_UNUSED = -2
"""The name of a byte in the request's own blocks that no token has filled."""


@dataclass(frozen=True)
class CopyList:
    """Elementary copies from one producer worker: addresses there, addresses here, bytes."""

    producer: int
    src: Ints
    dst: Ints
    num_bytes: Ints


@dataclass(frozen=True)
class Wanted:
    """One consumer worker's memory as the request must leave it; arrays of one element a byte of memory.

    Attributes:
        names: what belongs in every byte of the request's tokens.
        required: the bytes of tokens that are needed.
        optional: bytes of a window's tokens that nothing attends to any more: right, or not written.
        tail: bytes of loaded blocks behind the last token: anything may be written before they are zeroed.
        late: the same of blocks that are loaded only for optional bytes, if at all.
        loaded: bytes of blocks that hold needed ones.
    """

    names: Ints
    required: Bools
    optional: Bools
    tail: Bools
    late: Bools
    loaded: Bools


def number_names(consumer: EngineDescription) -> dict[tuple[str, str], int]:
    """A number for every (layer, kind) that the consumer has: the producer's others are not needed."""
    found = {tensor.name for worker in consumer.workers for tensor in worker.tensors}
    return {name: number for number, name in enumerate(sorted(found))}


def produced(
    tensors: Sequence[PagedTensor],
    groups: Sequence[CacheGroup],
    memory: Memory,
    request: Request,
    numbers: Mapping[tuple[str, str], int],
) -> Ints:
    """A producer worker's memory when it holds the request, int64 `[bytes]`."""
    names = np.full(memory.num_bytes, UNNAMED, np.int64)
    cache: dict[object, Cells] = {}
    for tensor in tensors:
        if tensor.name not in numbers:
            continue
        group = groups[tensor.group]
        ids = request.remote[tensor.group]
        total = -(-request.num_tokens // (group.block_tokens * tensor.interleave.ranks))
        cells = _cells(cache, tensor, group, ids, total - len(ids))
        found = byte_names(tensor, cells, numbers)
        found[_first_tokens(cells, group) >= request.num_tokens] = _UNUSED
        names[memory.index(byte_addresses(tensor, cells))] = found
    return names


def wanted(
    tensors: Sequence[PagedTensor],
    groups: Sequence[CacheGroup],
    memory: Memory,
    request: Request,
    numbers: Mapping[tuple[str, str], int],
) -> Wanted:
    """The content of a consumer worker's memory that the request requires."""
    names = np.full(memory.num_bytes, UNNAMED, np.int64)
    required, optional, tail, late, in_loaded = (
        np.zeros(memory.num_bytes, np.bool_) for _ in range(5)
    )
    cache: dict[object, Cells] = {}
    for tensor in tensors:
        group = groups[tensor.group]
        cells = _cells(cache, tensor, group, request.local[tensor.group], 0)
        index = memory.index(byte_addresses(tensor, cells))
        names[index] = byte_names(tensor, cells, numbers)
        if group.policy == "state":
            required[index] = True
            continue
        first, last = cells.tokens[:, 0], cells.tokens[:, -1]
        # Of a window only the last tokens are attended to; the prompt's last one may be computed again.
        needed_from = max(request.first_token, request.num_tokens - group.window_tokens)
        start = needed_from if group.policy == "window" else request.first_token
        is_needed = (last >= start) & (first < request.stop_token)
        is_wanted = (first >= request.first_token) & (first < request.stop_token)
        loaded, perhaps = (
            np.isin(cells.blocks, cells.blocks[some]) for some in (is_needed, is_wanted)
        )
        required[index[is_needed]] = True
        optional[index[is_wanted & ~is_needed]] = True
        tail[index[(first >= request.stop_token) & loaded]] = True
        late[index[(first >= request.stop_token) & perhaps & ~loaded]] = True
        in_loaded[index[loaded]] = True
    return Wanted(names, required, optional, tail, late, in_loaded)


def check_copies(
    copies: Sequence[CopyList],
    sources: Sequence[Ints],
    source_memories: Sequence[Memory],
    target: Wanted,
    memory: Memory,
    numbers: Mapping[tuple[str, str], int],
) -> None:
    """Apply all copies to one consumer worker's memory and check every byte.

    Raises:
        AssertionError: a needed byte is missing, wrong or written twice; another byte is written; a byte is read that
            is not the request's.
    """
    result = np.full(memory.num_bytes, UNNAMED, np.int64)
    writes = np.zeros(memory.num_bytes, np.int64)
    for one in copies:
        src = source_memories[one.producer].index(_each_byte(one.src, one.num_bytes))
        dst = memory.index(_each_byte(one.dst, one.num_bytes))
        read = sources[one.producer][src]
        assert not (read == UNNAMED).any(), (
            f"producer {one.producer}: bytes are read that are not the request's"
        )
        result[dst] = read
        writes += np.bincount(dst, minlength=memory.num_bytes)
    _expect(
        writes[target.required] == 1,
        target,
        target.required,
        "is not written exactly once",
        numbers,
    )
    wrong = target.required & (result != target.names)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        found = (
            "an unused byte" if result[at] == _UNUSED else spell(result[at], numbers)
        )
        raise AssertionError(
            f"where {spell(target.names[at], numbers)} belongs is {found}"
        )
    permitted = target.required | target.optional | target.tail | target.late
    assert not writes[~permitted].any(), (
        f"{int((writes[~permitted] > 0).sum())} bytes of others are written"
    )
    assert not (writes > 1).any(), "a byte is written twice"
    kept = target.optional & (writes > 0)
    assert (result[kept] == target.names[kept]).all(), (
        "a token before the window is wrong"
    )


def check_routes(plans: Sequence[TransferPlan], producer: EngineDescription) -> None:
    """Every producer worker is notified by `expected` workers, and replicas serve equally many readers.

    Raises:
        AssertionError: naming the producer worker.
    """
    tellers: Counter[int] = Counter()
    for plan in plans:
        named = [route.worker for route in plan.routes]
        assert len(set(named)) == len(named), (
            f"worker {plan.worker} has two routes to one producer worker"
        )
        tellers.update(named)
    read = {route.worker for plan in plans for route in plan.routes if route.slices}
    for worker in range(len(producer.workers)):
        assert tellers[worker], f"no worker notifies producer worker {worker}"
        assert worker in read or tellers[worker] == 1, (
            f"{tellers[worker]} release producer worker {worker}"
        )
    for plan in plans:
        for route in plan.routes:
            assert route.expected == tellers[route.worker], (
                f"producer worker {route.worker} expects {route.expected}"
            )
            assert route.place == producer.workers[route.worker].place
            assert route.slices or route.worker not in read, (
                f"producer worker {route.worker} is released and read"
            )
    _check_balance(plans, producer)


def _check_balance(plans: Sequence[TransferPlan], producer: EngineDescription) -> None:
    """Of the workers that hold the same tokens of a head, each serves as many readers of it as any other, or one more.

    Raises:
        AssertionError: naming the tensor and the head.
    """
    readers: Counter[tuple[tuple[str, str], int, int]] = Counter()
    for plan in plans:
        for route in plan.routes:
            for item in route.slices:
                readers.update(
                    (item.local.name, head, route.worker)
                    for head in range(item.heads.start, item.heads.stop)
                )
    replicas: dict[object, list[int]] = {}
    for worker, description in enumerate(producer.workers):
        for tensor in description.tensors:
            for head in range(tensor.heads.start, tensor.heads.stop):
                times = readers[tensor.name, head, worker]
                replicas.setdefault(
                    (tensor.name, head, tensor.interleave.rank), []
                ).append(times)
    for key, served in replicas.items():
        assert max(served) - min(served) <= 1, (
            f"replicas of {key} serve {served} readers"
        )


def _expect(
    good: Bools,
    target: Wanted,
    mask: Bools,
    what: str,
    numbers: Mapping[tuple[str, str], int],
) -> None:
    if not good.all():
        name = target.names[mask][int(np.flatnonzero(~good)[0])]
        raise AssertionError(
            f"{spell(name, numbers)} {what}; {int((~good).sum())} bytes in all"
        )


def _each_byte(starts: Ints, lengths: Ints) -> Ints:
    """The addresses of all bytes of runs, run after run."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(
        np.repeat(starts - (ends - lengths), lengths) + np.arange(total), np.int64
    )


def _cells(
    cache: dict[object, Cells],
    tensor: PagedTensor,
    group: CacheGroup,
    ids: Sequence[int],
    leading: int,
) -> Cells:
    """The cells of a tensor; those of tensors that divide their tokens alike are worked out once."""
    key = (tensor.group, tensor.block_tokens, tensor.tile_tokens, tensor.interleave)
    found = cache.get(key)
    if found is None:
        if group.policy == "state":
            ids = [block for block in ids if block != NULL_BLOCK]
        found = cells_of(tensor, group.policy, ids, leading, group.block_tokens)
        cache[key] = found
    return found


def _first_tokens(cells: Cells, group: CacheGroup) -> Ints:
    """The first token of every cell; a state's is there whatever the number of tokens is."""
    return (
        np.full(len(cells.blocks), -1)
        if group.policy == "state"
        else cells.tokens[:, 0]
    )
