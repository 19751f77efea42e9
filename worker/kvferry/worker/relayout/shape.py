"""A shape: the layout of one unit's bytes on both sides. Pieces that differ only in their addresses share one.

The relayout copies for every unit, every combination of the indices `i` of the axes and every `e` in `[0, run)`

    from  source + (block, position)·source_unit_stride + Σ i·source_stride + e
    to    destination + (block, position)·destination_unit_stride + Σ i·destination_stride + e

where the block and the position of either side come from the unit (`kvferry.worker.relayout.wave_table`). With a
conversion, `e` counts elements and is multiplied by the element size of the side.

Conversions are between the element types below. *Decoding* an element gives a float32, exactly. *Encoding* rounds a
float32 to nearest, ties to even:

| type       | beyond the largest finite value, infinity included | NaN           |
| ---------- | -------------------------------------------------- | ------------- |
| float8_e4m3 | ±448 (there is no infinity)                       | 0x7f          |
| float8_e5m2 | ±57344 (infinity is not written)                  | 0x7f          |
| float16    | ±infinity                                          | 0x7e00        |
| bfloat16   | ±infinity                                          | 0x7fc0        |
| float32    | ±infinity                                          | 0x7fc00000    |

The source's sign is always kept, that of zeros and NaNs too; subnormals are decoded and encoded like other numbers.
The *value* of an element is `value = stored · scale`. Converting is, in float32 and in this order,

    value = decode(source) · source_scale;    destination = encode(value / destination_scale)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.plan.conversion import ITEM_BYTES
from kvferry.plan.runs import RunAxis
from kvferry.protocol.errors import LocalProtocolError


class ElementType(enum.Enum):
    """A type by its name in cache formats."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT8_E4M3 = "float8_e4m3"
    FLOAT8_E5M2 = "float8_e5m2"

    @property
    def code(self) -> int:
        """Its number in the kernel, from 1; 0 is plain bytes."""
        return 1 + list(ElementType).index(self)

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.value]


class ElementConversion(NamedTuple):
    """From one element type to another, or to the same one under another scale."""

    source: ElementType
    destination: ElementType

    @classmethod
    def of_plan(cls, dtypes: tuple[str, str] | None) -> ElementConversion | None:
        """The conversion between a producer's and a consumer's type, as the plan names them; None copies bytes."""
        if dtypes is None:
            return None
        source_dtype, destination_dtype = dtypes
        return cls(ElementType(source_dtype), ElementType(destination_dtype))


MAX_AXES = 4
"""As many loops as the kernel has beside the run's."""


class CopyAxis(NamedTuple):
    """One loop: the number of steps and the bytes between them. If `scaled`, every step has its own scale (heads)."""

    steps: int
    source_stride: int
    destination_stride: int
    scaled: bool = False

    @classmethod
    def of_plan(cls, axis: RunAxis) -> CopyAxis:
        """A loop of the plan: the producer's side is the source."""
        return cls(axis.steps, axis.remote_stride, axis.local_stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """See the module. All strides are bytes and not negative.

    Attributes:
        axes: at most four.
        run: bytes, or elements where there is a conversion, that are contiguous on both sides.
        source_unit_stride, destination_unit_stride: from one block, and from one position, to the next.
        conversion: None copies bytes.
    """

    axes: tuple[CopyAxis, ...]
    run: int
    source_unit_stride: tuple[int, int] = (0, 0)
    destination_unit_stride: tuple[int, int] = (0, 0)
    conversion: ElementConversion | None = None

    def __post_init__(self) -> None:
        counts = [self.run]
        strides = [*self.source_unit_stride, *self.destination_unit_stride]
        for axis in self.axes:
            counts.append(axis.steps)
            strides += [axis.source_stride, axis.destination_stride]
        if len(self.axes) > MAX_AXES or min(counts) < 1 or min(strides) < 0:
            raise LocalProtocolError(f"not a shape of at most {MAX_AXES} axes: {self}")
        if self.conversion is None and any(axis.scaled for axis in self.axes):
            raise LocalProtocolError(f"scales without a conversion: {self}")

    @classmethod
    def from_axes(
        cls,
        axes: Iterable[CopyAxis],
        run: int,
        *,
        source_unit_stride: tuple[int, int] = (0, 0),
        destination_unit_stride: tuple[int, int] = (0, 0),
        conversion: ElementConversion | None = None,
    ) -> Shape:
        """The equivalent shape with the fewest axes and the longest run.

        Axes of one step are dropped, and axes that continue the run or one another on both sides are merged; those
        with scales stay. The outermost axis is the one with the largest stride in the destination.

        Example: 2 heads (128 and 32 bytes apart), 4 tokens (32 and 64 apart), 2 halves (16 apart on both sides),
        run 16. The halves continue the run: `axes=((4, 32, 64), (2, 128, 32)), run=32`.
        """
        innermost_first = [axis for axis in axes if axis.steps > 1]
        innermost_first.sort(key=_strides, reverse=True)
        innermost_first.reverse()
        # The run is the innermost loop; what continues it becomes part of it.
        merged = [CopyAxis(run, *_element_bytes(conversion))]
        for axis in innermost_first:
            inner = merged[-1]
            continues = (
                axis.source_stride == inner.steps * inner.source_stride
                and axis.destination_stride == inner.steps * inner.destination_stride
            )
            if continues and not axis.scaled and not inner.scaled:
                merged[-1] = inner._replace(steps=inner.steps * axis.steps)
            else:
                merged.append(axis)
        return cls(
            axes=tuple(reversed(merged[1:])),
            run=merged[0].steps,
            source_unit_stride=source_unit_stride,
            destination_unit_stride=destination_unit_stride,
            conversion=conversion,
        )

    @property
    def element_bytes(self) -> tuple[int, int]:
        """Bytes of one item of `run`, in the source and in the destination."""
        return _element_bytes(self.conversion)

    @property
    def scale_rows(self) -> int:
        """Rows of the table of scales that a piece of this shape uses; 0 without a conversion."""
        if self.conversion is None:
            return 0
        return 1 + sum(axis.steps - 1 for axis in self.axes if axis.scaled)

    @property
    def extents(self) -> tuple[int, int]:
        """Bytes from the start of a unit's first byte to the end of its last, in the source and in the destination."""
        source_bytes, destination_bytes = self.element_bytes
        source = self.run * source_bytes
        destination = self.run * destination_bytes
        for axis in self.axes:
            source += (axis.steps - 1) * axis.source_stride
            destination += (axis.steps - 1) * axis.destination_stride
        return source, destination


def _strides(axis: CopyAxis) -> tuple[int, int]:
    """What orders axes: the one with the largest stride in the destination is the outermost."""
    return axis.destination_stride, axis.source_stride


def _element_bytes(conversion: ElementConversion | None) -> tuple[int, int]:
    if conversion is None:
        return 1, 1
    return conversion.source.num_bytes, conversion.destination.num_bytes
