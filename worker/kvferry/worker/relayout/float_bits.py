"""Element types in a Triton kernel, in integers: decoding to the bits of a float32 and encoding from them.

The rules are those of `kvferry.worker.relayout.shape`. Triton's own casts are not used for float8: under its
interpreter they are wrong for half of the values. Encoding has one floating-point operation, an addition to a constant
whose rounding to nearest even rounds a subnormal; constant and sum are normal numbers, so flushing cannot change it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (arguments in capitals are the compiler's constants)

from __future__ import annotations

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FC00000)


@triton.jit
def half_to_float(half):
    """uint32 float16 bits without a sign → uint32 float32 bits; exact. Any NaN stays a NaN."""
    normal = (half << 13) + (112 << 23)
    subnormal = half.to(tl.int32).to(tl.float32) * (2.0**-24)
    bits = tl.where(half < 0x0400, subnormal.to(tl.uint32, bitcast=True), normal)
    return tl.where(half >= 0x7C00, (half << 13) | 0x7F800000, bits)


@triton.jit
def decode_float8_e4m3(code):
    """uint32 codes → uint32 float32 bits; exact.

    Example: 0x01 → 2**-9 = 0x3b000000, 0x38 → 1 = 0x3f800000, 0xfe → -448 = 0xc3e00000, 0x7f → NaN.
    """
    magnitude = code & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = magnitude.to(tl.int32).to(tl.float32) * (2.0**-9)
    bits = tl.where(magnitude < 8, subnormal.to(tl.uint32, bitcast=True), normal)
    return tl.where(magnitude == 0x7F, NAN, bits) | ((code & 0x80) << 24)


@triton.jit
def decode(code, TYPE: tl.constexpr):
    """uint32 codes of a type → uint32 float32 bits; exact, the sign of a NaN included."""
    if TYPE == 1:
        bits = code << 16
    elif TYPE == 2:
        bits = half_to_float(code & 0x7FFF) | ((code & 0x8000) << 16)
    elif TYPE == 3:
        bits = code
    elif TYPE == 4:
        bits = decode_float8_e4m3(code)
    else:
        bits = half_to_float((code & 0x7F) << 8) | ((code & 0x80) << 24)
    return bits


@triton.jit
def round_to(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint32 float32 bits without a sign → the codes of a narrower type, to nearest, ties to even; may overflow.

    Example: to float8_e4m3 (3 bits, bias 7): 17 = 0x41880000 lies between 16 = 0x58 and 18 = 0x59: even is 0x58.
    """
    drop: tl.constexpr = 23 - MANTISSA
    smallest: tl.constexpr = (128 - BIAS) << 23  # the smallest normal number of the type
    anchor: tl.constexpr = (151 - BIAS - MANTISSA) << 23  # its last bit is worth the type's smallest subnormal number
    odd = (magnitude >> drop) & 1
    normal = ((magnitude + ((1 << (drop - 1)) - 1) + odd) >> drop) - ((127 - BIAS) << MANTISSA)
    zero = magnitude & 0
    anchors = (zero + anchor).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + anchors).to(tl.uint32, bitcast=True) - anchor
    return tl.where(magnitude < smallest, subnormal, normal)


@triton.jit
def encode(bits, missing, TYPE: tl.constexpr):
    """uint32 float32 bits → uint32 codes of a type; where `missing`, a NaN of the same sign."""
    magnitude = bits & 0x7FFFFFFF
    sign = bits >> 31
    if TYPE == 1:
        code = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        code = tl.where(missing, 0x7FC0, code) | (sign << 15)
    elif TYPE == 2:
        code = tl.minimum(round_to(magnitude, 10, 15), 0x7C00)
        code = tl.where(missing, 0x7E00, code) | (sign << 15)
    elif TYPE == 3:
        code = tl.where(missing, NAN, magnitude) | (sign << 31)
    elif TYPE == 4:
        code = tl.minimum(round_to(magnitude, 3, 7), 0x7E)
        code = tl.where(missing, 0x7F, code) | (sign << 7)
    else:
        code = tl.minimum(round_to(magnitude, 2, 15), 0x7B)
        code = tl.where(missing, 0x7F, code) | (sign << 7)
    return code
