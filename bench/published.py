"""The published way of making descriptors, measured: see `bench.published_descriptors`."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from functools import partial

from bench.cases import Case, best_of, request_of
from bench.llama import BLOCK_TOKENS, HEADS, LAYERS, TOKEN_BYTES
from bench.nixl_prep import Registered
from bench.published_descriptors import block_descriptors, descriptor_ids, split_for_rank


@dataclass(frozen=True)
class Published:
    """Figures of the published algorithm, measured with `blocks` blocks; `…_at` are for the blocks of the case."""

    blocks: int
    descriptors: int
    python_s: float
    nixl_prep_s: float | None
    ns_per_descriptor: float
    peak_bytes_per_descriptor: float
    seconds_at: float
    peak_mb_at: float
    request_ms: float
    request_descriptors: int


def measure_published(case: Case, blocks: int, registered: Registered | None = None) -> Published:
    """The same with the published algorithm: descriptors of both sides for every producer rank that is read."""
    sizes = [HEADS // tp * BLOCK_TOKENS * TOKEN_BYTES for tp in (case.consumer_tp, case.producer_tp)]
    at = [registered.local, *registered.remote] if registered else [rank << 44 for rank in range(1, case.readers + 2)]

    def layers(base: int, size: int) -> list[int]:
        return [base + layer * case.blocks * size for layer in range(LAYERS)]

    python_s, nixl_s = 0.0, 0.0
    (seconds,), local = best_of(1, lambda: block_descriptors(layers(at[0], sizes[0]), blocks, sizes[0], sizes[0]))
    python_s += seconds
    (seconds,), whole = best_of(1, lambda: local.tolist() if case.readers > 1 else [])
    python_s += seconds
    for rank in range(case.readers):

        def make(rank: int = rank) -> tuple[object, object]:
            mine = split_for_rank(whole, case.readers, rank) if whole else local
            return mine, block_descriptors(layers(at[rank + 1], sizes[1]), blocks, sizes[1], min(sizes))

        (seconds,), (mine, theirs) = best_of(1, make)
        python_s += seconds
        if registered is not None:
            (seconds,), _ = best_of(1, partial(registered.prepare_local_triples, mine))
            nixl_s += seconds
            (seconds,), _ = best_of(1, partial(registered.prepare_remote_triples, rank, theirs))
            nixl_s += seconds
    descriptors, descriptors_at = (case.readers * count * LAYERS for count in (blocks, case.blocks))
    per_descriptor_s = (python_s + nixl_s) / descriptors
    peak_bytes = _peak_of_published(case, min(blocks, 500))
    request = request_of(case.blocks, seed=1)
    ids = [ids for side in (request.local[0], request.remote[0]) for ids in [side] * case.readers]
    request_s, pairs = best_of(20, lambda: [descriptor_ids(of, LAYERS, case.blocks) for of in ids])
    return Published(
        blocks=blocks,
        descriptors=descriptors,
        python_s=python_s,
        nixl_prep_s=nixl_s if registered is not None else None,
        ns_per_descriptor=per_descriptor_s * 1e9,
        peak_bytes_per_descriptor=peak_bytes,
        seconds_at=per_descriptor_s * descriptors_at,
        peak_mb_at=peak_bytes * descriptors_at / 1e6,
        request_ms=request_s[0] * 1e3,
        request_descriptors=len(pairs[0]) * case.readers,
    )


def _peak_of_published(case: Case, blocks: int) -> float:
    """Most bytes that Python holds at a time, per descriptor; of the split lists, only one rank's live at a time."""
    size = HEADS // case.consumer_tp * BLOCK_TOKENS * TOKEN_BYTES
    tracemalloc.start()
    made: list[object] = [block_descriptors([side << 44] * LAYERS, blocks, size, size) for side in (1, 2)]
    if case.readers > 1:
        whole = block_descriptors([1 << 44] * LAYERS, blocks, size, size).tolist()
        made += [whole, split_for_rank(whole, case.readers, 0)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (case.readers * blocks * LAYERS)
