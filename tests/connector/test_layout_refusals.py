"""Caches that kvferry cannot describe stop the start, each by its layer and with the reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheGroupRole,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connector.layout.block_layout import packing_of
from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.sharding import Sharding
from kvferry.protocol.errors import InvalidConfig
from tests.connector.caches import (
    ALONE,
    config_of,
    described,
    full,
    group,
    layout_of_packing,
    views_of,
)
from tests.connector.state_models import STATE_MODELS, orient
from tests.harness.core.configs import vllm_config

ATTENTION: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.bfloat16,
}
LATENT: dict[str, Any] = {**ATTENTION, "num_kv_heads": 1}
REFUSED: dict[str, tuple[Any, str]] = {
    "ring": (
        CircularBufferSpec(**ATTENTION),
        "CircularBufferSpec: a ring buffer of keys",
    ),
    "answers": (
        RSWASpec(**ATTENTION, rswa_window=64),
        "RSWASpec: a window over answers only",
    ),
    "hidden": (HiddenStateCacheSpec(**LATENT), "HiddenStateCacheSpec: hidden states"),
    "cross": (
        CrossAttentionSpec(**ATTENTION),
        "CrossAttentionSpec: keys of an encoder",
    ),
    "encoder": (
        EncoderOnlyAttentionSpec(**ATTENTION),
        "EncoderOnlyAttentionSpec: an encoder's layer",
    ),
    "hot": (
        HiSparseHotSpec(block_size=1, page_size=64, blocks_per_request=2),
        "HiSparseHotSpec: a replica",
    ),
    "resident": (
        HiSparseResidentSpec(block_size=32, page_size=64),
        "HiSparseResidentSpec: a replica",
    ),
    "replayed": (
        SlidingWindowMLASpec(**LATENT, sliding_window=64, bounded_replay=True),
        "SlidingWindowMLASpec: a window that is computed again",
    ),
    "compressed": (MLAAttentionSpec(**LATENT, tokens_per_state=4), "4 tokens a state"),
    "compressed window": (
        SlidingWindowMLASpec(**LATENT, sliding_window=64, tokens_per_state=8),
        "8 tokens a state",
    ),
    "chunked, scales": (
        ChunkedLocalAttentionSpec(
            **ATTENTION, attention_chunk_size=64, kv_quant_mode=KVQuantMode.NVFP4
        ),
        "quantisation NVFP4",
    ),
    "not of vLLM": (KVCacheSpec(block_size=32), "KVCacheSpec"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_caches_that_cannot_be_transferred_are_refused_by_layer_and_reason_in_scheduler_and_worker(
    kind: str,
) -> None:
    spec, reason = REFUSED[kind]
    config = SimpleNamespace(
        transfer_groups=[group(full(), "plain.0"), group(spec, "odd.7")], num_blocks=5
    )
    says = rf"cache of layer odd\.7 is [\"']{reason}"
    with pytest.raises(InvalidConfig, match=says):
        groups_of(config)
    config.transfer_groups = [group(spec, "odd.7")]
    with pytest.raises(InvalidConfig, match=says):
        discover(
            {"odd.7": torch.zeros(5, 2, 32, 16)},
            config,
            {"odd.7": layout_of_packing("flash_attn")},
            ALONE,
        )


@pytest.mark.parametrize(
    "changed", [{"host_resident": True}, {"role": KVCacheGroupRole.HISPARSE_INDEXER}]
)
def test_caches_that_vllm_keeps_in_host_memory_are_refused(
    changed: dict[str, Any],
) -> None:
    config = SimpleNamespace(transfer_groups=[group(full(), "layers.3", **changed)])
    with pytest.raises(
        InvalidConfig, match=r"layers\.3 .*expected caches in the device's memory"
    ):
        groups_of(config)


@pytest.mark.parametrize(
    "mode", sorted(set(KVQuantMode) - {KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR})
)
def test_scales_that_are_not_part_of_the_weights_are_refused_by_layer_and_mode(
    mode: KVQuantMode,
) -> None:
    config = config_of(group(full(kv_quant_mode=mode), "layers.4"))
    with pytest.raises(
        InvalidConfig,
        match=rf"cache of layer layers\.4 is 'quantisation {mode.name}'; expected one of",
    ):
        described(config, views_of(config))


@pytest.mark.parametrize("mode", [KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR])
def test_static_scales_are_accepted_and_named_in_the_format(mode: KVQuantMode) -> None:
    config = config_of(group(full(kv_quant_mode=mode)))
    found = described(config, views_of(config)).tensors
    assert {tensor.format.quantization for tensor in found} == {mode.name.lower()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda view: view.flatten(1, 2),
            r"is 'shape \[5, 64, 16\]'; expected a view \[blocks, heads",
        ),
        (
            lambda view: view[:3],
            "is '3 kernel blocks'; expected a multiple of 5 blocks",
        ),
        (lambda view: view[..., ::2], ".*expected contiguous content"),
    ],
    ids=[
        "another shape",
        "kernel blocks that do not make up blocks",
        "content that is not contiguous",
    ],
)
def test_a_view_that_is_not_as_vllm_makes_them_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    config = config_of(group(full(), "layers.2"))
    views = {layer: change(view) for layer, view in views_of(config).items()}
    with pytest.raises(InvalidConfig, match=rf"layers\.2 {says}"):
        described(config, views)


def test_a_cache_whose_layer_is_not_known_is_refused() -> None:
    config = config_of(group(full(), "layers.2"))
    with pytest.raises(
        InvalidConfig, match=r"layers\.2 .*whose attention backend is known"
    ):
        discover(views_of(config), config, {}, Sharding(2, 0, 1))


def test_a_group_of_two_policies_is_refused() -> None:
    specs = {"a": full(), "b": SlidingWindowSpec(**ATTENTION, sliding_window=9)}
    config = SimpleNamespace(
        transfer_groups=[
            group(UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs), "a")
        ]
    )
    with pytest.raises(InvalidConfig, match="one policy for the whole group"):
        groups_of(config)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"mamba_type": MambaAttentionBackendEnum.CUSTOM},
            "is 'a state of CUSTOM'; expected a state of one of MAMBA1",
        ),
        (
            {
                "shapes": ((152, 3), (8, 16, 12), (8, 4, 16)),
                "dtypes": (torch.bfloat16,) * 3,
            },
            "is '3 states'; expected 2 of MAMBA2: rings and records",
        ),
        (
            {"shapes": ((153, 3), (8, 16, 12))},
            ".* channels of a convolution'; expected 128 and two equal projections more",
        ),
        (
            {"shapes": ((128, 3), (8, 16, 12))},
            ".* channels of a convolution'; expected 128 and two equal projections more",
        ),
    ],
)
def test_states_that_are_not_known_are_refused_by_layer(
    changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orient(monkeypatch, "DS")
    config = config_of(group(STATE_MODELS["Mamba-2"].spec(1, **changed), "mixer.7"))
    with pytest.raises(InvalidConfig, match=rf"cache of layer mixer\.7 {says}"):
        discover(views_of(config), config, {}, Sharding(2, 0, 1))


def test_a_page_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    orient(monkeypatch, "DS")
    config = config_of(group(STATE_MODELS["Mamba-1"].spec(1), "mixer.7"))
    views = {layer: view[..., :-8] for layer, view in views_of(config).items()}
    with pytest.raises(
        InvalidConfig, match=r"mixer\.7 .*expected a view of bytes \[5, 1, 1, 1920\]"
    ):
        discover(views, config, {}, Sharding(2, 0, 1))


def layer_of(backend: Any, **attributes: Any) -> Any:
    return SimpleNamespace(get_attn_backend=lambda: backend, **attributes)


def test_the_packing_names_the_backend_and_on_the_cpu_its_instruction_set() -> None:
    flash = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    assert packing_of(layer_of(flash)) == "flash_attn"
    assert packing_of(layer_of(CPUAttentionBackend, isa="vec16")) == "cpu_attn/vec16"
    assert packing_of(SimpleNamespace()) == "simplenamespace"


def test_the_packing_tells_the_kinds_of_float8_apart_which_vllm_keeps_in_one_dtype_and_mode() -> (
    None
):
    def packing(cache_dtype: str) -> str:
        return packing_of(
            layer_of(CPUAttentionBackend, isa="vec", kv_cache_dtype=cache_dtype),
        )

    assert packing("fp8") == packing("fp8_e4m3") == "cpu_attn/vec/fp8_e4m3"
    assert packing("fp8_e5m2") == "cpu_attn/vec/fp8_e5m2"
    assert packing("auto") == packing("bfloat16") == "cpu_attn/vec"


@pytest.mark.parametrize("head_size", [64, 80])
def test_before_vllm_has_chosen_an_instruction_set_the_packing_asks_as_vllm_does(
    head_size: int,
) -> None:
    config = vllm_config("NixlConnector", module="kvferry.connector")
    with set_current_vllm_config(config):
        reported = packing_of(
            layer_of(CPUAttentionBackend, head_size=head_size, kv_cache_dtype="auto"),
        )
    assert (
        reported
        == f"cpu_attn/{_get_attn_isa(torch.float32, config.cache_config.block_size, head_size, 'auto')}"
    )
