"""Caches as vLLM makes them: specs, configuration of the groups, allocation and views."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.connector.layout.block_layout import BY_HEAD, OPAQUE, BlockLayout
from kvferry.connector.layout.discovery import discover
from kvferry.connector.layout.sharding import Sharding
from kvferry.protocol.geometry import PagedTensor
from kvferry.worker.caches import KvCaches
from tests.harness.core.configs import vllm_config

try:
    from vllm.v1.core import kv_cache_planning as planning  # 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

PATTERNS = {
    "cpu_attn/vec": "columns",
    "cpu_attn/vec16": "columns",
    "cpu_mla": "latent",
    "gpu_rows": "rows",
}
"""The probe's results for the backends that it recognises (`test_cache_probe`); other CPU attention is `BY_HEAD`."""

ALONE = Sharding(total_heads=2, rank=0, size=1)


def full(**changed: Any) -> Any:
    usual = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": torch.bfloat16,
    }
    return FullAttentionSpec(**{**usual, **changed})


def group(spec: Any, *layers: str, **changed: Any) -> Any:
    return KVCacheGroupSpec(list(layers or ("layers.0", "layers.1")), spec, **changed)


def config_of(*groups: Any, layout: str = "LBHNC", num_blocks: int = 5) -> Any:
    """The configuration that vLLM's engine core derives from these groups, with so many blocks."""
    stub = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    return planning.get_kv_cache_config_from_groups(stub, list(groups), 1 << 24)


def views_of(
    config: Any, layout: str = "LBHNC", kernel_block_sizes: Sequence[int] | None = None
) -> Any:
    """By layer the view `[B, H, N, C]` that vLLM registers, filled with bytes that differ from their neighbours.

    Bytes of a block's unused tail must be finite numbers, as they always are in an engine: attention multiplies them
    by zero.
    """
    sizes = list(kernel_block_sizes) if kernel_block_sizes is not None else None
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout], sizes)
    for view in views.values():
        raw = storage_of(view)
        raw.copy_(torch.arange(len(raw)) % 119)
    return views


def storage_of(view: Any) -> torch.Tensor:
    """The whole allocation under a view, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def described(
    config: Any,
    views: Any,
    packing: str | BlockLayout = "cpu_attn/vec",
    sharding: Sharding = ALONE,
) -> KvCaches:
    block_layout = layout_of_packing(packing) if isinstance(packing, str) else packing
    return discover(views, config, dict.fromkeys(views, block_layout), sharding)


def layout_of_packing(packing: str) -> BlockLayout:
    """The probe's result for a backend."""
    unknown = BY_HEAD if packing.startswith("cpu_attn/") else OPAQUE
    return BlockLayout(packing, PATTERNS.get(packing, unknown))


def configs_for(
    stages: Sequence[dict[str, Any]], layout: str = "LBHNC", num_blocks: int = 40
) -> Any:
    """The configurations that vLLM makes of a model's cache specs: groups, pages of one size, the allocation.

    Args:
        stages: the specs of the layers of every pipeline stage.
        num_blocks: enough for the longest sequence, 512 tokens.
    """
    vllm = vllm_config("NixlConnector", module="kvferry.connector")
    vllm.cache_config.kv_cache_layout = layout
    vllm.cache_config.num_gpu_blocks_override = num_blocks
    specs = [dict(of_stage) for of_stage in stages]
    # 0.33 groups the layers of the whole model first.
    groups = []
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups.append(planning.get_global_kv_cache_groups(vllm, specs))
    memory = [1 << 30] * len(stages)
    return planning.get_kv_cache_configs(vllm, specs, memory, *groups)


def bytes_of(tensor: PagedTensor, block: int, head: int, token: int) -> Any:
    """Addresses of all bytes of the cell that holds a token, in the cell's order, int64: the definition."""
    start = (
        tensor.base
        + block * tensor.block_stride
        + head * tensor.head_stride
        + token // tensor.tile_tokens * tensor.tile_stride
    )
    inside = np.arange(tensor.cell_bytes)
    if not tensor.element_bytes:
        return start + inside
    return (
        start
        + inside // tensor.element_bytes * tensor.element_stride
        + inside % tensor.element_bytes
    )


def all_bytes_of(tensor: PagedTensor) -> Any:
    """The same of every cell, one after another."""
    return np.concatenate(
        [
            bytes_of(tensor, block, head, tile * tensor.tile_tokens)
            for block in range(tensor.blocks)
            for head in range(len(tensor.heads))
            for tile in range(tensor.tiles)
        ]
    )
