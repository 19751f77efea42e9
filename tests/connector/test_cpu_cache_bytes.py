"""vLLM's own CPU attention writes a cache; what kvferry calls a cell is then checked byte by byte.

This is the test that lets `layout.discover` believe the strides of CPU attention: inside a cell the backend may pack K
and V as it likes, but a cell must hold everything of its (block, head) and nothing of any other.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvferry.connector.layout import groups_of
from kvferry.plan.blocks import GroupBlocks, pair_blocks
from kvferry.plan.descriptors import descriptor_pairs, descriptor_table
from kvferry.plan.planner import plan_transfer
from kvferry.protocol.geometry import PagedTensor
from tests.connector.caches import config_of, described, full, group, storage_of, views_of
from tests.plan.samples import cell_address, engine

LAYER = "layers.1"
KV_HEADS, QUERY_HEADS = 3, 6
KERNEL_TOKENS = 32


@dataclass(frozen=True)
class Kind:
    """One arrangement of the backend."""

    isa: str
    dtype: torch.dtype
    head_size: int
    cache_dtype: str = "auto"

    def __str__(self) -> str:
        cache = "" if self.cache_dtype == "auto" else f"-{self.cache_dtype}"
        return f"{self.isa}-{str(self.dtype).removeprefix('torch.')}{cache}-{self.head_size}"


KINDS = [
    Kind("vec", torch.bfloat16, 64),
    Kind("vec16", torch.bfloat16, 80),
    Kind("vec", torch.float32, 64),
    Kind("vec16", torch.float32, 80),
    Kind("vec", torch.float16, 64),
]
if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():  # the second asks the kernel for the registers
    KINDS.append(Kind("amx", torch.bfloat16, 64))
if torch.cpu._is_avx512_supported():
    KINDS.append(Kind("vec", torch.bfloat16, 64, "fp8_e4m3"))

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=str)


class Cache:
    """Two layers' caches of one engine, as vLLM allocates them, and one layer's description."""

    def __init__(self, kind: Kind, num_blocks: int, block_size: int = KERNEL_TOKENS) -> None:
        current_platform.import_kernels()
        dtype = kind.dtype if kind.cache_dtype == "auto" else torch.uint8
        spec = full(num_kv_heads=KV_HEADS, head_size=kind.head_size, dtype=dtype, block_size=block_size)
        self.kind = kind
        self.config = config_of(group(spec), num_blocks=num_blocks)
        self.views = views_of(self.config, kernel_block_sizes=[KERNEL_TOKENS])
        self.caches = described(self.config, self.views, f"cpu_attn/{kind.isa}")
        self.view = self.views[LAYER]
        self.bytes = storage_of(self.view)

    @property
    def tensor(self) -> PagedTensor:
        return next(tensor for tensor in self.caches.tensors if tensor.layer == LAYER)

    @property
    def engine(self) -> Any:
        return engine(*self.caches.tensors, groups=groups_of(self.config))

    def cell(self, block: int, head: int) -> slice:
        """Where a cell is in `bytes`, by the description alone."""
        start = cell_address(self.tensor, block, head, 0) - self.bytes.data_ptr()
        return slice(start, start + self.tensor.cell_bytes)

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> None:
        """vLLM's own write, K and V as `[tokens, heads, head_size]`."""
        impl = SimpleNamespace(attn_type="decoder", kv_cache_dtype=self.kind.cache_dtype)
        layer: Any = SimpleNamespace(isa=self.kind.isa, _k_scale_float=1.0, _v_scale_float=1.0)
        CPUAttentionBackendImpl.do_kv_cache_update(impl, layer, key, value, self.view, torch.tensor(slots))

    def attend(self, query: torch.Tensor, blocks: list[int], tokens: int) -> torch.Tensor:
        """vLLM's own attention of the last `len(query)` tokens of a sequence that lies in these kernel blocks."""
        lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([tokens], [0, len(query)]))
        common = {"query_start_loc": starts, "causal": True, "kv_cache_dtype": self.kind.cache_dtype}
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=self.kind.head_size,
            seq_lens=lengths,
            dtype=self.kind.dtype,
            sliding_window_size=-1,
            isa=self.kind.isa,
            enable_kv_split=False,
            **common,
        )
        key, value = self.view.view(len(self.view), KV_HEADS, 2 * KERNEL_TOKENS, -1).chunk(2, dim=2)
        output = torch.full_like(query, float("nan"))
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key,
            value_cache=value,
            output=output,
            seq_lens=lengths,
            scale=0.1,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=torch.tensor([blocks], dtype=torch.int32),
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
            **common,
        )
        return output


def random(kind: Kind, tokens: int, heads: int = KV_HEADS, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, kind.head_size, generator=source).to(kind.dtype)


def slots_of(blocks: list[int], tokens: int) -> list[int]:
    return [blocks[token // KERNEL_TOKENS] * KERNEL_TOKENS + token % KERNEL_TOKENS for token in range(tokens)]


def changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(before != after).ravel()


@pytest.mark.parametrize("head", range(KV_HEADS))
def test_writing_tokens_of_one_head_changes_bytes_of_its_own_cells_only(kind: Kind, head: int) -> None:
    cache = Cache(kind, num_blocks=5)
    blocks, tokens = [3, 1], KERNEL_TOKENS + 7
    key, value = random(kind, tokens), random(kind, tokens, seed=1)
    cache.write(key, value, slots_of(blocks, tokens))
    before = cache.bytes.clone()
    key[:, head], value[:, head] = random(kind, tokens, seed=2)[:, head], random(kind, tokens, seed=3)[:, head]
    cache.write(key, value, slots_of(blocks, tokens))
    where = set(changed(before, cache.bytes).tolist())
    cells = [range(*cache.cell(block, head).indices(len(before))) for block in blocks]
    assert where <= set(cells[0]) | set(cells[1])
    assert len(where & set(cells[0])) > len(cells[0]) / 2, "new numbers change most bytes of a full cell"


def test_a_full_block_fills_its_cells_to_the_last_byte_and_touches_nothing_else(kind: Kind) -> None:
    """Whatever was there before: equal K and V make equal cells, so no byte of a cell is left as it was."""
    key, value = random(kind, KERNEL_TOKENS), random(kind, KERNEL_TOKENS, seed=1)
    seen = []
    for fill in (0x55, 0xAA):
        cache = Cache(kind, num_blocks=4)
        cache.bytes.fill_(fill)
        cache.write(key, value, slots_of([2], KERNEL_TOKENS))
        seen.append(torch.cat([cache.bytes[cache.cell(2, head)] for head in range(KV_HEADS)]).clone())
        for head in range(KV_HEADS):
            cache.bytes[cache.cell(2, head)] = fill
        assert bool((cache.bytes == fill).all())
    assert torch.equal(*seen)


def move(source: Cache, target: Cache, theirs: list[int], ours: list[int], tokens: int) -> int:
    """What the worker does, with memmove for NIXL: plan, descriptors, reads. Returns the bytes that moved."""
    route = plan_transfer(target.engine, 0, source.engine).routes[0]
    sides = []
    for cache, ids in ((target, ours), (source, theirs)):
        group_ = cache.engine.groups[0]
        sides.append(GroupBlocks(ids, group_, KERNEL_TOKENS, cache.tensor.blocks))
    table = descriptor_table(route, 0, 0)
    wanted = descriptor_pairs(table, {0: pair_blocks(0, sides[0], sides[1], 0, tokens, tokens)})
    addresses = [
        np.concatenate([row[0] + row[3] * np.arange(row[4]) for row in rows])
        for rows in (table.local_rows, table.remote_rows)
    ]
    lengths = np.repeat(table.lengths, table.local_rows[:, 4])
    for here, there in zip(wanted.local.tolist(), wanted.remote.tolist(), strict=True):
        ctypes.memmove(int(addresses[0][here]), int(addresses[1][there]), int(lengths[here]))
    return wanted.num_bytes


def test_a_sequence_moved_by_the_plan_gives_the_same_attention_from_other_blocks_of_another_cache(kind: Kind) -> None:
    tokens = 2 * KERNEL_TOKENS + 9
    key, value = random(kind, tokens), random(kind, tokens, seed=1)
    query = random(kind, 5, QUERY_HEADS, seed=2)
    source, target = Cache(kind, num_blocks=5), Cache(kind, num_blocks=9)
    theirs, ours = [4, 1, 3], [7, 8, 2]
    source.write(key, value, slots_of(theirs, tokens))
    expected = source.attend(query, theirs, tokens)
    assert bool(torch.isfinite(expected).all())
    target.bytes.fill_(0)
    assert not torch.equal(target.attend(query, ours, tokens), expected)
    before = target.bytes.clone()
    moved = move(source, target, theirs, ours, tokens)
    assert moved == 2 * 3 * KV_HEADS * source.tensor.cell_bytes
    assert torch.equal(target.attend(query, ours, tokens), expected)
    written = torch.zeros(len(before), dtype=torch.bool)
    for tensor in target.caches.tensors:
        for block in ours:
            start = cell_address(tensor, block, 0, 0) - target.bytes.data_ptr()
            written[start : start + KV_HEADS * tensor.cell_bytes] = True
    assert torch.equal(target.bytes[~written], before[~written])


def test_every_cell_counts_for_the_attention(kind: Kind) -> None:
    """Otherwise the test above would also pass with a cell left out."""
    tokens = 2 * KERNEL_TOKENS
    cache = Cache(kind, num_blocks=4)
    cache.write(random(kind, tokens), random(kind, tokens, seed=1), slots_of([3, 1], tokens))
    query = random(kind, 1, QUERY_HEADS, seed=2)
    expected = cache.attend(query, [3, 1], tokens)
    for block in (3, 1):
        for head in range(KV_HEADS):
            kept = cache.bytes[cache.cell(block, head)].clone()
            cache.bytes[cache.cell(block, head)] = 0
            differs = (cache.attend(query, [3, 1], tokens) != expected).any(dim=2).ravel().tolist()
            per_kv_head = QUERY_HEADS // KV_HEADS
            assert [n // per_kv_head == head for n in range(QUERY_HEADS)] == differs
            cache.bytes[cache.cell(block, head)] = kept


def test_scheduler_blocks_of_several_kernel_blocks_move_as_well(kind: Kind) -> None:
    tokens = 4 * KERNEL_TOKENS - 3
    query = random(kind, 2, QUERY_HEADS, seed=2)
    source, target = Cache(kind, num_blocks=6), Cache(kind, num_blocks=4, block_size=2 * KERNEL_TOKENS)
    theirs, ours = [5, 2, 4, 1], [3, 1]
    source.write(random(kind, tokens), random(kind, tokens, seed=1), slots_of(theirs, tokens))
    move(source, target, theirs, ours, tokens)
    assert torch.equal(target.attend(query, [6, 7, 2, 3], tokens), source.attend(query, theirs, tokens))
