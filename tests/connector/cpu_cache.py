"""A cache that vLLM's own CPU attention writes and reads, in every layout that this machine's processor has."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
)
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from kvferry.connector.layout.discovery import discover
from kvferry.connector.layout.probe import block_layouts_of
from kvferry.connector.layout.sharding import Sharding
from kvferry.protocol.geometry import PagedTensor
from tests.connector.caches import (
    bytes_of,
    config_of,
    full,
    group,
    storage_of,
    views_of,
)

LAYER = "layers.1"
KV_HEADS, QUERIES_PER_HEAD = 3, 2
QUERY_HEADS = KV_HEADS * QUERIES_PER_HEAD
ALONE = Sharding(KV_HEADS, 0, 1)


@dataclass(frozen=True)
class Kind:
    """One block layout of the backend."""

    isa: str
    dtype: torch.dtype
    head_size: int
    cache_dtype: str = "auto"

    @property
    def plain(self) -> bool:
        """Whether a token of a head is a cell."""
        return self.isa.startswith("vec")

    def __str__(self) -> str:
        cache = "" if self.cache_dtype == "auto" else f"-{self.cache_dtype}"
        return f"{self.isa}-{str(self.dtype).removeprefix('torch.')}{cache}-{self.head_size}"


KINDS = [
    Kind("vec", torch.bfloat16, 64),
    Kind("vec16", torch.bfloat16, 80),
    Kind("vec", torch.float32, 64),
    Kind("vec16", torch.float32, 80),
    Kind("vec", torch.float16, 64),
    Kind("vec16", torch.float16, 80),
]
if (
    torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
):  # the second asks the kernel for the registers
    KINDS.append(Kind("amx", torch.bfloat16, 64))
if torch.cpu._is_avx512_supported():
    KINDS.append(Kind("vec", torch.bfloat16, 64, "fp8_e4m3"))
PLAIN_KINDS = [kind for kind in KINDS if kind.plain]


class Cache:
    """Two layers' caches of one worker, as vLLM allocates them, and their description.

    Args:
        tokens: per kernel block; `block_size` is that of the scheduler's blocks.
        sharding: the worker holds `total_heads / size` of the model's heads.
    """

    def __init__(
        self,
        kind: Kind,
        num_blocks: int,
        *,
        tokens: int = 32,
        block_size: int = 0,
        sharding: Sharding = ALONE,
    ) -> None:
        current_platform.import_kernels()
        dtype = kind.dtype if kind.cache_dtype == "auto" else torch.uint8
        self.kind, self.tokens, self.sharding = kind, tokens, sharding
        self.heads = sharding.total_heads // sharding.size
        self.layer = layer_of(kind)
        shape: dict[str, Any] = {
            "num_kv_heads": self.heads,
            "head_size": kind.head_size,
            "dtype": dtype,
        }
        shape["kv_quant_mode"] = get_kv_quant_mode(kind.cache_dtype)
        self.config = config_of(
            group(full(**shape, block_size=block_size or tokens)), num_blocks=num_blocks
        )
        self.views = views_of(self.config, kernel_block_sizes=[tokens])
        block_layouts = block_layouts_of(
            dict.fromkeys(self.views, self.layer), self.views, self.config, kind.dtype
        )
        self.caches = discover(self.views, self.config, block_layouts, sharding)
        self.view = self.views[LAYER]
        self.bytes = storage_of(self.view)

    @property
    def tensors(self) -> list[PagedTensor]:
        return [tensor for tensor in self.caches.tensors if tensor.layer == LAYER]

    def where(self, kind: str, block: int, head: int, token: int) -> torch.Tensor:
        """The cell that holds a token, as indices into `bytes`, by the description alone."""
        tensor = next(tensor for tensor in self.tensors if tensor.kind == kind)
        return torch.from_numpy(
            bytes_of(tensor, block, head, token) - self.bytes.data_ptr()
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> None:
        """vLLM's own write, K and V as `[tokens, heads, head_size]`."""
        self.layer.impl.do_kv_cache_update(
            self.layer, key, value, self.view, torch.tensor(slots)
        )

    def attend(
        self, query: torch.Tensor, blocks: list[int], tokens: int
    ) -> torch.Tensor:
        """vLLM's own attention of the last `len(query)` tokens of a sequence that lies in these kernel blocks."""
        lengths, starts = (
            torch.tensor(x, dtype=torch.int32) for x in ([tokens], [0, len(query)])
        )
        common = {
            "query_start_loc": starts,
            "causal": True,
            "kv_cache_dtype": self.kind.cache_dtype,
        }
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=self.heads * QUERIES_PER_HEAD,
            num_kv_heads=self.heads,
            head_dim=self.kind.head_size,
            seq_lens=lengths,
            dtype=self.kind.dtype,
            sliding_window_size=-1,
            isa=self.kind.isa,
            enable_kv_split=False,
            **common,
        )
        key, value = self.view.view(
            len(self.view), self.heads, 2 * self.tokens, -1
        ).chunk(2, dim=2)
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


def layer_of(kind: Kind) -> Any:
    """The attributes of vLLM's attention layer that kvferry and the cache write read."""
    impl: Any = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", kind.cache_dtype
    return SimpleNamespace(
        impl=impl,
        isa=kind.isa,
        kv_cache_dtype=kind.cache_dtype,
        get_attn_backend=lambda: CPUAttentionBackend,
        _k_scale=torch.tensor(1.0),
        _v_scale=torch.tensor(1.0),
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )


def random(
    kind: Kind, tokens: int, heads: int = KV_HEADS, seed: int = 0
) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, kind.head_size, generator=source).to(kind.dtype)


def holds(kind: Kind, kept: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Whether these bytes of the cache are these numbers; for float8, with scales of one, up to vLLM's rounding."""
    if kind.cache_dtype == "auto":
        return torch.equal(kept, numbers.contiguous().view(torch.uint8))
    return torch.allclose(
        kept.view(torch.float8_e4m3fn).float(), numbers.float(), rtol=1 / 8, atol=2**-8
    )


def slots_of(blocks: list[int], tokens: int, block_tokens: int = 32) -> list[int]:
    return [
        blocks[token // block_tokens] * block_tokens + token % block_tokens
        for token in range(tokens)
    ]
