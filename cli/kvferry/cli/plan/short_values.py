"""The values of a short form: their syntax, and functions that read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvferry.cli.arguments import InvalidShortForm
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


Read = Callable[[str, str], Any]
"""The value of a key and its text. Raises `InvalidShortForm`."""


def whole(low: int, high: int) -> Read:
    def read(key: str, text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise InvalidShortForm(key, text, f"a whole number from {low} to {high}")
        return int(text)

    return read


def choice(*accepted: str) -> Read:
    def read(key: str, text: str) -> str:
        for name in accepted:
            if name.lower() == text.lower():
                return name
        raise InvalidShortForm(key, text, one_of(text, accepted))

    return read


def matching(pattern: str, expected: str) -> Read:
    def read(key: str, text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise InvalidShortForm(key, text, expected)
        return text

    return read


def sizes(pattern: str, expected: str) -> Read:
    """Whole numbers up to `MAX_SIZE` with + or x between them."""

    def read(key: str, text: str) -> tuple[int, ...]:
        found = tuple(int(size) for size in re.split(r"[+x]", matching(pattern, expected)(key, text)))
        if max(found) > MAX_SIZE:
            raise InvalidShortForm(key, text, f"sizes up to {MAX_SIZE}")
        return found

    return read


def conv_parts(key: str, text: str) -> tuple[ConvPart, ...]:
    parts = []
    for item in text.split("+"):
        found = re.fullmatch(r"([A-Za-z]{0,16})([1-9][0-9]{0,5})(\*?)", item)
        if not found:
            expected = "names with channels, e.g. x1536+B128+C128, with * where every rank has all"
            raise InvalidShortForm(key, item, expected)
        parts.append(ConvPart(found[1] or "x", int(found[2]), bool(found[3])))
    if len({part.name for part in parts}) != len(parts):
        raise InvalidShortForm(key, text, "a name of its own for every sub-projection")
    return tuple(parts)


_ITEM = r"[0-9]{1,5}(-[0-9]{1,5}(/[0-9]{1,5})?)?"
_LISTED = "layers joined by +, e.g. 0-4+6, 0-30/2 for every second, or * for all"
layer_list = matching(rf"\*|{_ITEM}(\+{_ITEM})*", _LISTED)
stages = sizes(r"[1-9][0-9]{0,4}(\+[1-9][0-9]{0,4})*", "layers of every stage joined by +, e.g. 20+12")
state_shape = sizes(
    r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){1,2}", "heads and their shape joined by x, e.g. 24x64x128, or 1536x16"
)
name_template = matching(
    r"[A-Za-z0-9_./:-]{0,120}\{\}[A-Za-z0-9_./:-]{0,120}",
    "a name with {} where the layer's number goes, e.g. model.layers.{}.attn",
)


NO_WINDOW = (0, "*")


def window_of(key: str, text: str) -> tuple[int, str]:
    if text == "0":
        return NO_WINDOW
    tokens, at, listed = text.partition("@")
    return whole(1, 1 << 40)(key, tokens), layer_list(key, listed) if at else "*"


def layers_of(key: str, listed: str, layers: int) -> tuple[int, ...]:
    """The layers of a list like `0-30/2+31`: single layers, inclusive ranges, every n-th of a range."""
    if listed == "*":
        return tuple(range(layers))
    chosen: set[int] = set()
    for item in listed.split("+"):
        span, _, every = item.partition("/")
        first, _, last = span.partition("-")
        low, high, step = int(first), int(last or first), int(every or 1)
        if not low <= high < layers or step < 1:
            raise InvalidShortForm(key, item, f"layers from 0 to {layers - 1}, the lower one first")
        chosen.update(range(low, high + 1, step))
    return tuple(sorted(chosen))
