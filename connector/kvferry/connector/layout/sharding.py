"""The KV heads that a tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvferry.protocol.geometry import Range

_NAMES_OF_HEADS = ("kv_heads", "key_value_heads", "head_kv", "attention_groups", "heads_in_group")
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
        """The global heads of a layer that has `local_heads` on this rank; None if they cannot be known.

        Several heads on a rank are never copies: vLLM copies heads only if every rank has one. A single head may be
        one of `size` heads or a copy, depending on the layer's total.
        """
        if self.size == 1 or local_heads > 1:
            return Range(self.rank * local_heads, (self.rank + 1) * local_heads)
        copies = max(1, self.size // max(1, self.total_heads))
        if not self.uniform or self.total_heads * copies != self.size:
            return None
        return Range(self.rank // copies, self.rank // copies + 1)

    def checked(self, local_heads: Iterable[int]) -> Sharding:
        """This sharding, not uniform if any layer's number of heads differs from the configuration's."""
        expected = max(1, self.total_heads // self.size)
        return replace(
            self, uniform=self.uniform and all(heads == expected for heads in local_heads)
        )


def same_in_all_layers(total_heads: int, config: Mapping[str, Any]) -> bool:
    """Whether no setting in a model's configuration gives a number of KV heads other than `total_heads`.

    Settings are recognised by their names. A false alarm is harmless: then, if a rank has a single head, only engines
    with equal tensor-parallel sizes are paired.
    """
    return all(value == total_heads for value in _reported(config, named=False))


def _reported(value: Any, *, named: bool) -> Iterable[int]:
    """Every number in a setting whose name contains one of `_NAMES_OF_HEADS`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _reported(
                inner, named=named or any(name in str(key) for name in _NAMES_OF_HEADS)
            )
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _reported(inner, named=named)
    elif named and isinstance(value, int) and not isinstance(value, bool):
        yield value
