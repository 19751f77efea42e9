"""Hostile frames, and what must come of every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvferry.protocol.errors import InvalidMessage

MAX_ERROR = 600

encode_plain = msgspec.msgpack.encode


def decode_plain(frame: bytes) -> dict[str, Any]:
    """A frame as plain objects."""
    plain = msgspec.msgpack.decode(frame)
    assert isinstance(plain, dict)
    return plain


def refused(decode: Callable[[bytes], object], frame: bytes) -> InvalidMessage:
    """The error that `decode` must raise, checked to be short enough for a log."""
    with pytest.raises(InvalidMessage) as caught:
        decode(frame)
    assert len(str(caught.value).encode()) < MAX_ERROR
    return caught.value


def hostile_frames(valid: bytes) -> Iterator[tuple[str, bytes]]:
    """Frames that no decoder may accept, some of them made from a valid one."""
    for length in range(len(valid)):
        yield f"the first {length} bytes", valid[:length]
    for byte in (b"\x00", b"\xc0", b"\xff", valid):
        yield "trailing bytes", valid + byte
    for plain in (
        None,
        True,
        7,
        1.5,
        "hello",
        b"hello",
        [],
        [1],
        {},
        {"type": "unknown"},
        {"type": 7},
        {"type": None},
    ):
        yield f"{plain!r}", encode_plain(plain)
    yield "a type of 100,000 characters", encode_plain({"type": "x" * 100_000})
    yield "deep arrays", b"\x91" * 100_000
    yield "deep maps", b"\x81\xa1a" * 50_000
    yield "a deep unknown field", _with_unknown(valid, b"\x91" * 50_000)
    yield "an array that claims 4 billion items", b"\xdd\xff\xff\xff\xff"
    yield "a map that claims 4 billion items", b"\xdf\xff\xff\xff\xff"
    yield (
        "an unknown field that claims 4 billion items",
        _with_unknown(valid, b"\xdd\xff\xff\xff\xff"),
    )
    yield "text that claims 4 GB", b"\xdb\xff\xff\xff\xff"
    yield "text that is not UTF-8", b"\x81\xa4type\xa5\xff\xfe\xfd\xfc\xfb"
    yield "an extension", b"\xd6\xff\x00\x00\x00\x00"
    yield "a key that is no text", b"\x81\x07\x07"
    yield "an unused opcode", b"\xc1"


def _with_unknown(valid: bytes, value: bytes) -> bytes:
    """The map with one more field: its first byte counts up to 15 of them."""
    assert valid[0] & 0xF0 == 0x80
    assert valid[0] & 0x0F < 15
    return bytes([valid[0] + 1]) + valid[1:] + b"\xa7unknown" + value


def deep(levels: int = 100_000) -> list[Any]:
    """Lists in lists."""
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def wrong_values(
    valid: bytes, wrong: dict[str, list[object]]
) -> Iterator[tuple[str, bytes]]:
    """The valid message with one field changed at a time, by dotted path; `...` removes it."""
    for path, values in wrong.items():
        for value in values:
            plain = decode_plain(valid)
            *holders, name = path.split(".")
            holder: Any = plain
            for key in holders:
                holder = holder[int(key)] if isinstance(holder, list) else holder[key]
            if value is ...:
                del holder[name]
            else:
                holder[name] = value
            yield path, encode_plain(plain)
