"""Elements for pairs with different formats: values that every format represents exactly.

A value is ±2^e · (1 + m/8) with e from -3 to 4 and m from 0 to 7. In float8_e4m3, in 16- and in 32-bit floats it is
the same number, also when it is divided by a scale of 1/2, 1 or 2. So the result must be right to the last bit,
however a conversion rounds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvferry.protocol.geometry import Format, PagedTensor
from tests.geometry.cells import Ints, byte_of, head_of

Bytes = npt.NDArray[np.uint8]

SCALES = (0.5, 1.0, 2.0)
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}
_PATTERNS = np.arange(128)
_VALUES = (
    np.where(_PATTERNS & 64, -1.0, 1.0)
    * 2.0 ** ((_PATTERNS >> 3 & 7) - 3)
    * (1 + (_PATTERNS & 7) / 8)
)


def _stored(dtype: torch.dtype) -> Bytes:
    """uint8 `[scales, patterns, item]`: every value as it is stored under every scale."""
    values = torch.tensor(_VALUES[None, :] / np.array(SCALES)[:, None])
    bits = values.to(dtype).contiguous().view(torch.uint8).numpy()
    return np.asarray(bits.reshape(len(SCALES), len(_VALUES), -1))


_STORED = {name: _stored(dtype) for name, dtype in _DTYPES.items()}


def has_floats(found: Format) -> bool:
    """Whether the elements of a format are kept here."""
    return found.packing == "plain" and found.dtype in _DTYPES


def element_names(tensor: PagedTensor, names: Ints) -> Ints:
    """The name of the element of every named byte: the same on both sides, however long elements are."""
    byte = byte_of(names)
    return np.asarray(names - byte + byte // _STORED[tensor.format.dtype].shape[2])


def stored_bytes(tensor: PagedTensor, names: Ints, patterns: Bytes) -> Bytes:
    """The bytes in a tensor's memory for named bytes whose elements have these patterns."""
    stored = _STORED[tensor.format.dtype]
    scales = np.array([SCALES.index(scale) for scale in tensor.scales or (1.0,)])
    head = (
        head_of(names) - tensor.heads.start
        if len(scales) > 1
        else np.zeros(names.shape, np.int64)
    )
    return np.asarray(
        stored[
            scales[head], patterns % len(_PATTERNS), byte_of(names) % stored.shape[2]
        ]
    )
