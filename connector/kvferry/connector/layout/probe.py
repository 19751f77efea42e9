"""Finds the block layout of a backend: the backend's own code writes known values, and the bytes show the layout.

When a worker registers its caches, every kind of layer is probed once. The layer's own implementation writes K and V
into a few blocks of memory with the shape of its cache. A pattern of `patterns` is accepted if it, and no other,
explains every byte of that memory, including those that must not change. So the result is a measurement on the serving
machine, for the backend, instruction set and quantisation in use, with any version of vLLM. A backend that cannot be
probed, or that matches no pattern, is opaque, with a log line. The probe itself never stops a start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connector.layout.block_layout import (
    BY_HEAD,
    OPAQUE,
    BlockLayout,
    heads_lie_together,
    packing_of,
)
from kvferry.connector.layout.patterns import PATTERNS, Cells
from kvferry.connector.layout.probe_writes import (
    VALUES,
    Backend,
    CannotBeTried,
    Encoding,
    Scales,
    Scratch,
    Write,
    codes_of,
    encodings_of,
    integers_of,
    scales_of,
)

logger = logging.getLogger(__name__)

_FILLS = (0x55, 0xAA)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe, for layers of one kind.

    Attributes:
        pattern: one of `PATTERNS`, `BY_HEAD` or `OPAQUE`.
        dtype: dtype of the elements; empty if it is the view's.
        scales_in: the place in these layers of the scales that the backend uses, see `scales_of`.
        reason: why it is opaque.
    """

    pattern: str
    dtype: str = ""
    scales_in: str = ""
    reason: str = ""


def block_layouts_of(
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    dtype: torch.dtype,
) -> dict[str, BlockLayout]:
    """The block layout of every layer's cache.

    Args:
        layers: vLLM's attention layers by name, with their weights loaded.
        dtype: dtype of activations.

    Raises:
        InvalidConfig: a layer's scales are not static.
    """
    specs = {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {name: group.kv_cache_spec})[name]
        for group in kv_cache_config.transfer_groups
        for name in group.layer_names
    }
    findings: dict[object, ProbeResult] = {}
    found: dict[str, BlockLayout] = {}
    for name in kv_caches:
        if name not in layers:
            continue
        layer, view, spec = layers[name], kv_caches[name], specs.get(name)
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target in found:
            found[name] = found[target]  # the same cache
            continue
        packing = packing_of(layer, name)
        if (
            not hasattr(spec, "kv_quant_mode")
            or not isinstance(view, torch.Tensor)
            or view.dim() != 4
        ):
            found[name] = BlockLayout(packing)  # not attention: `discover` describes or refuses it
            continue
        known = scales_of(layer, name, spec)
        kind = (_kind_of(layer, packing, view, spec), *known)
        if kind not in findings:
            findings[kind] = probe(layer, view, spec, known, dtype)
            _report(name, packing, findings[kind])
        finding = findings[kind]
        scales = known.get(finding.scales_in) or next(iter(known.values()), {})
        found[name] = BlockLayout(packing, finding.pattern, finding.dtype, scales)
    return found


def probe(
    layer: Any, view: torch.Tensor, spec: Any, scales: Mapping[str, Scales], dtype: torch.dtype
) -> ProbeResult:
    """Let a layer's backend write into scratch memory, and find the pattern that explains every byte.

    Args:
        view: the layer's cache `[B, H, N, C]`; only its shape, strides, dtype and device are used.
        scales: see `scales_of`.
        dtype: dtype of activations.
    """
    try:
        with torch.inference_mode():
            return _probe(Backend(layer, spec, dtype), view, spec, scales or {"": {}})
    except CannotBeTried as error:
        return ProbeResult(OPAQUE, reason=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a backend raises, it is opaque and the engine starts
        text = str(error).partition("\n")[0][:200]
        return ProbeResult(
            OPAQUE, reason=f"its cache write cannot be tried: {type(error).__name__}: {text}"
        )


def _probe(
    backend: Backend, view: torch.Tensor, spec: Any, scales: Mapping[str, Scales]
) -> ProbeResult:
    scratch = Scratch(view)
    patterns = {name: cells for name, of in PATTERNS.items() if (cells := of(scratch.view, spec))}
    writes = [_plan_write(scratch, backend, whole, seed) for seed, whole in ((1, 2), (2, 1))]
    right: list[ProbeResult] = []
    for place, values in scales.items():
        if not patterns:
            break
        images = [
            backend.write(scratch, one, fill, values).clone()
            for one, fill in zip(writes, _FILLS, strict=True)
        ]
        for encoding in encodings_of(view, spec):
            for name, cells in patterns.items():
                if all(
                    torch.equal(_expected(scratch, write, fill, cells, encoding), image)
                    for write, fill, image in zip(writes, _FILLS, images, strict=True)
                ):
                    right.append(ProbeResult(name, encoding.dtype, place))
    if len(right) == 1:
        return right[0]
    if right:
        return ProbeResult(OPAQUE, reason=f"{len(right)} block layouts explain what it writes")
    if heads_lie_together(scratch.view, spec) and _keeps_heads_apart(
        backend, scratch, next(iter(scales.values()))
    ):
        return ProbeResult(BY_HEAD)
    return ProbeResult(OPAQUE, reason="no block layout that kvferry knows explains what it writes")


def _expected(
    scratch: Scratch, write: Write, fill: int, cells: tuple[Cells, ...], encoding: Encoding
) -> torch.Tensor:
    """The expected content of the whole memory after a write, for these cells and this encoding."""
    image = scratch.image(fill)
    view = scratch.as_view(image, encoding.bits.dtype)
    for one in cells:
        one.of(view)[write.blocks, :, write.tokens] = encoding.stored(write.codes[one.kind])
    return image


def _keeps_heads_apart(backend: Backend, scratch: Scratch, scales: Scales) -> bool:
    """Whether each (block, head) holds exactly its own K and V, in the same way in every place."""
    if any(len(set(values)) > 1 for values in scales.values()):
        return False  # equal values are stored differently in different heads
    _, heads, tokens, _ = scratch.view.shape
    device, bits = scratch.raw.device, integers_of(scratch.view)

    def cells_of(image: torch.Tensor) -> torch.Tensor:
        return scratch.as_view(image, bits).view(torch.uint8)[1:]

    # The same K and V for every head of two blocks: all cells must have equal bytes, and nothing else may change.
    one = {kind: codes_of((tokens, 1, size), 3, device) for kind, size in backend.elements.items()}
    alike = {kind: codes.expand(-1, heads, -1).repeat(2, 1, 1) for kind, codes in one.items()}
    blocks = torch.tensor([2, 1], device=device).repeat_interleave(tokens)
    write = Write(blocks, torch.arange(tokens, device=device).repeat(2), alike)
    images = [backend.write(scratch, write, fill, scales).clone() for fill in _FILLS]
    cell = cells_of(images[0])[0, 0].clone()
    for image, fill in zip(images, _FILLS, strict=True):
        cells = cells_of(image)
        if not torch.equal(cells, cell.expand_as(cells)):
            return False
        cells.fill_(fill)
        if not torch.equal(image, scratch.image(fill)):
            return False
    # Other K and V for one head: its cells must change, and nothing else may.
    for codes in alike.values():
        codes[:, heads - 1] = (codes[:, heads - 1] + 1) % len(VALUES)
    image = backend.write(scratch, write, _FILLS[0], scales).clone()
    own = cells_of(image)[:, heads - 1]
    changed = not torch.equal(own, cell.expand_as(own))
    own.copy_(cell.expand_as(own))
    rest = cells_of(image)
    unchanged = torch.equal(rest, cell.expand_as(rest))
    rest.fill_(_FILLS[0])
    return changed and unchanged and torch.equal(image, scratch.image(_FILLS[0]))


def _plan_write(scratch: Scratch, backend: Backend, whole: int, seed: int) -> Write:
    """All tokens of one block in random order, and every third token of the block before it."""
    count, device = scratch.view.shape[2], scratch.raw.device
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(device)
    some = torch.arange(min(seed, count), count, 3, device=device)
    tokens = torch.cat([order, some])
    blocks = torch.cat([torch.full_like(order, whole), torch.full_like(some, whole - 1)])
    codes = {
        kind: codes_of((len(tokens), backend.heads, size), 10 * seed + index, device)
        for index, (kind, size) in enumerate(backend.elements.items())
    }
    return Write(blocks, tokens, codes)


def _kind_of(layer: Any, packing: str, view: torch.Tensor, spec: Any) -> object:
    """The key of a kind of layers: layers with equal keys share one probe."""
    impl = getattr(layer, "impl", None)
    reported = (getattr(layer, "kv_cache_dtype", None), getattr(layer, "kv_lora_rank", None))
    shared = getattr(layer, "kv_sharing_target_layer_name", None) is not None
    return (
        type(impl),
        packing,
        reported,
        shared,
        repr(spec),
        view.dtype,
        view.device,
        view.shape[1:],
        view.stride(),
    )


def _report(name: str, packing: str, finding: ProbeResult) -> None:
    """Log the result, one line per kind of layer."""
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
        "the cache of layer %s and of those like it (%s) has the block layout %r%s",
        name,
        packing,
        finding.pattern,
        stored,
    )
