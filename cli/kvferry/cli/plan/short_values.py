"""The values of a short form: how each kind of them is written, and read.

A reader gets the key, which its error names, and the text. Which layers a list names depends on their number, so a list
stays text here, and `layers_in` reads it once that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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


# Makers of readers.


def number(low: int, high: int) -> Reader:
    """A whole number."""

    def read(key: str, text: str) -> int:
        return whole_option(key, text, low, high)

    return read


def choice(accepted: Iterable[str]) -> Reader:
    """One of these names, in any case."""
    names = {name.lower(): name for name in accepted}

    def read(key: str, text: str) -> str:
        if text.lower() not in names:
            raise InvalidArgument(key, text, one_of(text, names.values()))
        return names[text.lower()]

    return read


def matching(pattern: str, expected: str) -> Reader:
    """Text that matches as a whole."""

    def read(key: str, text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise InvalidArgument(key, text, expected)
        return text

    return read


def sizes(pattern: str, expected: str) -> Reader:
    """Whole numbers up to `MAX_SIZE` with + or x between them."""
    read_text = matching(pattern, expected)

    def read(key: str, text: str) -> tuple[int, ...]:
        numbers = tuple(int(size) for size in re.split(r"[+x]", read_text(key, text)))
        if max(numbers) > MAX_SIZE:
            raise InvalidArgument(key, text, f"sizes up to {MAX_SIZE}")
        return numbers

    return read


# Readers.

_ITEM = r"[0-9]{1,5}(-[0-9]{1,5}(/[0-9]{1,5})?)?"
_SIZE = "[1-9][0-9]{0,4}"
_NAME = r"[A-Za-z0-9_./:-]{0,120}"
_CONV_PART = re.compile(r"([A-Za-z]{0,16})([1-9][0-9]{0,5})(\*?)")

dtype = choice(DTYPE_BYTES)
layout = choice(LAYOUTS)
layer_list = matching(
    rf"\*|{_ITEM}(\+{_ITEM})*",
    "layers joined by +, e.g. 0-4+6, 0-30/2 for every second, or * for all",
)
stages = sizes(rf"{_SIZE}(\+{_SIZE})*", "layers of every stage joined by +, e.g. 20+12")
state_shape = sizes(
    rf"{_SIZE}(x{_SIZE}){{1,2}}",
    "heads and their shape joined by x, e.g. 24x64x128, or 1536x16",
)
# `str.format` reads attributes of what it is given, so nothing but a bare {} may pass.
template = matching(
    rf"{_NAME}\{{\}}{_NAME}",
    "a name with {} where the layer's number goes, e.g. model.layers.{}.attn",
)


def window(key: str, text: str) -> SlidingWindow:
    """`n`, or `n@layers`, or `0`."""
    if text == "0":
        return SlidingWindow(0)
    tokens, has_list, layers = text.partition("@")
    window_tokens = whole_option(key, tokens, 1, MAX_WINDOW)
    if not has_list:
        return SlidingWindow(window_tokens)
    return SlidingWindow(window_tokens, layer_list(key, layers))


def conv_parts(key: str, text: str) -> tuple[ConvPart, ...]:
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
