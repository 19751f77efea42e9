"""Element types that the relayout converts between.

*Decoding* an element gives a float32, exactly. *Encoding* rounds a float32 to nearest, ties to even:

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
from typing import NamedTuple

from kvferry.protocol.errors import InputError


class UnsupportedConversion(InputError):
    """There is no conversion between two cache formats."""

    what = "cache format"


class ElementType(enum.Enum):
    """A type by the name that engines give it. `code` is its number in the kernel; 0 is plain bytes."""

    BFLOAT16 = ("bfloat16", 1, 2)
    FLOAT16 = ("float16", 2, 2)
    FLOAT32 = ("float32", 3, 4)
    FLOAT8_E4M3 = ("float8_e4m3", 4, 1)
    FLOAT8_E5M2 = ("float8_e5m2", 5, 1)

    def __init__(self, title: str, code: int, num_bytes: int) -> None:
        self.title = title
        self.code = code
        self.num_bytes = num_bytes


_ALIASES = {"float8_e4m3fn": "float8_e4m3", "fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}


class Conversion(NamedTuple):
    """From one element type to another, or to the same one under another scale."""

    source: ElementType
    destination: ElementType


def element_type(name: str, *, field: str = "dtype") -> ElementType:
    """The type of a name, e.g. `bfloat16`, `float8_e4m3` or, as in engines' options, `fp8_e4m3`.

    Raises:
        UnsupportedConversion: naming `field`; the type is none of those above.
    """
    title = _ALIASES.get(name, name)
    for found in ElementType:
        if found.title == title:
            return found
    raise UnsupportedConversion(field, name, "one of " + ", ".join(found.title for found in ElementType))
