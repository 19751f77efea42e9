"""Which arrangement a backend has: its own code writes known values, and the bytes say where they went.

When a worker registers its caches, every kind of layer in it is tried once. The layer's own implementation writes K and
V into a few blocks of memory that look like the layer's cache to it. A pattern of `arrangement` is believed if it, and
no other, explains every byte of that memory, those that must not change included. So belief is a measurement on the
machine that serves, for the backend, instruction set and quantisation in use, whatever the vLLM version. A backend that
cannot be tried, or writes in no known way, is opaque, and a log line says so. The probe itself never stops a start.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connector.arrangement import (
    BY_HEAD,
    OPAQUE,
    PATTERNS,
    Arrangement,
    heads_lie_together,
    is_mla,
    packing_of,
)
from kvferry.connector.cache_probe_scratch import Scratch
from kvferry.connector.cache_probe_values import Scales, codes_of, encodings_of, scales_of, values_of

logger = logging.getLogger(__name__)

_FILLS = (0x55, 0xAA)
_MODES = ("NONE", "FP8_PER_TENSOR")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe has found for layers of one kind.

    Attributes:
        pattern: one of `PATTERNS`, `BY_HEAD` or `OPAQUE`.
        dtype: of the elements where the view's does not say it.
        scales_in: where these layers keep the scales that are used, see `scales_of`.
        reason: why it is opaque.
    """

    pattern: str
    dtype: str = ""
    scales_in: str = ""
    reason: str = ""


class _Unknown(Exception):
    """A backend that cannot be tried; the text says why."""


@dataclass(frozen=True, slots=True)
class _Write:
    """What is written in one round: the blocks' tokens, and codes `[T, heads, elements]` of every kind."""

    blocks: torch.Tensor
    tokens: torch.Tensor
    codes: dict[str, torch.Tensor]


def arrangements_of(
    layers: Mapping[str, Any], kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, dtype: torch.dtype
) -> dict[str, Arrangement]:
    """How the cache of every layer is arranged.

    Args:
        layers: by name vLLM's attention layers, with their weights loaded.
        dtype: of activations.

    Raises:
        InvalidConfig: a layer's scales are not static.
    """
    specs = {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {name: group.kv_cache_spec})[name]
        for group in kv_cache_config.transfer_groups
        for name in group.layer_names
    }
    findings: dict[object, Finding] = {}
    found: dict[str, Arrangement] = {}
    for name in kv_caches:
        if name not in layers:
            continue
        layer, view, spec = layers[name], kv_caches[name], specs.get(name)
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target in found:
            found[name] = found[target]  # the very same cache
            continue
        packing = packing_of(layer, name)
        if not hasattr(spec, "kv_quant_mode") or not isinstance(view, torch.Tensor) or view.dim() != 4:
            found[name] = Arrangement(packing)  # a state of another kind; layout knows it, or refuses it
            continue
        known = scales_of(layer, name, spec)
        kind = _kind_of(layer, packing, view, spec)
        if kind not in findings:
            findings[kind] = probe(layer, view, spec, known, dtype)
            _report(name, packing, findings[kind])
        finding = findings[kind]
        scales = known.get(finding.scales_in) or next(iter(known.values()), {})
        found[name] = Arrangement(packing, finding.pattern, finding.dtype, scales)
    return found


def probe(layer: Any, view: torch.Tensor, spec: Any, scales: Mapping[str, Scales], dtype: torch.dtype) -> Finding:
    """Let a layer's backend write into memory of the probe's own, and look for the pattern that explains every byte.

    Args:
        view: the layer's cache `[B, H, N, C]`; only its shape, strides, type and device are used.
        scales: see `scales_of`.
        dtype: of activations.
    """
    try:
        with torch.inference_mode():
            return _probe(_Backend(layer, spec, dtype), view, spec, scales or {"": {}})
    except _Unknown as error:
        return Finding(OPAQUE, reason=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a backend does: it is opaque then, and the engine starts
        text = str(error).partition("\n")[0][:200]
        return Finding(OPAQUE, reason=f"its cache write cannot be tried: {type(error).__name__}: {text}")


def _probe(backend: _Backend, view: torch.Tensor, spec: Any, scales: Mapping[str, Scales]) -> Finding:
    scratch = Scratch(view)
    patterns = {name: cells for name, of in PATTERNS.items() if (cells := of(scratch.view, spec))}
    writes = [_plan_write(scratch, backend, whole, seed) for seed, whole in ((1, 2), (2, 1))]
    right: list[Finding] = []
    for place, values in scales.items():
        if not patterns:
            break
        images = [backend.write(scratch, one, fill, values).clone() for one, fill in zip(writes, _FILLS, strict=True)]
        for encoding in encodings_of(view, spec):
            for name, cells in patterns.items():
                for write, fill, image in zip(writes, _FILLS, images, strict=True):
                    expected = scratch.image(fill)
                    for one in cells:
                        stored = encoding.stored(write.codes[one.kind], scratch.view)
                        one.of(scratch.as_view(expected))[write.blocks, :, write.tokens] = stored
                    if not torch.equal(expected, image):
                        break
                else:
                    right.append(Finding(name, encoding.dtype, place))
    if len(right) == 1:
        return right[0]
    if right:
        return Finding(OPAQUE, reason=f"{len(right)} arrangements explain what it writes")
    if heads_lie_together(scratch.view, spec) and _keeps_heads_apart(backend, scratch, next(iter(scales.values()))):
        return Finding(BY_HEAD)
    return Finding(OPAQUE, reason="no arrangement that kvferry knows explains what it writes")


def _keeps_heads_apart(backend: _Backend, scratch: Scratch, scales: Scales) -> bool:
    """Whether a (block, head) holds all of its own K and V and nothing else, the same wherever it is."""
    if any(len(set(values)) > 1 for values in scales.values()):
        return False  # equal values are not stored alike
    tokens = scratch.view.shape[2]
    one = {kind: codes_of((tokens, 1, size), 3, scratch.raw.device) for kind, size in backend.elements.items()}
    heads = scratch.view.shape[1]
    alike = {kind: codes.expand(-1, heads, -1).repeat(2, 1, 1) for kind, codes in one.items()}
    blocks = torch.tensor([2, 1], device=scratch.raw.device).repeat_interleave(tokens)
    write = _Write(blocks, torch.arange(tokens, device=scratch.raw.device).repeat(2), alike)
    cells = []
    for fill in _FILLS:
        image = backend.write(scratch, write, fill, scales).clone()
        written = scratch.as_view(image).view(torch.uint8)[1:]
        cells.append(written[0, 0].clone())
        if not torch.equal(written, cells[0].expand_as(written)):
            return False
        written.fill_(fill)
        if not torch.equal(image, scratch.image(fill)):
            return False
    before = backend.write(scratch, write, _FILLS[0], scales).clone()
    for codes in alike.values():
        codes[:, heads - 1] = (codes[:, heads - 1] + 1) % 7
    after = backend.write(scratch, write, _FILLS[0], scales).clone()
    changed = scratch.as_view(before).view(torch.uint8)[1:, heads - 1]
    new = scratch.as_view(after).view(torch.uint8)[1:, heads - 1]
    if torch.equal(changed, new):
        return False
    changed.copy_(new)
    return torch.equal(before, after)


def _plan_write(scratch: Scratch, backend: _Backend, whole: int, seed: int) -> _Write:
    """All tokens of one block, in no order, and every third token of the block before it."""
    count, device = scratch.view.shape[2], scratch.raw.device
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(device)
    some = torch.arange(seed, count, 3, device=device)
    tokens = torch.cat([order, some])
    blocks = torch.cat([torch.full_like(order, whole), torch.full_like(some, whole - 1)])
    codes = {
        kind: codes_of((len(tokens), backend.heads, size), 10 * seed + index, device)
        for index, (kind, size) in enumerate(backend.elements.items())
    }
    return _Write(blocks, tokens, codes)


class _Backend:
    """A layer's own cache write.

    Attributes:
        elements: by kind how many elements a token of a head has.
        heads: heads that are written.

    Raises:
        _Unknown: it has none that can be called.
    """

    def __init__(self, layer: Any, spec: Any, dtype: torch.dtype) -> None:
        impl: Any = getattr(layer, "impl", None)
        if spec.kv_quant_mode.name not in _MODES:
            raise _Unknown(f"quantisation {spec.kv_quant_mode.name} is not tried")
        if not hasattr(impl, "do_kv_cache_update"):
            raise _Unknown("it has no cache write of its own")
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise _Unknown("another layer writes its cache")
        # Writing must leave nothing behind: attributes that it sets go to copies, tensors that it fills as well.
        self._impl = copy.copy(impl)
        self._layer = _Borrowed(layer)
        self._dtype = dtype
        self._is_mla = is_mla(spec)
        self._latent = int(layer.kv_lora_rank) if self._is_mla else 0
        self.heads = int(spec.num_kv_heads)
        self.elements = (
            {"mla": int(spec.head_size)} if self._is_mla else {"k": int(spec.head_size), "v": int(spec.head_size_v)}
        )

    def write(self, scratch: Scratch, what: _Write, fill: int, scales: Scales) -> torch.Tensor:
        """Fill the memory with a byte, write, and return all of it."""
        scratch.raw.fill_(fill)
        slots = what.blocks * scratch.view.shape[2] + what.tokens
        given = {kind: values_of(codes, scales.get(kind, ()), self._dtype) for kind, codes in what.codes.items()}
        if self._is_mla:
            rows = given["mla"]
            self._impl.do_kv_cache_update(
                rows[:, 0, : self._latent].contiguous(),
                rows[:, :, self._latent :].contiguous(),
                scratch.view.squeeze(1),
                slots,
                self._layer.kv_cache_dtype,
                self._layer._k_scale,
            )
        else:
            self._impl.do_kv_cache_update(self._layer, given["k"], given["v"], scratch.view, slots)
        return scratch.raw


class _Borrowed:
    """A layer to read from. What is set stays here, and tensors are copies."""

    def __init__(self, layer: Any) -> None:
        self.__dict__["_kvferry_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_kvferry_layer"], name)
        return value.clone() if isinstance(value, torch.Tensor) else value


def _kind_of(layer: Any, packing: str, view: torch.Tensor, spec: Any) -> object:
    """What layers have in common that one probe can speak for."""
    impl = getattr(layer, "impl", None)
    told = (getattr(layer, "kv_cache_dtype", None), getattr(layer, "kv_lora_rank", None))
    shared = getattr(layer, "kv_sharing_target_layer_name", None) is not None
    return (type(impl), packing, told, shared, repr(spec), view.dtype, view.device, view.shape[1:], view.stride())


def _report(name: str, packing: str, finding: Finding) -> None:
    """One line for every kind of layer."""
    if finding.pattern == OPAQUE:
        logger.warning(
            "the cache of layer %s and of those like it (%s) is not recognised: %s; its blocks are moved whole, "
            "between engines of equal tensor-parallel size, block size and backend only",
            name,
            packing,
            finding.reason,
        )
        return
    stored = f", stored as {finding.dtype}" if finding.dtype else ""
    logger.info(
        "the cache of layer %s and of those like it (%s) is arranged as %r%s", name, packing, finding.pattern, stored
    )
