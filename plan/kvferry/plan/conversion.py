"""Conversions between cache formats during a load, and their scales.

The *value* of an element is `stored · scale`. Only formats that their strides describe fully can be
converted: 16- and 32-bit floats without quantisation, and float8 with static scales, one per tensor or one per head.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry.protocol.geometry import Format, PagedTensor

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element of each dtype that can be converted."""

# By the bytes of an element. Of float8 only with static scales: dynamic ones are in no description.
_QUANTIZATION = {1: "fp8_per_tensor", 2: "none", 4: "none"}


class DtypeConversion(NamedTuple):
    """Conversion from the producer's dtype and scale to the consumer's."""

    remote_dtype: str
    local_dtype: str
    remote_scale: float = 1.0
    local_scale: float = 1.0

    @property
    def items(self) -> tuple[int, int]:
        """Bytes of an element, local and remote."""
        return (ITEM_BYTES[self.local_dtype], ITEM_BYTES[self.remote_dtype])

    def __str__(self) -> str:
        return f"{self.remote_dtype} becomes {self.local_dtype}"


def needs_conversion(local: PagedTensor, remote: PagedTensor) -> bool:
    """True if the same bytes have different values on the two sides."""
    if local.format != remote.format:
        return True
    # No scales are a scale of 1.
    return (local.scales or (1.0,)) != (remote.scales or (1.0,))


def is_convertible(local: PagedTensor, remote: PagedTensor) -> bool:
    """True if the remote tensor can be converted to the local one."""
    for tensor in (local, remote):
        if not _is_known(tensor.format) or not _is_made_of_items(tensor):
            return False
    return _elements(local) == _elements(remote)


def lacks_scales(tensor: PagedTensor) -> bool:
    """True if a tensor is quantised by scales that its engine does not describe."""
    return tensor.format.quantization != "none" and not tensor.scales


def conversion_of(
    local: PagedTensor, remote: PagedTensor, head: int
) -> DtypeConversion:
    """The conversion of one global head of two convertible tensors."""
    return DtypeConversion(
        remote_dtype=remote.format.dtype,
        local_dtype=local.format.dtype,
        remote_scale=_scale(remote, head),
        local_scale=_scale(local, head),
    )


def has_scales_by_head(tensor: PagedTensor) -> bool:
    """True if heads have scales of their own."""
    return len(tensor.scales) > 1


def _is_known(tensor_format: Format) -> bool:
    item_bytes = ITEM_BYTES.get(tensor_format.dtype)
    if item_bytes is None or tensor_format.packing != "plain":
        return False
    return tensor_format.quantization == _QUANTIZATION[item_bytes]


def _is_made_of_items(tensor: PagedTensor) -> bool:
    item_bytes = ITEM_BYTES[tensor.format.dtype]
    return (
        tensor.element_bytes in (0, item_bytes) and tensor.cell_bytes % item_bytes == 0
    )


def _elements(tensor: PagedTensor) -> int:
    return tensor.cell_bytes // ITEM_BYTES[tensor.format.dtype]


def _scale(tensor: PagedTensor, head: int) -> float:
    if not tensor.scales:
        return 1.0
    if has_scales_by_head(tensor):
        return tensor.scales[head - tensor.heads.start]
    return tensor.scales[0]
