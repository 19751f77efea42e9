"""The error of a step that an engine hands over and that cannot be, and the checks that raise it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.protocol.errors import InputError

Ints: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


class InvalidBatch(InputError):
    """The tokens, slots or rows of a step are not what they must be. It is raised before a collective begins."""

    what = "batch"


def check_integer(field: str, value: object, least: int, most: int) -> None:
    """Raises InvalidBatch where `value` is not an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidBatch(field, value, f"an integer from {least} to {most}")


def as_counts(field: str, value: Counts, most: int) -> Ints:
    """The numbers as int64 `[n]`, a copy.

    Raises:
        InvalidBatch: they are not integers in one row, from 0 to `most`.
    """
    expected = f"a row of integers from 0 to {most}"
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as wrong:
        raise InvalidBatch(field, value, expected) from wrong
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise InvalidBatch(field, value, expected)
    outside = np.flatnonzero((found < 0) | (found > most)) if found.size else found
    if outside.size:
        raise InvalidBatch(f"{field}[{outside[0]}]", int(found[outside[0]]), f"an integer from 0 to {most}")
    return found.astype(np.int64)
