"""Which KV heads a tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvferry.protocol.geometry import Range

_NAMES_OF_HEADS = ("kv_heads", "key_value_heads", "head_kv", "attention_groups", "heads_in_group")
"""What settings that say how many KV heads a layer has are called, whatever comes before and behind."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How heads are spread over the tensor-parallel ranks.

    vLLM gives every rank of a layer the same number of heads: `total / size` where there are at least as many heads
    as ranks, else one, and then `size / total` ranks in a row hold the same head. It accepts nothing uneven.

    Attributes:
        total_heads: KV heads of a layer, as the model's configuration says.
        rank, size: this worker among the tensor-parallel ranks.
        uniform: whether that is so for all layers. A configuration may give some layers fewer.
    """

    total_heads: int
    rank: int
    size: int
    uniform: bool = True

    def heads(self, local_heads: int) -> Range | None:
        """The global heads of a layer that has `local_heads` here, or None where they cannot be known.

        Several heads on this rank say it all: vLLM copies heads only when every rank has but one. One head says less:
        it is one of `size`, or a copy, as the layer's total decides.
        """
        if self.size == 1 or local_heads > 1:
            return Range(self.rank * local_heads, (self.rank + 1) * local_heads)
        copies = max(1, self.size // max(1, self.total_heads))
        if not self.uniform or self.total_heads * copies != self.size:
            return None
        return Range(self.rank // copies, self.rank // copies + 1)

    def checked(self, local_heads: Iterable[int]) -> Sharding:
        """The same, no longer uniform when any layer has another number of heads than the configuration promises."""
        expected = max(1, self.total_heads // self.size)
        return replace(self, uniform=self.uniform and all(heads == expected for heads in local_heads))


def same_in_all_layers(total_heads: int, config: Mapping[str, Any]) -> bool:
    """Whether nothing in a model's configuration speaks of another number of KV heads than `total_heads`.

    Settings are recognised by their names, so a doubt more is possible and a doubt less is not likely: with a doubt
    only engines with equal tensor-parallel sizes are paired, where a rank has a single head.
    """
    return all(value == total_heads for value in _reported(config, named=False))


def _reported(value: Any, *, named: bool) -> Iterable[int]:
    """Every number below a setting that is named like heads."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _reported(inner, named=named or any(name in str(key) for name in _NAMES_OF_HEADS))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _reported(inner, named=named)
    elif named and isinstance(value, int) and not isinstance(value, bool):
        yield value
