"""The KV heads that a tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvferry.protocol.geometry import Range

_NAMES_OF_HEADS = (
    "kv_heads",
    "key_value_heads",
    "head_kv",
    "attention_groups",
    "heads_in_group",
)
"""Parts of the names of settings that give a layer's number of KV heads."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The distribution of KV heads over the tensor-parallel ranks.

    vLLM gives every rank of a layer the same number of heads: `total / size` if there are at least as many heads as
    ranks; else one, and `size / total` consecutive ranks hold the same head. It refuses numbers that do not divide.

    Attributes:
        total_heads: KV heads of a layer, from the model's configuration.
        rank, size: this worker's tensor-parallel rank and their number.
        uniform: whether all layers have `total_heads`. A configuration may give some layers fewer.
    """

    total_heads: int
    rank: int
    size: int
    uniform: bool = True

    def heads(self, local_heads: int) -> Range | None:
        """The global heads of a layer that has `local_heads` on this rank; None if they cannot be known."""
        # Several heads on a rank are never copies: vLLM copies heads only if every rank has one.
        if self.size == 1 or local_heads > 1:
            return Range(self.rank * local_heads, (self.rank + 1) * local_heads)
        # A single head may be one of `size` heads or a copy, depending on the layer's total. A guess would read another
        # head's bytes, so a layer whose total is not certain has unknown heads.
        copies = max(1, self.size // max(1, self.total_heads))
        if not self.uniform or self.total_heads * copies != self.size:
            return None
        head = self.rank // copies
        return Range(head, head + 1)

    def checked(self, local_heads: Iterable[int]) -> Sharding:
        """This sharding, not uniform if any layer's number of heads differs from the configuration's."""
        expected = max(1, self.total_heads // self.size)
        is_as_expected = all(heads == expected for heads in local_heads)
        return replace(self, uniform=self.uniform and is_as_expected)


def same_in_all_layers(total_heads: int, config: Mapping[str, Any]) -> bool:
    """Whether no setting in a model's configuration gives a number of KV heads other than `total_heads`."""
    # Settings are recognised by their names. A false alarm is harmless: then, if a rank has a single head, only engines
    # with equal tensor-parallel sizes are paired.
    return all(
        heads == total_heads for heads in _numbers_of_heads(config, is_named=False)
    )


def _numbers_of_heads(value: Any, *, is_named: bool) -> Iterable[int]:
    """Every number in a setting whose name contains one of `_NAMES_OF_HEADS`.

    Args:
        is_named: whether the setting that has this value has such a name, or one around it.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            names_heads = any(name in str(key) for name in _NAMES_OF_HEADS)
            yield from _numbers_of_heads(inner, is_named=is_named or names_heads)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers_of_heads(inner, is_named=is_named)
    elif is_named and isinstance(value, int) and not isinstance(value, bool):
        yield value
