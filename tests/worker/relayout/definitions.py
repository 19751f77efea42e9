"""The definition of the relayout: byte for byte and number for number, slow.

Independent of torch: a float type is its table of values, and rounding is looking for the nearest.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvferry.worker.relayout.shape import ElementType
from kvferry.worker.relayout.wave_table import (
    DESTINATION,
    SCALE,
    SHAPE,
    SOURCE,
    WaveTable,
)

MANTISSA = {
    "bfloat16": 7,
    "float16": 10,
    "float32": 23,
    "float8_e4m3": 3,
    "float8_e5m2": 2,
}
BIAS = {
    "bfloat16": 127,
    "float16": 15,
    "float32": 127,
    "float8_e4m3": 7,
    "float8_e5m2": 15,
}
NAN = {
    "bfloat16": 0x7FC0,
    "float16": 0x7E00,
    "float32": 0x7FC00000,
    "float8_e4m3": 0x7F,
    "float8_e5m2": 0x7F,
}
OVERFLOW = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F800000,
    "float8_e4m3": 0x7E,
    "float8_e5m2": 0x7B,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def magnitude_of(code: int, kind: ElementType) -> float:
    """The absolute value of a code, by IEEE 754's formula; e4m3 has no infinity and one NaN."""
    mantissa, bias = MANTISSA[kind.value], BIAS[kind.value]
    code &= (1 << (8 * kind.num_bytes - 1)) - 1
    exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    if kind is ElementType.FLOAT8_E4M3:
        if code == 0x7F:
            return math.nan
    elif exponent == (1 << (8 * kind.num_bytes - 1 - mantissa)) - 1:
        return math.nan if fraction else math.inf
    if exponent == 0:
        return math.ldexp(fraction, 1 - bias - mantissa)
    return math.ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)


@cache
def magnitudes(kind: ElementType) -> NDArray[np.float64]:
    """The absolute value of every code without a sign."""
    return np.array(
        [magnitude_of(code, kind) for code in range(1 << (8 * kind.num_bytes - 1))]
    )


class Rounding:
    """Rounds to the nearest of all finite values of a type, and a tie to the value with an even code."""

    def __init__(self, kind: ElementType) -> None:
        self.kind = kind
        self.values = magnitudes(kind)[np.isfinite(magnitudes(kind))]
        top = self.values[-1] - self.values[-2]
        self.limit = (
            self.values[-1] + top / 2
        )  # from here on the next value up would be as near

    def encode(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Codes of magnitudes; infinity and what would be rounded beyond the largest value is the type's overflow."""
        above = np.clip(np.searchsorted(self.values, values), 1, len(self.values) - 1)
        below = above - 1
        up, down = self.values[above] - values, values - self.values[below]
        nearest = np.where(
            (up < down) | ((up == down) & (above % 2 == 0)), above, below
        )
        return np.where(values >= self.limit, OVERFLOW[self.kind.value], nearest)


@cache
def rounding_to(kind: ElementType) -> Rounding:
    return Rounding(kind)


def convert(
    codes: NDArray[np.int64],
    kinds: tuple[ElementType, ElementType],
    scales: tuple[float, float] = (1.0, 1.0),
) -> NDArray[np.int64]:
    """Codes of the source's type → codes of the destination's, both as unsigned numbers."""
    source, target = kinds
    sign_bit = 8 * source.num_bytes - 1
    unsigned = codes & ((1 << sign_bit) - 1)
    if source is ElementType.FLOAT32:
        decoded = unsigned.astype(np.uint32).view(np.float32)
    else:
        decoded = magnitudes(source)[unsigned].astype(np.float32)
    with np.errstate(all="ignore"):
        values = decoded * np.float32(scales[0]) / np.float32(scales[1])
    if target is ElementType.FLOAT32:
        encoded = values.view(np.uint32).astype(np.int64)
    else:
        encoded = rounding_to(target).encode(
            np.where(np.isnan(values), 0, values).astype(np.float64)
        )
    encoded = np.where(np.isnan(decoded), NAN[target.value], encoded)
    return np.asarray(encoded | ((codes >> sign_bit) << (8 * target.num_bytes - 1)))


def relayout(
    table: WaveTable, source: NDArray[np.uint8], destination: NDArray[np.uint8]
) -> None:
    """Do what the table says; its addresses are offsets in the two arrays."""
    for piece in table.rows.tolist():
        shape = table.pieces.shapes[piece[SHAPE]]
        here, there = shape.element_bytes
        for unit in table.units[slice(*table.ranges[piece[SHAPE]])].tolist():
            start = (
                piece[SOURCE]
                + unit[0] * shape.source_unit_stride[0]
                + unit[1] * shape.source_unit_stride[1]
            )
            stop = piece[DESTINATION] + unit[2] * shape.destination_unit_stride[0]
            stop += unit[3] * shape.destination_unit_stride[1]
            for index in itertools.product(*(range(axis.steps) for axis in shape.axes)):
                src = start + sum(
                    i * axis.source_stride
                    for i, axis in zip(index, shape.axes, strict=True)
                )
                dst = stop + sum(
                    i * axis.destination_stride
                    for i, axis in zip(index, shape.axes, strict=True)
                )
                run = source[src : src + shape.run * here]
                if shape.conversion is not None:
                    row = piece[SCALE] + sum(
                        i
                        for i, axis in zip(index, shape.axes, strict=True)
                        if axis.scaled
                    )
                    first, second = table.pieces.scales[row]
                    codes = (
                        np.ascontiguousarray(run).view(UNSIGNED[here]).astype(np.int64)
                    )
                    converted = convert(codes, shape.conversion, (first, second))
                    run = converted.astype(UNSIGNED[there]).view(np.uint8)
                destination[dst : dst + shape.run * there] = run
