"""Finds attention backends that do not support context parallelism, by name.

It reads the attributes by which layers, backends and implementations of vLLM 0.32 declare it:

- `layer.get_attn_backend().supports_pcp()`, and where a backend has no such method, `layer.impl.supports_pcp`;
- `layer.impl.need_to_return_lse_for_decode`: with decode context parallelism every rank attends to its own tokens, and
  partial results can only be merged with their log-sum-exp;
- `layer.impl.supports_mtp_with_cp_non_trivial_interleave_size`, where a drafter checks several tokens at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvferry.protocol.errors import KvferryError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Incapable:
    """One thing that a backend cannot do.

    Attributes:
        backend: its name.
        lacks: what it cannot do, and the attribute that declares it.
        layers: the layers that use it.
    """

    backend: str
    lacks: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        named = ", ".join(self.layers[:_MAX_NAMED])
        more = f" and {len(self.layers) - _MAX_NAMED} more" if len(self.layers) > _MAX_NAMED else ""
        return f"{self.backend} of {named}{more} {self.lacks}"


class AttentionRefused(KvferryError):
    """Attention backends of this engine cannot do the context parallelism that it is configured for.

    Attributes:
        sizes: what is configured, in words.
        reasons: all of them.
    """

    def __init__(self, sizes: str, reasons: tuple[Incapable, ...]) -> None:
        self.sizes, self.reasons = sizes, reasons
        listed = "; ".join(str(reason) for reason in reasons)
        super().__init__(
            f"context parallelism of {sizes}: {listed}; choose another attention backend, or sizes of 1"
        )


def check_attention_cp_compatibility(
    vllm_config: VllmConfig, target_layer_names: Container[str] | None = None
) -> None:
    """Refuse a model whose attention does not support the configured context-parallel sizes.

    It refuses the same models as vLLM's function of this name. Layers enter the configuration when the model is built:
    before that, nothing is refused. Layers with neither a backend nor an implementation are skipped. With a drafter, an
    interleave of several tokens needs a backend that supports it, under prefill context parallelism alone too.

    Args:
        vllm_config: has the layers, the parallel sizes, the interleave and the drafter, if any.
        target_layer_names: the layers whose tokens prefill context parallelism divides; None for all. Not those of a
            drafter, which every rank computes whole.

    Raises:
        AttentionRefused: names the sizes and, for every backend, the missing features and its layers.
    """
    parallel = vllm_config.parallel_config
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    interleave = parallel.cp_kv_cache_interleave_size
    interleaved_drafts = (
        pcp * dcp > 1 and vllm_config.speculative_config is not None and interleave > 1
    )
    found: dict[tuple[str, str], list[str]] = {}
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        is_target = target_layer_names is None or name in target_layer_names
        # A drafter that every rank runs on its own has nothing to merge.
        alone = not is_target and getattr(getattr(layer, "impl", None), "dcp_world_size", dcp) == 1
        for backend, lacks in _lacks(
            layer, pcp > 1 and is_target, dcp > 1 and not alone, interleaved_drafts and not alone
        ):
            found.setdefault((backend, lacks), []).append(name)
    if found:
        raise AttentionRefused(
            f"pcp={pcp}, dcp={dcp}, interleave={interleave}",
            tuple(
                Incapable(backend, lacks, tuple(names)) for (backend, lacks), names in found.items()
            ),
        )


def _lacks(
    layer: object, partitioned: bool, merged: bool, interleaved_drafts: bool
) -> Iterator[tuple[str, str]]:
    """The features that one layer's backend lacks, as (backend, lack)."""
    make_backend = getattr(layer, "get_attn_backend", None)
    backend = make_backend() if callable(make_backend) else None
    impl = getattr(layer, "impl", None)
    if backend is None and impl is None:
        return
    if partitioned:
        asked = backend if backend is not None and hasattr(backend, "supports_pcp") else impl
        if problem := _problem(asked, "supports_pcp"):
            yield _name_of(backend, impl), f"cannot do prefill context parallelism ({problem})"
    if impl is None:
        return
    if merged and (problem := _problem(impl, "need_to_return_lse_for_decode")):
        yield _name_of(backend, impl), f"cannot do decode context parallelism ({problem})"
    if interleaved_drafts and (
        problem := _problem(impl, "supports_mtp_with_cp_non_trivial_interleave_size")
    ):
        yield (
            _name_of(backend, impl),
            f"cannot check drafts under an interleave of several tokens ({problem})",
        )


def _problem(asked: object, attribute: str) -> str:
    """Why the attribute does not declare support; empty when it does."""
    answer = getattr(asked, attribute, None)
    if callable(answer):
        try:
            answer = answer()
        except NotImplementedError:
            return f"it does not declare {attribute}"
    if answer is True:
        return ""
    return (
        f"it does not declare {attribute}"
        if answer is None
        else f"{attribute} is {answer}, not True"
    )


def _name_of(backend: object, impl: object) -> str:
    named = getattr(backend, "get_name", None)
    if callable(named):
        try:
            return str(named())
        except NotImplementedError:
            pass
    one = backend if backend is not None else impl
    return one.__name__ if isinstance(one, type) else type(one).__name__
