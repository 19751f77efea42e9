"""The values of a short form: their syntax, and functions that read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvferry.cli.arguments import InvalidArgument, whole_option
from kvferry.protocol.errors import one_of

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3": 1, "float8_e5m2": 1}
LAYOUTS = {
    "HND": "LBHNC",
    "NHD": "LBNHC",
    **{name: name for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "CPU": "LBHNC",
}
"""Axes from the outermost to the innermost: layers, blocks, heads, tokens, content (`[K|V]`)."""

MAX_LAYERS = 4096
MAX_RANKS = 4096
MAX_SIZE = 65536


class ConvPart(NamedTuple):
    """A sub-projection of a convolution state.

    Example: `B128` has 128 channels, split over the ranks; of `B128*` every rank has all.
    """

    name: str
    channels: int
    replicated: bool


class Value(NamedTuple):
    """How a value is written, as in the documentation, and the function that reads it from its key and its text.

    `read` raises `InvalidArgument`.
    """

    form: str
    read: Callable[[str, str], Any]


def whole(low: int, high: int) -> Value:
    return Value("number", lambda key, text: whole_option(key, text, low, high))


def choice(*accepted: str) -> Value:
    def read(key: str, text: str) -> str:
        for name in accepted:
            if name.lower() == text.lower():
                return name
        raise InvalidArgument(key, text, one_of(text, accepted))

    return Value("name", read)


def _matching(form: str, pattern: str, expected: str) -> Value:
    def read(key: str, text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise InvalidArgument(key, text, expected)
        return text

    return Value(form, read)


def _sizes(form: str, pattern: str, expected: str) -> Value:
    """Whole numbers up to `MAX_SIZE` with + or x between them."""
    matching = _matching(form, pattern, expected)

    def read(key: str, text: str) -> tuple[int, ...]:
        sizes = tuple(int(size) for size in re.split(r"[+x]", matching.read(key, text)))
        if max(sizes) > MAX_SIZE:
            raise InvalidArgument(key, text, f"sizes up to {MAX_SIZE}")
        return sizes

    return Value(form, read)


def _conv_parts(key: str, text: str) -> tuple[ConvPart, ...]:
    parts = []
    for item in text.split("+"):
        match = re.fullmatch(
            r"(?P<name>[A-Za-z]{0,16})(?P<channels>[1-9][0-9]{0,5})(?P<star>\*?)", item
        )
        if match is None:
            raise InvalidArgument(
                key,
                item,
                "names with channels, e.g. x1536+B128+C128, with * where every rank has all",
            )
        part = ConvPart(
            name=match["name"] or "x",
            channels=int(match["channels"]),
            replicated=bool(match["star"]),
        )
        parts.append(part)
    if len({part.name for part in parts}) != len(parts):
        raise InvalidArgument(key, text, "a name of its own for every sub-projection")
    return tuple(parts)


def _window(key: str, text: str) -> tuple[int, str]:
    if text == "0":
        return NO_WINDOW
    tokens, has_list, layers = text.partition("@")
    window_tokens = whole_option(key, tokens, 1, 1 << 40)
    if not has_list:
        return window_tokens, "*"
    return window_tokens, LAYER_LIST.read(key, layers)


NO_WINDOW = (0, "*")
_ITEM = r"[0-9]{1,5}(-[0-9]{1,5}(/[0-9]{1,5})?)?"
_LISTED = "layers joined by +, e.g. 0-4+6, 0-30/2 for every second, or * for all"
_SHAPE = "heads and their shape joined by x, e.g. 24x64x128, or 1536x16"
_NAME = r"[A-Za-z0-9_./:-]{0,120}"
CONV = Value("`x1536+B128+C128`", _conv_parts)
LAYER_LIST = _matching("layers", rf"\*|{_ITEM}(\+{_ITEM})*", _LISTED)
NAME_TEMPLATE = _matching(
    "text with `{}`",
    rf"{_NAME}\{{\}}{_NAME}",
    "a name with {} where the layer's number goes, e.g. model.layers.{}.attn",
)
STAGES = _sizes(
    "`n+n+…`",
    r"[1-9][0-9]{0,4}(\+[1-9][0-9]{0,4})*",
    "layers of every stage joined by +, e.g. 20+12",
)
STATE_SHAPE = _sizes("`HxDxN` or `HxN`", r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){1,2}", _SHAPE)
WINDOW = Value("`n` or `n@layers`", _window)


def layers_of(key: str, listed: str, layers: int) -> tuple[int, ...]:
    """The layers of a list like `0-30/2+31`: single layers, inclusive ranges, every n-th of a range."""
    if listed == "*":
        return tuple(range(layers))
    chosen: set[int] = set()
    for item in listed.split("+"):
        span, _, every = item.partition("/")
        first, _, last = span.partition("-")
        low = int(first)
        high = int(last or first)
        step = int(every or 1)
        if not low <= high < layers or step < 1:
            raise InvalidArgument(key, item, f"layers from 0 to {layers - 1}, the lower one first")
        chosen.update(range(low, high + 1, step))
    return tuple(sorted(chosen))
