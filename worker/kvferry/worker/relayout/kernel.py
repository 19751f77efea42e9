"""The Triton kernel that puts a whole wave in place, and its launcher.

Elements are converted in integers, by way of the bits of a float32 and by the rules of `kvferry.worker.relayout.shape`.
Triton's own casts are not used for float8: under its interpreter they are wrong for half of the values.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (arguments in capitals are the compiler's constants)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# A program of fewer chunks waits for its table more often per byte; one of more needs more
# registers, so fewer threads are there to wait (docs/relayout.md, prediction).
TILE = 1024
"""Chunks that one program moves: 16 KiB where a chunk is 16 bytes."""

WARPS = 4

CONVERTED_TILE_SHARE = 4
"""A converting program moves this many times fewer chunks: each is eight float32 values in registers."""

NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _pair(row):
    """The two int64 at an address, in one access."""
    return tl.split(tl.load(row + tl.arange(0, 2)))


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
    destination_words = tl.max_contiguous(
        tl.multiple_of(destination_words, (16, 16)), (1, 2)
    )
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
def _decode_float16(code):
    """uint32 float16 codes → uint32 float32 bits; exact. Any NaN stays a NaN of its sign."""
    half = code & 0x7FFF
    normal = (half << 13) + (112 << 23)
    subnormal = half.to(tl.int32).to(tl.float32) * (2.0**-24)
    bits = tl.where(half < 0x0400, subnormal.to(tl.uint32, bitcast=True), normal)
    return tl.where(half >= 0x7C00, (half << 13) | 0x7F800000, bits) | (
        (code & 0x8000) << 16
    )


@triton.jit
def _decode_float8_e4m3(code):
    """uint32 codes → uint32 float32 bits; exact.

    Example: 0x01 → 2**-9 = 0x3b000000, 0x38 → 1 = 0x3f800000, 0xfe → -448 = 0xc3e00000, 0x7f → NaN.
    """
    magnitude = code & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = magnitude.to(tl.int32).to(tl.float32) * (2.0**-9)
    bits = tl.where(magnitude < 8, subnormal.to(tl.uint32, bitcast=True), normal)
    return tl.where(magnitude == 0x7F, NAN, bits) | ((code & 0x80) << 24)


@triton.jit
def _round_to(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint32 float32 bits without a sign → the codes of a narrower type, to nearest, ties to even; may overflow.

    Example: to float8_e4m3 (3 bits, bias 7): 17 = 0x41880000 lies between 16 = 0x58 and 18 = 0x59: even is 0x58.
    """
    drop: tl.constexpr = 23 - MANTISSA
    # The smallest normal number of the type.
    smallest: tl.constexpr = (128 - BIAS) << 23
    # A number whose last bit is worth the type's smallest subnormal number.
    anchor: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    odd = (magnitude >> drop) & 1
    normal = ((magnitude + ((1 << (drop - 1)) - 1) + odd) >> drop) - (
        (127 - BIAS) << MANTISSA
    )
    # The only floating-point operation of encoding: adding the anchor rounds a subnormal to nearest
    # even. Anchor and sum are normal numbers, so flushing of subnormals cannot change it.
    zero = magnitude & 0
    anchors = (zero + anchor).to(tl.float32, bitcast=True)
    anchored = magnitude.to(tl.float32, bitcast=True) + anchors
    subnormal = anchored.to(tl.uint32, bitcast=True) - anchor
    return tl.where(magnitude < smallest, subnormal, normal)


@triton.jit
def _elements(address, ELEMENT: tl.constexpr, TOGETHER: tl.constexpr):
    """Pointers to `TOGETHER` consecutive elements from each address."""
    pointers = (
        address.to(tl.pointer_type(ELEMENT))[:, None] + tl.arange(0, TOGETHER)[None, :]
    )
    if TOGETHER > 1:
        size: tl.constexpr = ELEMENT.primitive_bitwidth // 8 * TOGETHER
        pointers = tl.max_contiguous(
            tl.multiple_of(pointers, (size, size)), (1, TOGETHER)
        )
    return pointers


@triton.jit
def _load(address, inside, ELEMENT: tl.constexpr, TOGETHER: tl.constexpr):
    """The codes of `TOGETHER` elements from each address, in uint32."""
    codes = tl.load(
        _elements(address, ELEMENT, TOGETHER), mask=inside[:, None], other=0
    )
    return codes.to(tl.uint32)


@triton.jit
def _store(address, code, inside, ELEMENT: tl.constexpr, TOGETHER: tl.constexpr):
    tl.store(
        _elements(address, ELEMENT, TOGETHER), code.to(ELEMENT), mask=inside[:, None]
    )


@triton.jit
def _convert(
    source,
    destination,
    inside,
    scales,
    scale,
    scaled,
    source_type,
    destination_type,
    TOGETHER: tl.constexpr,
):
    """`TOGETHER` elements a lane. The types are the same for a whole program, so no lane diverges."""
    if source_type == 1:
        bits = _load(source, inside, tl.uint16, TOGETHER) << 16
    elif source_type == 2:
        bits = _decode_float16(_load(source, inside, tl.uint16, TOGETHER))
    elif source_type == 3:
        bits = _load(source, inside, tl.uint32, TOGETHER)
    elif source_type == 4:
        bits = _decode_float8_e4m3(_load(source, inside, tl.uint8, TOGETHER))
    else:
        # float8_e5m2 is the upper byte of a float16.
        bits = _decode_float16(_load(source, inside, tl.uint8, TOGETHER) << 8)
    missing = (bits & 0x7FFFFFFF) > 0x7F800000
    if scaled:
        source_scale = tl.load(scales + 2 * scale, mask=inside, other=1.0)[:, None]
        destination_scale = tl.load(scales + 2 * scale + 1, mask=inside, other=1.0)[
            :, None
        ]
        value = bits.to(tl.float32, bitcast=True) * source_scale
        quotient = tl.div_rn(value, tl.broadcast_to(destination_scale, value.shape))
        # A NaN's sign does not survive arithmetic: the source's is kept, which scales never change.
        bits = (quotient.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | (bits & 0x80000000)
    magnitude = bits & 0x7FFFFFFF
    sign = bits >> 31
    if destination_type == 1:
        code = tl.where(
            missing, 0x7FC0, (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        )
        _store(destination, code | (sign << 15), inside, tl.uint16, TOGETHER)
    elif destination_type == 2:
        code = tl.where(
            missing, 0x7E00, tl.minimum(_round_to(magnitude, 10, 15), 0x7C00)
        )
        _store(destination, code | (sign << 15), inside, tl.uint16, TOGETHER)
    elif destination_type == 3:
        code = tl.where(missing, NAN, magnitude)
        _store(destination, code | (sign << 31), inside, tl.uint32, TOGETHER)
    elif destination_type == 4:
        code = tl.where(missing, 0x7F, tl.minimum(_round_to(magnitude, 3, 7), 0x7E))
        _store(destination, code | (sign << 7), inside, tl.uint8, TOGETHER)
    else:
        code = tl.where(missing, 0x7F, tl.minimum(_round_to(magnitude, 2, 15), 0x7B))
        _store(destination, code | (sign << 7), inside, tl.uint8, TOGETHER)


@triton.jit
def _loop(
    shape,
    fields,
    level: tl.constexpr,
    rest,
    source,
    destination,
    scale,
    CONVERTS: tl.constexpr,
):
    """One loop of the shape: divides the chunks' numbers by its size and adds its steps to the offsets in the unit."""
    divisor, strides = _pair(shape + 2 + 2 * level)
    shift = (fields >> (32 + 5 * level)).to(tl.uint32) & 31
    quotient = tl.umulhi(rest << 1, (divisor >> 32).to(tl.uint32)) >> shift
    index = rest + quotient * divisor.to(tl.uint32)
    source += index * strides.to(tl.uint32)
    destination += index * (strides >> 32).to(tl.uint32)
    if CONVERTS:
        scale += index * ((fields >> (15 + level)).to(tl.uint32) & 1)
    return quotient, source, destination, scale


@triton.jit
def _relayout_kernel(
    programs, pieces, shapes, units, scales, CONVERTS: tl.constexpr, TILE: tl.constexpr
):
    """One program moves `TILE` chunks of one piece. The sections are those of `device_table`.

    Example, with `TILE` 4, for the table in `wave_table`: width 8, so a run is 1 chunk, and the sizes are 1 (chunks of
    a run), 4 (tokens), 2 (heads), 1, 1. The piece has 16 chunks in 4 programs. Program 1 has the chunks 4 … 7. Chunk 5:
    5 div 1 = 5; 5 = 1·4 + 1, so token 1; 1 = 0·2 + 1, so head 1; unit 0, which is source block 0 and destination
    block 7. From source + 0·64 + 1·8 + 1·32 = source + 40 to destination + 7·64 + 1·16 + 1·8 = destination + 472.
    """
    program = tl.load(programs + tl.program_id(0))
    piece = pieces + program.to(tl.uint32).to(tl.int64) * 4
    source_start, destination_start = _pair(piece)
    extent, first = _pair(piece + 2)
    shape = shapes + (extent >> 32) * 12
    fields = tl.load(shape)

    chunk = (program >> 32).to(tl.uint32) * TILE + tl.arange(0, TILE).to(tl.uint32)
    inside = chunk < extent.to(tl.uint32)
    rest = chunk
    # Offsets in the unit, in 32 bits: the table has no unit that reaches further.
    source = tl.zeros([TILE], tl.uint32)
    destination = tl.zeros([TILE], tl.uint32)
    scale = tl.zeros([TILE], tl.uint32) + (first >> 32).to(tl.uint32)
    # The run, and the two innermost axes: most shapes have no more, and skip two divisions.
    for level in tl.static_range(3):
        rest, source, destination, scale = _loop(
            shape, fields, level, rest, source, destination, scale, CONVERTS
        )
    if ((fields >> 5) & 7) > 2:
        for level in tl.static_range(3, 5):
            rest, source, destination, scale = _loop(
                shape, fields, level, rest, source, destination, scale, CONVERTS
            )

    unit = (
        units
        + (first.to(tl.uint32) + rest).to(tl.int64)[:, None] * 2
        + tl.arange(0, 2)[None, :]
    )
    source_offset, destination_offset = tl.split(
        tl.load(unit, mask=inside[:, None], other=0)
    )
    source = source_start + source_offset + source.to(tl.int64)
    destination = destination_start + destination_offset + destination.to(tl.int64)

    width = fields.to(tl.int32) & 31
    if CONVERTS:
        source_type = (fields >> 8).to(tl.int32) & 7
        destination_type = (fields >> 11).to(tl.int32) & 7
        scaled = ((fields >> 14) & 1) != 0
        if source_type != 0:
            # `TOGETHER` must be a constant of the compiler, so there are two calls.
            if width == 8:
                _convert(
                    source,
                    destination,
                    inside,
                    scales,
                    scale,
                    scaled,
                    source_type,
                    destination_type,
                    8,
                )
            else:
                _convert(
                    source,
                    destination,
                    inside,
                    scales,
                    scale,
                    scaled,
                    source_type,
                    destination_type,
                    1,
                )
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
        programs: int64 `[≥ num_programs]`; this and the following are the sections of `device_table`.
        pieces: int64 `[T, 4]`.
        shapes: int64 `[S, 12]`.
        units: int64 `[U, 2]`.
        scales: float32 `[n, 2]`.
        num_programs: programs to run.
        converts: True if any piece has a conversion.
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
    if not converts:
        return tile
    return max(1, tile // CONVERTED_TILE_SHARE)
