"""Finds the block layout of a backend: the backend's own code writes known values, and the bytes show the layout.

When a worker registers its caches, every kind of layer is probed once. The layer's own implementation writes K and V
into a few blocks of memory with the shape of its cache. A pattern of `patterns` is accepted if it, and no other,
explains every byte of that memory, including those that must not change.

So the result is a measurement on the serving machine: for the backend, instruction set and quantisation in use, with
any version of vLLM. Strides alone are not believed, since some lie (`block_layout`).
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
from kvferry.connector.layout.patterns import PATTERNS, CellLayout
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
"""What the memory holds before each of two writes. They differ in every bit, so a byte that is not written shows."""


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
    specs = _specs_by_layer(kv_cache_config)
    results: dict[object, ProbeResult] = {}
    layouts: dict[str, BlockLayout] = {}
    for name, view in kv_caches.items():
        if name not in layers:
            continue
        layer = layers[name]
        spec = specs.get(name)
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target in layouts:
            # It is the same cache.
            layouts[name] = layouts[target]
            continue
        packing = packing_of(layer)
        is_attention = hasattr(spec, "kv_quant_mode")
        if not is_attention or not isinstance(view, torch.Tensor) or view.dim() != 4:
            # `discover` describes it otherwise, or refuses it.
            layouts[name] = BlockLayout(packing)
            continue
        scales_by_place = scales_of(layer, name, spec)
        kind = (_kind_of(layer, packing, view, spec), *scales_by_place)
        if kind not in results:
            results[kind] = probe(layer, view, spec, scales_by_place, dtype)
            _report(name, packing, results[kind])
        result = results[kind]
        scales = scales_by_place.get(result.scales_in)
        if not scales:
            # Opaque: the backend's place is not known, so its first one stands in the packing.
            scales = next(iter(scales_by_place.values()), {})
        layouts[name] = BlockLayout(packing, result.pattern, result.dtype, scales)
    return layouts


def _specs_by_layer(kv_cache_config: Any) -> dict[str, Any]:
    """The cache spec of every layer; a group has one for all of its layers, or one for each."""
    specs = {}
    for group in kv_cache_config.transfer_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            specs[name] = group.kv_cache_spec if by_layer is None else by_layer[name]
    return specs


def probe(
    layer: Any,
    view: torch.Tensor,
    spec: Any,
    scales: Mapping[str, Scales],
    dtype: torch.dtype,
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
    # Opaque blocks can still be moved between equal engines: a probe that fails costs that, never the start.
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        first_line = str(error).partition("\n")[0][:200]
        return ProbeResult(
            OPAQUE,
            reason=f"its cache write cannot be tried: {type(error).__name__}: {first_line}",
        )


def _probe(
    backend: Backend,
    view: torch.Tensor,
    spec: Any,
    scales_by_place: Mapping[str, Scales],
) -> ProbeResult:
    scratch = Scratch(view)
    patterns: dict[str, tuple[CellLayout, ...]] = {}
    for name, pattern in PATTERNS.items():
        cells = pattern(scratch.view, spec)
        if cells:
            patterns[name] = cells
    explaining: list[ProbeResult] = []
    if patterns:
        writes = (
            _plan_write(scratch, backend, full_block=2, seed=1),
            _plan_write(scratch, backend, full_block=1, seed=2),
        )
        for place, scales in scales_by_place.items():
            images = tuple(
                backend.write(scratch, write, fill, scales).clone()
                for write, fill in zip(writes, _FILLS, strict=True)
            )
            for encoding in encodings_of(view, spec):
                for name, cells in patterns.items():
                    if _explains(scratch, cells, encoding, writes, images):
                        explaining.append(ProbeResult(name, encoding.dtype, place))
    if len(explaining) == 1:
        return explaining[0]
    if explaining:
        # One of them is wrong, and the bytes do not say which.
        return ProbeResult(
            OPAQUE, reason=f"{len(explaining)} block layouts explain what it writes"
        )
    if heads_lie_together(scratch.view, spec):
        scales = next(iter(scales_by_place.values()))
        if _keeps_heads_apart(backend, scratch, scales):
            return ProbeResult(BY_HEAD)
    return ProbeResult(
        OPAQUE, reason="no block layout that kvferry knows explains what it writes"
    )


def _explains(
    scratch: Scratch,
    cells: tuple[CellLayout, ...],
    encoding: Encoding,
    writes: tuple[Write, ...],
    images: tuple[torch.Tensor, ...],
) -> bool:
    """Whether these cells and this encoding explain every byte of the memory after each write."""
    for write, fill, image in zip(writes, _FILLS, images, strict=True):
        if not torch.equal(
            _expected_image(scratch, write, fill, cells, encoding), image
        ):
            return False
    return True


def _expected_image(
    scratch: Scratch,
    write: Write,
    fill: int,
    cells: tuple[CellLayout, ...],
    encoding: Encoding,
) -> torch.Tensor:
    """The expected content of the whole memory after a write, for these cells and this encoding."""
    image = scratch.image(fill)
    view = scratch.as_view(image, encoding.bits.dtype)
    for kind_cells in cells:
        stored = encoding.stored(write.codes[kind_cells.kind])
        kind_cells.select(view)[write.blocks, :, write.tokens] = stored
    return image


def _keeps_heads_apart(backend: Backend, scratch: Scratch, scales: Scales) -> bool:
    """Whether each (block, head) holds exactly its own K and V, in the same way in every place."""
    if any(len(set(values)) > 1 for values in scales.values()):
        # Equal values are stored differently in different heads, so equal bytes cannot be expected.
        return False
    write = _write_same_in_all_heads(scratch, backend)
    images = [backend.write(scratch, write, fill, scales).clone() for fill in _FILLS]
    cell = _written_cells(scratch, images[0])[0, 0].clone()
    # All cells must have equal bytes, and nothing outside them may change.
    for image, fill in zip(images, _FILLS, strict=True):
        cells = _written_cells(scratch, image)
        if not torch.equal(cells, cell.expand_as(cells)):
            return False
        cells.fill_(fill)
        if not torch.equal(image, scratch.image(fill)):
            return False
    # With other K and V for one head its cells must change, and nothing else may.
    head = backend.heads - 1
    for codes in write.codes.values():
        codes[:, head] = (codes[:, head] + 1) % len(VALUES)
    image = backend.write(scratch, write, _FILLS[0], scales).clone()
    cells = _written_cells(scratch, image)
    own_cells = cells[:, head]
    has_changed = not torch.equal(own_cells, cell.expand_as(own_cells))
    own_cells.copy_(cell.expand_as(own_cells))
    others_are_equal = torch.equal(cells, cell.expand_as(cells))
    cells.fill_(_FILLS[0])
    rest_is_untouched = torch.equal(image, scratch.image(_FILLS[0]))
    return has_changed and others_are_equal and rest_is_untouched


def _write_same_in_all_heads(scratch: Scratch, backend: Backend) -> Write:
    """The same K and V for every head of blocks 2 and 1."""
    _, heads, tokens, _ = scratch.view.shape
    device = scratch.raw.device
    codes = {}
    for kind, size in backend.elements.items():
        codes_of_a_head = codes_of((tokens, 1, size), 3, device)
        codes[kind] = codes_of_a_head.expand(-1, heads, -1).repeat(2, 1, 1)
    blocks = torch.tensor([2, 1], device=device).repeat_interleave(tokens)
    return Write(blocks, torch.arange(tokens, device=device).repeat(2), codes)


def _written_cells(scratch: Scratch, image: torch.Tensor) -> torch.Tensor:
    """The bytes of all cells of the written blocks, which are 1 and 2, in an image of the memory."""
    return scratch.as_view(image, integers_of(scratch.view)).view(torch.uint8)[1:]


def _plan_write(
    scratch: Scratch, backend: Backend, *, full_block: int, seed: int
) -> Write:
    """All tokens of one block in random order, and every third token of the block before it."""
    num_tokens = scratch.view.shape[2]
    device = scratch.raw.device
    full = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed)).to(
        device
    )
    partial = torch.arange(min(seed, num_tokens), num_tokens, 3, device=device)
    tokens = torch.cat([full, partial])
    blocks = torch.cat(
        [
            torch.full_like(full, full_block),
            torch.full_like(partial, full_block - 1),
        ]
    )
    codes = {}
    for index, (kind, size) in enumerate(backend.elements.items()):
        codes[kind] = codes_of(
            (len(tokens), backend.heads, size), 10 * seed + index, device
        )
    return Write(blocks, tokens, codes)


def _kind_of(layer: Any, packing: str, view: torch.Tensor, spec: Any) -> object:
    """The key of a kind of layers: layers with equal keys share one probe."""
    return (
        type(getattr(layer, "impl", None)),
        packing,
        getattr(layer, "kv_cache_dtype", None),
        getattr(layer, "kv_lora_rank", None),
        getattr(layer, "kv_sharing_target_layer_name", None) is not None,
        repr(spec),
        view.dtype,
        view.device,
        view.shape[1:],
        view.stride(),
    )


def _report(name: str, packing: str, result: ProbeResult) -> None:
    """Log the result, one line per kind of layer."""
    if result.pattern == OPAQUE:
        logger.warning(
            "the cache of layer %s and of those like it (%s) is not recognised: %s; its blocks are moved whole, "
            "between engines of equal tensor-parallel size, block size and backend only",
            name,
            packing,
            result.reason,
        )
        return
    stored = ""
    if result.dtype:
        stored = f", stored as {result.dtype}"
    logger.info(
        "the cache of layer %s and of those like it (%s) has the block layout %r%s",
        name,
        packing,
        result.pattern,
        stored,
    )
