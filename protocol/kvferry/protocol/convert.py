"""Conversion of plain objects and bytes to typed messages, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from kvferry.protocol.errors import MISSING, InputError, Shown, cut

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

# msgspec gives its reason as one text, and has no attributes for the field and the expected type.
# Both patterns match the whole text: msgspec quotes the refused value, and a hostile value can contain text that looks
# like a path.
_REASON = re.compile(r"(?P<expected>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN_VALUE = re.compile(r"\AInvalid (?:enum )?value ")
_KEY_OF_PATH = re.compile(r"[^.\[\]]+")

OBJECTS = (dict, Mapping)
"""What a JSON object becomes. `dict` first: a check against an abstract class is slow."""

# What an error names where no field can be named.
_WHOLE = "message"
# Messages are nested no deeper than this; hostile ones may be.
_SEARCH_DEPTH = 4


def as_type(value: object, type_: type[T], error: type[InputError]) -> T:
    """Convert plain objects (dicts, lists, numbers, text) to `type_`.

    Raises:
        error: naming the first field that does not fit, its value, and what was expected.
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as refused:
        raise _with_field(refused, value, error) from None
    except UnicodeEncodeError as refused:
        # msgspec encodes text that stands in place of a number, and this error names no field.
        path = _path_of(refused.object, value) or _WHOLE
        expected = "no lone surrogates"
        raise error(path.removeprefix("."), refused.object, expected) from None


def as_nested(value: object, type_: type[S], error: type[InputError], where: str) -> S:
    """Convert the object at the path `where` of another one to a type of plain fields; others are not read.

    A whole float is an integer: some routers decode every JSON number to float64.

    Raises:
        error: naming the path of the first field that does not fit, its value, and what was expected.
    """
    if not isinstance(value, OBJECTS):
        raise error(where, value, "an object")
    plain = {key: value[key] for key in type_.__struct_fields__ if key in value}
    for key, found in plain.items():
        if isinstance(found, float) and found.is_integer():
            plain[key] = int(found)
    try:
        return as_type(plain, type_, error)
    except error as invalid:
        shown = Shown(invalid.shown_value)
        raise error(f"{where}.{invalid.field}", shown, invalid.expected) from None


def decode(
    payload: bytes,
    decoder: msgspec.msgpack.Decoder[T],
    max_bytes: int,
    error: type[InputError],
    *,
    where: str = "",
) -> T:
    """Decode a msgpack message.

    Args:
        where: path of the payload within a message, if it is a part of one.

    Raises:
        error: when the message is longer than `max_bytes`, is not msgpack, or does not fit the decoder's type.
    """
    if len(payload) > max_bytes:
        raise error(
            where or _WHOLE, f"{len(payload)} bytes", f"at most {max_bytes} bytes"
        )
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError as refused:
        raise _with_field(refused, None, error, where) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as refused:
        expected = cut(f"well-formed msgpack ({refused})")
        raise error(where or _WHOLE, payload[:16], expected) from None


def _with_field(
    refused: msgspec.ValidationError,
    root: object,
    error: type[InputError],
    where: str = "",
) -> InputError:
    """The error for msgspec's refusal; `root` is the refused object, None if it was never decoded."""
    expected = str(refused)
    path = ""
    reason = _REASON.fullmatch(expected)
    if reason is not None:
        path = reason.group("path") or ""
        expected = reason.group("expected")
    missing = _MISSING_FIELD.fullmatch(expected)
    if missing is not None:
        return error(_joined(where, path, missing.group(1)), MISSING, "a value")
    expected = expected.removeprefix("Expected ")
    expected = _UNKNOWN_VALUE.sub("a value that this version knows, not ", expected)
    return error(_joined(where, path) or _WHOLE, _value_at(root, path), cut(expected))


def _path_of(text: str, value: object, depth: int = _SEARCH_DEPTH) -> str | None:
    """The path of a text in plain objects, or None if it is not found."""
    for key, child in _children(value):
        name = f"[{key}]" if isinstance(key, int) else f".{key}"
        if child == text:
            return name
        if depth:
            below = _path_of(text, child, depth - 1)
            if below is not None:
                return f"{name}{below}"
    return None


def _children(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return ()


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _value_at(root: object, path: str) -> object:
    """The value that a msgspec path like `a.b[0][1]` points at, or `unusable` when there is none."""
    value = root
    for key in _KEY_OF_PATH.findall(path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif (
            isinstance(value, (list, tuple)) and key.isdigit() and int(key) < len(value)
        ):
            value = value[int(key)]
        else:
            return "unusable"
    # Bytes are not decoded a second time for an error, so there is no value to show.
    if root is None:
        return "unusable"
    return value
