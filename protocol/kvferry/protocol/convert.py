"""Conversion of plain objects and bytes to typed messages, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from kvferry.protocol.errors import MISSING, InputError, cut

T = TypeVar("T")

# Both are anchored: msgspec quotes the refused value, and a hostile value can contain text that looks like a path.
_AT = re.compile(r"(?P<expected>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"\AInvalid (?:enum )?value ")


def as_type(value: object, type_: type[T], error: type[InputError]) -> T:
    """Convert plain objects (dicts, lists, numbers, text) to `type_`.

    Raises:
        error: naming the first field that does not fit, its value, and what was expected.
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as refused:
        raise _named(refused, value, error) from None
    except UnicodeEncodeError as refused:  # msgspec encodes text that is in place of a number
        raise error(
            (_path_of(refused.object, value) or "message").removeprefix("."),
            refused.object,
            "no lone surrogates",
        ) from None


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
        raise error(where or "message", f"{len(payload)} bytes", f"at most {max_bytes} bytes")
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError as refused:
        raise _named(refused, None, error, where) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as refused:
        raise error(
            where or "message", payload[:16], cut(f"well-formed msgpack ({refused})")
        ) from None


def _named(
    refused: msgspec.ValidationError, root: object, error: type[InputError], where: str = ""
) -> InputError:
    match = _AT.fullmatch(str(refused))
    path = (match.group("path") if match else None) or ""
    expected = match.group("expected") if match else str(refused)
    missing = _MISSING.fullmatch(expected)
    if missing:
        return error(_joined(where, path, missing.group(1)), MISSING, "a value")
    expected = _UNKNOWN.sub(
        "a value that this version knows, not ", expected.removeprefix("Expected ")
    )
    return error(_joined(where, path) or "message", _at_path(root, path), cut(expected))


def _path_of(text: str, value: object, depth: int = 4) -> str | None:
    """The path of a text in plain objects, searched as deep as messages are nested, or None."""
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    for key, child in children:
        name = f"[{key}]" if isinstance(key, int) else f".{key}"
        below = "" if child == text else _path_of(text, child, depth - 1) if depth else None
        if below is not None:
            return f"{name}{below}"
    return None


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _at_path(root: object, path: str) -> object:
    """The value that a msgspec path like `a.b[0][1]` points at, or `unusable` when there is none."""
    value = root
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, (list, tuple)) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return "unusable"
    return "unusable" if value is None and root is None else value
