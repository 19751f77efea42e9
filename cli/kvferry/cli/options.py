"""Values of options, with errors that name the option."""

from __future__ import annotations

import math
import re
from pathlib import Path

from kvferry.cli.errors import InvalidArgument


def whole_option(name: str, text: str, low: int, high: int) -> int:
    """A whole number. Raises `InvalidArgument`."""
    if not re.fullmatch(r"[0-9]{1,15}", text) or not low <= int(text) <= high:
        raise InvalidArgument(name, text, f"a whole number from {low} to {high}")
    return int(text)


def number_option(name: str, text: str, low: float, high: float) -> float:
    """A number. Raises `InvalidArgument`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise InvalidArgument(name, text, f"a number from {low:g} to {high:g}")
    return value


def write_file(name: str, path: str, content: bytes) -> None:
    """Write what an option asks for. Raises `InvalidArgument`."""
    try:
        Path(path).write_bytes(content)
    except (OSError, ValueError) as refused:
        raise InvalidArgument(name, path, f"a file that can be written ({refused})") from None
