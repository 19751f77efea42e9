"""Run by a test in its own process: the probe's result for vLLM's Triton attention, with an interpreted kernel.

vLLM's CPU build switches Triton off, and off it stays in a process. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


def main() -> None:
    import torch
    import triton.backends as triton

    triton.backends["cpu"] = SimpleNamespace(
        driver=SimpleNamespace(is_active=lambda: True)
    )
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as kernels

    from tests.connector.written_caches import (
        WIDTH,
        Written,
        float8_layer,
        layer_of,
        spec_of,
    )

    kernels._is_supported_kv_cache_dtype = lambda _: True
    reported: dict[str, Any] = {}
    for cache_dtype, layout in (
        ("auto", "LBHNC"),
        ("auto", "LBNHC"),
        ("auto", "BHLNC"),
        ("fp8", "LBHNC"),
    ):
        impl: Any = TritonAttentionImpl.__new__(TritonAttentionImpl)
        impl.attn_type, impl.head_size, impl.kv_cache_dtype = (
            "decoder",
            WIDTH,
            cache_dtype,
        )
        impl._is_per_token_head_quant, impl.fp8_dtype = False, torch.float8_e4m3fn
        impl._set_kv_ptr_range = False  # 0.33, for ROCm
        layer = float8_layer(impl, 0.5, 0.25)
        if cache_dtype == "auto":
            layer = layer_of(
                impl, _k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0)
            )
        found = Written(layer, spec_of(cache_dtype), layout).block_layout()
        reported[f"{cache_dtype} {layout}"] = [found.pattern, found.dtype, found.scales]
    json.dump(reported, sys.stdout)


if __name__ == "__main__":
    main()
