"""What vLLM's attention backends do not declare about the bytes that they write."""

from __future__ import annotations

from typing import Any

from kvferry.connector.vllm.version import AS_TESTED
from kvferry.protocol.errors import UnsupportedVllm


def cpu_attention_isa(layer: Any) -> str:
    """The instruction set for which the CPU backend packs the keys of a layer.

    Raises:
        UnsupportedVllm: this vLLM does not tell.
    """
    isa = getattr(layer, "isa", None)
    if isa is not None:
        return str(isa)
    # The backend's metadata builder sets it on its layers (v1/attention/backends/cpu_attn.py:157). On a layer without
    # it, the function that the builder calls is asked. To go on without it would be wrong: engines on machines with
    # different instruction sets would read each other's keys in the wrong order.
    try:
        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        config = get_current_vllm_config()
        isa = _get_attn_isa(
            config.model_config.dtype,
            config.cache_config.block_size,
            layer.head_size,
            getattr(layer, "kv_cache_dtype", None),
        )
    except Exception as error:
        raise UnsupportedVllm(
            "cpu_attn._get_attn_isa", repr(error), AS_TESTED
        ) from error
    return str(isa)


def has_convolution_channels_first() -> bool:
    """True if vLLM keeps a convolution's state as [channels, columns], False for [columns, channels].

    The tensor's shape does not tell, since both axes can have any size. vLLM orients the shapes of its specs by the
    same function (model_executor/layers/mamba/mamba_utils.py, `MambaStateShapeCalculator._orient_conv_shape`).
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def scale_of(layer: Any, name: str, *, is_number: bool = False) -> Any:
    """The static scale of a layer's keys ("k") or values ("v"), None if the layer has none of this kind.

    vLLM keeps each twice, as a tensor and as a number, and backends differ in the one they use
    (model_executor/layers/attention/attention.py, `set_default_quant_scales`).
    """
    suffix = "_scale_float" if is_number else "_scale"
    return getattr(layer, f"_{name}{suffix}", None)
