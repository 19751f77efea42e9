"""Arguments and options: their values, and errors that name the field, the value and what is accepted.

InputError (`kvferry.protocol.errors`)
├── InvalidArgument  an argument, an option, or a key of an engine that is written as `layers=32,heads=8,…`
├── InvalidModel     a model's config.json
├── InvalidSide      any of these in PRODUCER or CONSUMER
└── InvalidCopies    the file of `--copies`
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from kvferry.protocol.errors import InputError, KvferryError, Shown, cut


def read_address(name: str, text: str, default_port: int = 0) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`; the port may be left out if there is a default.

    Raises:
        InvalidArgument: it is neither.
    """
    match = re.fullmatch(
        # Not urllib: it takes user names, paths, and hosts that no name server knows.
        r"(?:\[(?P<six>[0-9A-Fa-f:.%a-z]+)\]|(?P<name>[^\s:/\[\]]+))(?::(?P<port>[0-9]{1,5}))?",
        text,
    )
    if match is not None:
        port = int(match["port"] or default_port)
        if 1 <= port <= 65535:
            return match["six"] or match["name"], port
    expected = "host:port, or [address]:port for IPv6, with a port from 1 to 65535"
    raise InvalidArgument(name, text, expected)


class InvalidArgument(InputError):
    """An argument, option or key of a short form that cannot be used."""

    what = ""


class InvalidModel(InputError):
    """A model's config.json that cannot be used, or does not say enough."""

    what = "config.json"


class InvalidSide(InputError):
    """An engine on the command line that cannot be used. `role`: `PRODUCER` or `CONSUMER`."""

    def __init__(self, role: str, wrong: InputError) -> None:
        text = str(wrong)
        if wrong.field != role:
            text = f"{role}: {text}"
        # Not `InputError`'s own: the text is that of the error within.
        KvferryError.__init__(self, text)
        self.field = wrong.field
        self.shown_value = wrong.shown_value
        self.expected = wrong.expected


class InvalidCopies(InputError):
    """A request for `--copies` that cannot be used."""

    what = "request"


def whole_option(name: str, text: str, low: int, high: int) -> int:
    """A whole number.

    Raises:
        InvalidArgument: it is none from `low` to `high`.
    """
    # `int` also takes signs, underscores, blanks and digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,15}", text) or not low <= int(text) <= high:
        raise InvalidArgument(name, text, f"a whole number from {low} to {high}")
    return int(text)


def number_option(name: str, text: str, low: float, high: float) -> float:
    """A number.

    Raises:
        InvalidArgument: it is none from `low` to `high`.
    """
    try:
        value = float(text)
    except ValueError:
        # NaN fails every comparison below.
        value = math.nan
    if not low <= value <= high:
        raise InvalidArgument(name, text, f"a number from {low:g} to {high:g}")
    return value


def read_file(
    error_class: type[InputError], name: str, path: str, max_bytes: int
) -> bytes:
    """The content of the file that an argument names, at most `max_bytes` and one more.

    Raises:
        error_class: it cannot be read.
    """
    # One byte more than is accepted, so that the caller sees that the file is too long.
    try:
        with open(path, "rb") as stream:
            return stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise error_class(name, path, f"a file that can be read ({error})") from None


def read_json(error_class: type[InputError], text: bytes, max_bytes: int) -> object:
    """The plain objects of a file's content.

    Raises:
        error_class: it is too long, or no JSON.
    """
    # Imported by those that read JSON: the doctor must be able to say that the package is missing.
    import msgspec

    if len(text) > max_bytes:
        raise error_class(
            "file", Shown(f"{len(text)} bytes"), f"at most {max_bytes} bytes"
        )
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as refused:
        raise error_class(
            "file", text[:32], cut(f"JSON in UTF-8 ({refused})")
        ) from None


def write_file(name: str, path: str, pieces: Iterable[str]) -> None:
    """Write the file that an option names.

    Raises:
        InvalidArgument: it cannot be written.
    """
    try:
        with open(
            path, "w", encoding="utf-8", errors="replace", newline="\n"
        ) as stream:
            stream.writelines(pieces)
    except (OSError, ValueError) as refused:
        raise InvalidArgument(
            name, path, f"a file that can be written ({refused})"
        ) from None
