"""The Triton kernel that puts a whole wave in place, and its launcher."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (arguments in capitals are the compiler's constants)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvferry.worker.relayout.float_bits import decode, encode

TILE = 1024
"""Chunks that one program moves: 16 KiB where a chunk is 16 bytes."""
WARPS = 4
CONVERTED_TILE_SHARE = 4
"""A converting program moves this many times fewer chunks: each is eight float32 values in registers."""


@triton.jit
def _divide(n, size, multiplier, shift):
    """`n div size` and the rest; see `device_table`."""
    quotient = tl.where(size == 1, n, tl.umulhi(n, multiplier) >> shift)
    return quotient, n - quotient * size


@triton.jit
def _copy_narrow(source, destination, inside, ELEMENT: tl.constexpr):
    values = tl.load(source.to(tl.pointer_type(ELEMENT)), mask=inside)
    tl.store(destination.to(tl.pointer_type(ELEMENT)), values, mask=inside)


@triton.jit
def _copy_wide(source, destination, inside):
    """16 bytes a lane: two words. The hints declare the first one aligned, so that they become one access."""
    words = tl.arange(0, 2)[None, :]
    masks = inside[:, None]
    source_words = source.to(tl.pointer_type(tl.int64))[:, None] + words
    source_words = tl.max_contiguous(tl.multiple_of(source_words, (16, 16)), (1, 2))
    destination_words = destination.to(tl.pointer_type(tl.int64))[:, None] + words
    destination_words = tl.max_contiguous(tl.multiple_of(destination_words, (16, 16)), (1, 2))
    tl.store(destination_words, tl.load(source_words, mask=masks), mask=masks)


@triton.jit
def _copy(source, destination, inside, width):
    """`width` bytes a lane. The width is the same for a whole program, so no lane diverges."""
    if width == 16:
        _copy_wide(source, destination, inside)
    elif width == 8:
        _copy_narrow(source, destination, inside, tl.uint64)
    elif width == 4:
        _copy_narrow(source, destination, inside, tl.uint32)
    elif width == 2:
        _copy_narrow(source, destination, inside, tl.uint16)
    else:
        _copy_narrow(source, destination, inside, tl.uint8)


@triton.jit
def _elements(address, ELEMENT: tl.constexpr, TOGETHER: tl.constexpr):
    """Pointers to `TOGETHER` consecutive elements from each address."""
    pointers = address.to(tl.pointer_type(ELEMENT))[:, None] + tl.arange(0, TOGETHER)[None, :]
    if TOGETHER > 1:
        size: tl.constexpr = ELEMENT.primitive_bitwidth // 8 * TOGETHER
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (size, size)), (1, TOGETHER))
    return pointers


@triton.jit
def _convert(source, destination, inside, scales, scale, scaled, source_type, destination_type, TOGETHER: tl.constexpr):
    """`TOGETHER` elements a lane. The types are the same for a whole program, so no lane diverges."""
    masks = inside[:, None]
    if source_type == 1:
        bits = decode(tl.load(_elements(source, tl.uint16, TOGETHER), mask=masks, other=0).to(tl.uint32), 1)
    elif source_type == 2:
        bits = decode(tl.load(_elements(source, tl.uint16, TOGETHER), mask=masks, other=0).to(tl.uint32), 2)
    elif source_type == 3:
        bits = decode(tl.load(_elements(source, tl.uint32, TOGETHER), mask=masks, other=0), 3)
    elif source_type == 4:
        bits = decode(tl.load(_elements(source, tl.uint8, TOGETHER), mask=masks, other=0).to(tl.uint32), 4)
    else:
        bits = decode(tl.load(_elements(source, tl.uint8, TOGETHER), mask=masks, other=0).to(tl.uint32), 5)
    missing = (bits & 0x7FFFFFFF) > 0x7F800000
    if scaled != 0:
        source_scale = tl.load(scales + 2 * scale, mask=inside, other=1.0)[:, None]
        destination_scale = tl.load(scales + 2 * scale + 1, mask=inside, other=1.0)[:, None]
        value = bits.to(tl.float32, bitcast=True) * source_scale
        quotient = tl.div_rn(value, tl.broadcast_to(destination_scale, value.shape))
        # A NaN's sign does not survive arithmetic: the source's is kept, which scales never change.
        bits = (quotient.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | (bits & 0x80000000)
    if destination_type == 1:
        code = encode(bits, missing, 1).to(tl.uint16)
        tl.store(_elements(destination, tl.uint16, TOGETHER), code, mask=masks)
    elif destination_type == 2:
        code = encode(bits, missing, 2).to(tl.uint16)
        tl.store(_elements(destination, tl.uint16, TOGETHER), code, mask=masks)
    elif destination_type == 3:
        tl.store(_elements(destination, tl.uint32, TOGETHER), encode(bits, missing, 3), mask=masks)
    elif destination_type == 4:
        tl.store(_elements(destination, tl.uint8, TOGETHER), encode(bits, missing, 4).to(tl.uint8), mask=masks)
    else:
        tl.store(_elements(destination, tl.uint8, TOGETHER), encode(bits, missing, 5).to(tl.uint8), mask=masks)


@triton.jit
def _loop(shape, level: tl.constexpr, rest, source, destination, scale, CONVERTS: tl.constexpr):
    """One loop of the shape: divides the chunks' numbers by its size and adds its steps to the offsets."""
    size = tl.load(shape + 5 + level).to(tl.uint32)
    multiplier = tl.load(shape + 10 + level).to(tl.uint32)
    shift = tl.load(shape + 15 + level).to(tl.uint32)
    rest, index = _divide(rest, size, multiplier, shift)
    steps = index.to(tl.int64)
    source += steps * tl.load(shape + 20 + level)
    destination += steps * tl.load(shape + 25 + level)
    if CONVERTS:
        scale += steps * tl.load(shape + 34 + level)
    return rest, source, destination, scale


@triton.jit
def _relayout_kernel(programs, pieces, shapes, units, scales, CONVERTS: tl.constexpr, TILE: tl.constexpr):
    """One program moves `TILE` chunks of one piece. The sections are those of `device_table`.

    Example, with `TILE` 4, for the table in `wave_table`: width 8, so a run is 1 chunk, and the sizes are 1 (chunks of
    a run), 4 (tokens), 2 (heads), 1, 1. The piece has 16 chunks in 4 programs. Program 1 has the chunks 4 … 7. Chunk 5:
    5 div 1 = 5; 5 = 1·4 + 1, so token 1; 1 = 0·2 + 1, so head 1; unit 0, which is source block 0 and destination
    block 7. From source + 0·64 + 1·8 + 1·32 = source + 40 to destination + 7·64 + 1·16 + 1·8 = destination + 472.
    """
    program = tl.program_id(0)
    piece = pieces + tl.load(programs + 2 * program).to(tl.int64) * 6
    tile = tl.load(programs + 2 * program + 1)
    source_start = tl.load(piece)
    destination_start = tl.load(piece + 1)
    shape = shapes + tl.load(piece + 2) * 39
    chunks = tl.load(piece + 4)

    chunk = tile * TILE + tl.arange(0, TILE)
    inside = chunk < chunks
    rest = chunk.to(tl.uint32)
    source = tl.zeros([TILE], tl.int64)
    destination = tl.zeros([TILE], tl.int64)
    scale = tl.zeros([TILE], tl.int64)
    depth = tl.load(shape + 4)
    for level in tl.static_range(3):  # the run, and the two innermost axes
        rest, source, destination, scale = _loop(shape, level, rest, source, destination, scale, CONVERTS)
    if depth > 2:
        for level in tl.static_range(3, 5):
            rest, source, destination, scale = _loop(shape, level, rest, source, destination, scale, CONVERTS)

    unit = units + (tl.load(piece + 3) + rest.to(tl.int64)) * 4
    source += tl.load(unit, mask=inside, other=0).to(tl.int64) * tl.load(shape + 30)
    source += tl.load(unit + 1, mask=inside, other=0).to(tl.int64) * tl.load(shape + 31)
    destination += tl.load(unit + 2, mask=inside, other=0).to(tl.int64) * tl.load(shape + 32)
    destination += tl.load(unit + 3, mask=inside, other=0).to(tl.int64) * tl.load(shape + 33)
    source += source_start
    destination += destination_start

    width = tl.load(shape)
    if CONVERTS:
        source_type = tl.load(shape + 1)
        destination_type = tl.load(shape + 2)
        scaled = tl.load(shape + 3)
        scale += tl.load(piece + 5)
        if source_type != 0:
            if width == 8:
                _convert(source, destination, inside, scales, scale, scaled, source_type, destination_type, 8)
            else:
                _convert(source, destination, inside, scales, scale, scaled, source_type, destination_type, 1)
        else:
            _copy(source, destination, inside, width)
    else:
        _copy(source, destination, inside, width)


def launch_relayout(
    *,
    programs: torch.Tensor,
    pieces: torch.Tensor,
    shapes: torch.Tensor,
    units: torch.Tensor,
    scales: torch.Tensor,
    num_programs: int,
    converts: bool,
    tile: int,
) -> None:
    """Launch the kernel once, on the current stream.

    The compiler specialises on no argument that differs from wave to wave: there are only two variants, with and
    without conversions.

    Args:
        programs: int32 `[≥ num_programs, 2]`; this and the following are the sections of `device_table`.
        pieces: int64 `[T, 6]`.
        shapes: int64 `[S, 39]`.
        units: int32 `[U, 4]`.
        scales: float32 `[n, 2]`.
        num_programs: programs to run.
        converts: whether any piece has a conversion.
        tile: chunks per program, a power of two; `programs` was made for it.
    """
    kernel: Any = _relayout_kernel
    kernel[(num_programs,)](
        programs,
        pieces,
        shapes,
        units,
        scales,
        CONVERTS=converts,
        TILE=tile,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def tile_of(tile: int, converts: bool) -> int:
    """Chunks per program of either variant, where a program that only copies moves `tile`."""
    return max(1, tile // CONVERTED_TILE_SHARE) if converts else tile
