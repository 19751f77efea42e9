"""vLLM's own CPU MLA writes a cache; a token's cell must be the row that was written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvferry.connector.layout.discovery import discover
from kvferry.connector.layout.probe import block_layouts_of
from kvferry.connector.layout.sharding import Sharding
from tests.connector.caches import bytes_of, config_of, group, storage_of, views_of

LATENT, ROPE, BLOCK = 512, 64, 16
LAYER = "layers.1"


def written(dtype: torch.dtype, slots: list[int]) -> tuple[Any, Any, torch.Tensor]:
    """A cache into which vLLM wrote random rows `[latent | rope]`, its description, and the rows."""
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=LATENT + ROPE, dtype=dtype)
    config = config_of(group(spec), layout="LBNHC")
    views = views_of(config, "LBNHC")
    layer = SimpleNamespace(
        impl=CPUMLAImpl.__new__(CPUMLAImpl),
        get_attn_backend=lambda: CPUMLABackend,
        kv_lora_rank=LATENT,
        kv_cache_dtype="auto",
        _k_scale=torch.ones(1),
    )
    block_layouts = block_layouts_of(dict.fromkeys(views, layer), views, config, dtype)
    found = discover(views, config, block_layouts, Sharding(total_heads=1, rank=0, size=1))
    (tensor,) = (one for one in found.tensors if one.layer == LAYER)
    rows = torch.randn(len(slots), LATENT + ROPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    # As vLLM's MLA layer does: the write sees the view without its axis of heads.
    CPUMLAImpl.do_kv_cache_update(
        SimpleNamespace(),
        rows[:, :LATENT],
        rows[:, None, LATENT:],
        views[LAYER].squeeze(1),
        torch.tensor(slots),
        "auto",
        torch.ones(1),
    )
    return views[LAYER], tensor, rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_token_is_a_cell_with_the_very_bytes_that_were_written_and_nothing_else_changes(dtype: torch.dtype) -> None:
    slots = [3 * BLOCK + 5, BLOCK, 2 * BLOCK - 1, -1]
    view, tensor, rows = written(dtype, slots)
    whole = storage_of(view)
    untouched = torch.arange(len(whole)) % 119
    assert (tensor.kind, tensor.tile_tokens, tensor.format.packing) == ("mla", 1, "plain")
    for slot, row in zip(slots[:-1], rows, strict=False):
        where = torch.from_numpy(bytes_of(tensor, slot // BLOCK, 0, slot % BLOCK) - whole.data_ptr())
        assert torch.equal(whole[where], row.view(torch.uint8))
        whole[where] = untouched[where].to(torch.uint8)
    assert torch.equal(whole, untouched.to(torch.uint8))
