"""The probe's results for vLLM's own backends: on this machine's processor, and under an interpreter.

Those of GPUs are tried on one by `scripts/gpu_check/backends.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvferry.connector.layout.block_layout import BY_HEAD, OPAQUE
from tests.connector.cpu_cache import KINDS, Kind
from tests.connector.cpu_cache import layer_of as cpu_layer_of
from tests.connector.written_caches import HEADS, WIDTH, Written, layer_of, spec_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def impl_of(module: str, name: str, **attributes: Any) -> Any:
    """A backend's implementation, with the attributes that its cache write reads."""
    cls = getattr(pytest.importorskip(f"vllm.v1.attention.backends.{module}"), name)
    impl = cls.__new__(cls)
    for attribute, value in {
        "attn_type": "decoder",
        "head_size": WIDTH,
        "kv_cache_dtype": "auto",
        **attributes,
    }.items():
        setattr(impl, attribute, value)
    return impl


def scaled_layer(impl: Any) -> Any:
    return layer_of(
        impl,
        kv_cache_dtype="auto",
        _k_scale=torch.tensor(1.0),
        _v_scale=torch.tensor(1.0),
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cpu_attention_keeps_k_by_columns_or_at_least_its_heads_apart(
    kind: Kind,
) -> None:
    current_platform.import_kernels()
    cache_dtype = kind.cache_dtype
    spec = spec_of(cache_dtype, block_size=32, head_size=kind.head_size)
    if cache_dtype == "auto":
        spec = spec_of(block_size=32, head_size=kind.head_size, dtype=kind.dtype)
    found = Written(cpu_layer_of(kind), spec, dtype=kind.dtype).block_layout()
    assert found.pattern == ("columns" if kind.plain else BY_HEAD)
    assert found.packing.startswith(f"cpu_attn/{kind.isa}")


def test_an_instruction_set_that_the_processor_lacks_is_opaque() -> None:
    """vLLM's kernel refuses; the engine starts nevertheless."""
    assert CPUAttentionBackend.get_name() == "CPU_ATTN"
    layer = cpu_layer_of(Kind("no such set", torch.bfloat16, 64))
    assert (
        Written(layer, spec_of(block_size=32, head_size=64)).block_layout().pattern
        == OPAQUE
    )


def stand_in(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    dtype: str,
    *scales: Any,
) -> None:
    """The kernel that most backends of GPUs call, `[B, N, H, D]` caches of any strides; the CPU build lacks it."""
    blocks, tokens = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, tokens], value_cache[blocks, tokens] = key, value


def stand_in_mla(
    latent: Any,
    rope: Any,
    kv_cache: Any,
    slots: Any,
    kv_cache_dtype: str,
    scale: Any,
    skip_scale: bool = False,
) -> None:
    kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = torch.cat(
        [latent, rope], dim=1
    )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacements of the GPU kernels for builds without them; the rest of every backend is vLLM's."""
    for name, kernel in (
        ("reshape_and_cache_flash", stand_in),
        ("concat_and_cache_mla", stand_in_mla),
    ):
        monkeypatch.setattr(torch.ops._C_cache_ops, name, kernel, raising=False)
    flash = importlib.import_module("vllm.v1.attention.backends.flash_attn")
    monkeypatch.setattr(flash, "reshape_and_cache_flash", stand_in, raising=False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC"])
@pytest.mark.parametrize(
    ("module", "name"),
    [("flash_attn", "FlashAttentionImpl"), ("flex_attention", "FlexAttentionImpl")],
)
def test_flash_and_flex_attention_write_rows(
    module: str, name: str, layout: str
) -> None:
    impl = impl_of(module, name)
    assert Written(scaled_layer(impl), layout=layout).block_layout().pattern == "rows"


@pytest.mark.usefixtures("kernels")
def test_b12x_writes_planes() -> None:
    impl = impl_of(
        "b12x",
        "B12xPagedAttentionImpl",
        num_kv_heads=HEADS,
        kv_torch_dtype=torch.bfloat16,
    )
    spec = importlib.import_module(
        "vllm.v1.attention.backends.b12x"
    ).B12xPagedAttentionBackend.customize_spec(spec_of())
    assert Written(scaled_layer(impl), spec).block_layout().pattern == "planes"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize(
    ("module", "name"), [("triton_mla", "TritonMLAImpl"), ("cpu_mla", "CPUMLAImpl")]
)
def test_mla_writes_rows_of_latent_and_rope(
    module: str, name: str, layout: str
) -> None:
    """Nearly all MLA backends of GPUs inherit the first one's cache write."""
    impl = impl_of(f"mla.{module}", name)
    layer = layer_of(
        impl, kv_lora_rank=16, kv_cache_dtype="auto", _k_scale=torch.tensor(1.0)
    )
    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
    )
    # That of the CPU needs its blocks side by side.
    expected = OPAQUE if (module, layout) == ("cpu_mla", "BLHNC") else "latent"
    assert Written(layer, spec, layout).block_layout().pattern == expected


def test_triton_attention_writes_rows_of_any_type() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("triton_probe.py")),
    ]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "auto LBHNC": ["rows", "", {}],
        "auto LBNHC": ["rows", "", {}],
        "auto BHLNC": ["rows", "", {}],
        "fp8 LBHNC": ["rows", "float8_e4m3", {"k": [0.5], "v": [0.25]}],
    }
