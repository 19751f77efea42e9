"""The short form of an engine: `layers=32,heads=8,dim=128,tp=4,pp=2,block=16,layout=NHD,dtype=bfloat16`.

Pairs of key and value, separated by commas, in any order, none twice. Here are the keys with their values; the text is
read by `short_reading`, and `short_engine` builds the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from kvferry.cli.plan import short_values
from kvferry.cli.plan.short_values import (
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SIZE,
    ConvPart,
    Reader,
)


class Key(NamedTuple):
    """A key: how its value is written, as in docs/cli.md, and read."""

    form: str
    read: Reader


def _key(default: Any, form: str, read: Reader) -> Any:
    return field(default=default, metadata={"key": Key(form, read)})


def _number(default: int, high: int = MAX_SIZE, low: int = 1) -> Any:
    return _key(default, "number", short_values.number(low, high))


@dataclass(frozen=True, slots=True)
class ShortForm:
    """The values of a short form; docs/cli.md says what each key means.

    A default that is empty is derived, or means that the engine has no such thing.
    """

    # The model.
    layers: int = _number(0, MAX_LAYERS)
    heads: int = _number(0)
    dim: int = _number(0)
    mla: int = _number(0)
    dtype: str = _key("bfloat16", "name", short_values.dtype)
    # Its ranks; `interleave`: tokens in a row on one dcp rank.
    tp: int = _number(1, MAX_RANKS)
    pp: int = _number(1, MAX_RANKS)
    stages: tuple[int, ...] = _key((), "`n+n+…`", short_values.stages)
    pcp: int = _number(1, MAX_RANKS)
    dcp: int = _number(1, MAX_RANKS)
    interleave: int = _number(0)
    # Its cache; `block` is a scheduler block, `kernel_block` a physical one.
    block: int = _number(16)
    kernel_block: int = _number(0)
    blocks: int = _number(8192, 1 << 30, 2)
    layout: str = _key("HND", "name", short_values.layout)
    kv: str = _key("packed", "name", short_values.choice(("packed", "apart")))
    # Layers without full attention.
    window: int = _key(0, "`n` or `n@layers`", short_values.window)
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = _key((), "layers", short_values.layer_list)
    ssm: tuple[int, ...] = _key((), "`HxDxN` or `HxN`", short_values.state_shape)
    conv: tuple[ConvPart, ...] = _key((), "`x1536+B128+C128`", short_values.conv_parts)
    conv_width: int = _number(3)
    conv_layout: str = _key("SD", "name", short_values.choice(("SD", "DS")))
    state_dtype: str = _key("", "name", short_values.dtype)
    # Names of layers, which must be those of a description JSON on the other side.
    names: str = _key(
        "model.layers.{}.self_attn.attn", "text with `{}`", short_values.template
    )
    state_names: str = _key(
        "model.layers.{}.mixer", "text with `{}`", short_values.template
    )

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention."""
        others = {*self.window_layers, *self.state_layers}
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def has_attention(self) -> bool:
        """Whether any layer has."""
        return len(self.state_layers) < self.layers


KEYS: dict[str, Key] = {
    option.name: option.metadata["key"]
    for option in fields(ShortForm)
    if option.metadata
}
