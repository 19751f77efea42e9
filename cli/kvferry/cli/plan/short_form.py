"""The short form of an engine: `layers=32,heads=8,dim=128,tp=4,pp=2,block=16,layout=NHD,dtype=bfloat16`.

Pairs of key and value, separated by commas, in any order, none twice. Here are the keys, and how each value is read;
`short_reading` reads the whole text, and `short_engine` builds the engine.

A reader gets the key, which its error names, and the text. Which layers a list names depends on their number, so a list
stays text here, and `layers_in` reads it once that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from kvferry.cli.arguments import InvalidArgument, whole_option
from kvferry.protocol.errors import one_of

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}
# Axes from the outermost to the innermost: layers, blocks, heads, tokens, content (`[K|V]`).
LAYOUTS = {
    "HND": "LBHNC",
    "NHD": "LBNHC",
    **{name: name for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "CPU": "LBHNC",
}

# A few characters must not ask for more than can be described in a moment.
MAX_LAYERS = 4096
MAX_RANKS = 4096
MAX_SIZE = 65536
MAX_WINDOW = 1 << 40

ALL_LAYERS = "*"

Reader = Callable[[str, str], Any]


class SlidingWindow(NamedTuple):
    """A sliding window.

    Attributes:
        tokens: 0 means that there is none.
        layers: the list of those that have it, as it was written.
    """

    tokens: int
    layers: str = ALL_LAYERS


class ConvPart(NamedTuple):
    """A sub-projection of a convolution state.

    Example: `B128` has 128 channels, split over the ranks; of `B128*` every rank has all.
    """

    name: str
    channels: int
    replicated: bool


# Kinds of values.


def _choice(key: str, text: str, accepted: Iterable[str]) -> str:
    """One of these names, in any case."""
    for name in accepted:
        if name.lower() == text.lower():
            return name
    raise InvalidArgument(key, text, one_of(text, accepted))


def _matching(key: str, text: str, pattern: str, expected: str) -> str:
    """Text that matches as a whole."""
    if not re.fullmatch(pattern, text):
        raise InvalidArgument(key, text, expected)
    return text


def _sizes(key: str, text: str, pattern: str, expected: str) -> tuple[int, ...]:
    """Whole numbers up to `MAX_SIZE` with + or x between them."""
    matched = _matching(key, text, pattern, expected)
    numbers = tuple(int(size) for size in re.split(r"[+x]", matched))
    if max(numbers) > MAX_SIZE:
        raise InvalidArgument(key, text, f"sizes up to {MAX_SIZE}")
    return numbers


_ITEM = r"[0-9]{1,5}(-[0-9]{1,5}(/[0-9]{1,5})?)?"
_SIZE = "[1-9][0-9]{0,4}"
_NAME = r"[A-Za-z0-9_./:-]{0,120}"
_CONV_PART = re.compile(r"([A-Za-z]{0,16})([1-9][0-9]{0,5})(\*?)")

_dtype = partial(_choice, accepted=DTYPE_BYTES)
_layer_list = partial(
    _matching,
    pattern=rf"\*|{_ITEM}(\+{_ITEM})*",
    expected="layers joined by +, e.g. 0-4+6, 0-30/2 for every second, or * for all",
)
_stages = partial(
    _sizes,
    pattern=rf"{_SIZE}(\+{_SIZE})*",
    expected="layers of every stage joined by +, e.g. 20+12",
)
_state_shape = partial(
    _sizes,
    pattern=rf"{_SIZE}(x{_SIZE}){{1,2}}",
    expected="heads and their shape joined by x, e.g. 24x64x128, or 1536x16",
)
# `str.format` reads attributes of what it is given, so nothing but a bare {} may pass.
_template = partial(
    _matching,
    pattern=rf"{_NAME}\{{\}}{_NAME}",
    expected="a name with {} where the layer's number goes, e.g. model.layers.{}.attn",
)


def _window(key: str, text: str) -> SlidingWindow:
    """`n`, or `n@layers`, or `0`."""
    if text == "0":
        return SlidingWindow(0)
    tokens, has_list, layers = text.partition("@")
    window_tokens = whole_option(key, tokens, 1, MAX_WINDOW)
    if not has_list:
        return SlidingWindow(window_tokens)
    return SlidingWindow(window_tokens, _layer_list(key, layers))


def _conv_parts(key: str, text: str) -> tuple[ConvPart, ...]:
    """`x1536+B128+C128*`; one without a name is x."""
    parts = {}
    items = text.split("+")
    for item in items:
        match = _CONV_PART.fullmatch(item)
        if match is None:
            expected = "names with channels, e.g. x1536+B128+C128, with * where every rank has all"
            raise InvalidArgument(key, item, expected)
        name, channels, star = match.groups()
        part = ConvPart(name or "x", int(channels), bool(star))
        parts[part.name] = part
    if len(parts) != len(items):
        raise InvalidArgument(key, text, "a name of its own for every sub-projection")
    return tuple(parts.values())


# Keys.


class Key(NamedTuple):
    """A key: how its value is written, as in docs/cli.md, and read."""

    form: str
    read: Reader


def _key(default: Any, form: str, read: Reader) -> Any:
    return field(default=default, metadata={"key": Key(form, read)})


def _number(default: int, high: int = MAX_SIZE, low: int = 1) -> Any:
    return _key(default, "number", partial(whole_option, low=low, high=high))


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
    dtype: str = _key("bfloat16", "name", _dtype)
    # Its ranks; `interleave`: tokens in a row on one dcp rank.
    tp: int = _number(1, MAX_RANKS)
    pp: int = _number(1, MAX_RANKS)
    stages: tuple[int, ...] = _key((), "`n+n+…`", _stages)
    pcp: int = _number(1, MAX_RANKS)
    dcp: int = _number(1, MAX_RANKS)
    interleave: int = _number(0)
    # Its cache; `block` is a scheduler block, `kernel_block` a physical one.
    block: int = _number(16)
    kernel_block: int = _number(0)
    blocks: int = _number(8192, 1 << 30, 2)
    layout: str = _key("HND", "name", partial(_choice, accepted=LAYOUTS))
    kv: str = _key("packed", "name", partial(_choice, accepted=("packed", "apart")))
    # Layers without full attention.
    window: int = _key(0, "`n` or `n@layers`", _window)
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = _key((), "layers", _layer_list)
    ssm: tuple[int, ...] = _key((), "`HxDxN` or `HxN`", _state_shape)
    conv: tuple[ConvPart, ...] = _key((), "`x1536+B128+C128`", _conv_parts)
    conv_width: int = _number(3)
    conv_layout: str = _key("SD", "name", partial(_choice, accepted=("SD", "DS")))
    state_dtype: str = _key("", "name", _dtype)
    # Names of layers, which must be those of a description JSON on the other side.
    names: str = _key("model.layers.{}.self_attn.attn", "text with `{}`", _template)
    state_names: str = _key("model.layers.{}.mixer", "text with `{}`", _template)

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


def layers_in(key: str, listed: str, layers: int) -> tuple[int, ...]:
    """The layers in a list like `0-30/2+31`: single layers, inclusive ranges, every n-th of a range.

    Raises:
        InvalidArgument: the model has fewer layers, or a range is empty.
    """
    if listed == ALL_LAYERS:
        return tuple(range(layers))
    chosen: set[int] = set()
    for item in listed.split("+"):
        span, _, every = item.partition("/")
        first, _, last = span.partition("-")
        low = int(first)
        high = int(last or first)
        step = int(every or 1)
        if not low <= high < layers or step < 1:
            raise InvalidArgument(
                key, item, f"layers from 0 to {layers - 1}, the lower one first"
            )
        chosen.update(range(low, high + 1, step))
    return tuple(sorted(chosen))
