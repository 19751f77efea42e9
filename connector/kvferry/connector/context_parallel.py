"""Finds attention backends that do not support context parallelism, by name.

It reads the attributes by which layers, backends and implementations of vLLM 0.32 declare what they support.
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
        layers = ", ".join(self.layers[:_MAX_NAMED])
        num_more = len(self.layers) - _MAX_NAMED
        if num_more > 0:
            layers += f" and {num_more} more"
        return f"{self.backend} of {layers} {self.lacks}"


class AttentionRefused(KvferryError):
    """Attention backends of this engine cannot do the context parallelism that it is configured for.

    Attributes:
        sizes: what is configured, in words.
        reasons: all of them.
    """

    def __init__(self, sizes: str, reasons: tuple[Incapable, ...]) -> None:
        self.sizes = sizes
        self.reasons = reasons
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
    pcp = parallel.prefill_context_parallel_size
    dcp = parallel.decode_context_parallel_size
    interleave = parallel.cp_kv_cache_interleave_size
    has_drafter = vllm_config.speculative_config is not None
    has_interleaved_drafts = pcp * dcp > 1 and has_drafter and interleave > 1
    layers_by_lack: dict[tuple[str, str], list[str]] = {}
    for name, layer in get_layers_from_vllm_config(
        vllm_config, AttentionLayerBase
    ).items():
        is_target = target_layer_names is None or name in target_layer_names
        # A drafter that every rank runs on its own has nothing to merge.
        impl = getattr(layer, "impl", None)
        runs_alone = not is_target and getattr(impl, "dcp_world_size", dcp) == 1
        lacks = _lacks(
            layer,
            is_partitioned=pcp > 1 and is_target,
            is_merged=dcp > 1 and not runs_alone,
            has_interleaved_drafts=has_interleaved_drafts and not runs_alone,
        )
        for lack in lacks:
            layers_by_lack.setdefault(lack, []).append(name)
    if layers_by_lack:
        reasons = tuple(
            Incapable(backend, lack, tuple(names))
            for (backend, lack), names in layers_by_lack.items()
        )
        raise AttentionRefused(
            f"pcp={pcp}, dcp={dcp}, interleave={interleave}", reasons
        )


def _lacks(
    layer: object,
    *,
    is_partitioned: bool,
    is_merged: bool,
    has_interleaved_drafts: bool,
) -> Iterator[tuple[str, str]]:
    """The features that one layer's backend lacks, as (backend, lack)."""
    make_backend = getattr(layer, "get_attn_backend", None)
    backend = make_backend() if callable(make_backend) else None
    impl = getattr(layer, "impl", None)
    if backend is None and impl is None:
        return
    name = _name_of(backend, impl)
    if is_partitioned:
        # A backend without this method leaves the answer to its implementation.
        declares = backend is not None and hasattr(backend, "supports_pcp")
        problem = _problem(backend if declares else impl, "supports_pcp")
        if problem:
            yield name, f"cannot do prefill context parallelism ({problem})"
    if impl is None:
        return
    if is_merged:
        # Every rank attends to its own tokens. Partial results can only be merged with their log-sum-exp.
        problem = _problem(impl, "need_to_return_lse_for_decode")
        if problem:
            yield name, f"cannot do decode context parallelism ({problem})"
    if has_interleaved_drafts:
        # A drafter has several tokens checked at once.
        problem = _problem(impl, "supports_mtp_with_cp_non_trivial_interleave_size")
        if problem:
            yield (
                name,
                f"cannot check drafts under an interleave of several tokens ({problem})",
            )


def _problem(declaring: object, attribute: str) -> str:
    """Why the attribute does not declare support; empty when it does."""
    declared = getattr(declaring, attribute, None)
    if callable(declared):
        try:
            declared = declared()
        except NotImplementedError:
            declared = None
    if declared is True:
        return ""
    if declared is None:
        return f"it does not declare {attribute}"
    return f"{attribute} is {declared}, not True"


def _name_of(backend: object, impl: object) -> str:
    get_name = getattr(backend, "get_name", None)
    if callable(get_name):
        try:
            return str(get_name())
        except NotImplementedError:
            pass
    named = impl if backend is None else backend
    if isinstance(named, type):
        return named.__name__
    return type(named).__name__
