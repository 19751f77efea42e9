"""Checks of the values of `kv_connector_extra_config`: each takes a key and a raw value, and returns the value to use.

Raises:
    InvalidConfig: from every check; the text names the key, the value and what is valid.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.protocol.errors import InvalidConfig, shorten
from kvferry.protocol.side_channel.allowed_hosts import AllowedHosts
from kvferry.protocol.side_channel.hosts import read_host

logger = logging.getLogger(__name__)

SMALLEST_POOL_BYTES = 1 << 20
"""Below this size a wave would hold next to nothing."""
MAX_ALLOWED_HOSTS = 1024
MAX_PREWARM_PEERS = 256

_CHOICES = {"true": True, "1": True, "false": False, "0": False}
"""Keys in lower case: the upstream guide writes `"True"`, in quotes."""


_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/\[\]]{1,253})):(?P<port>[0-9]{1,5})"
)


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[address]:port`. Raises `ValueError` with the text if it is neither."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise ValueError(text)
    host = found["six"] or found["name"]
    try:
        read_host(host)
    except ValueError:
        raise ValueError(text) from None
    return host, int(found["port"])


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The check of a number from `low` to `high`, both included."""

    low: float
    high: float
    is_whole: bool = False

    def __call__(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            raise InvalidConfig(key, value, self._expected())
        if not self.low <= value <= self.high:
            raise InvalidConfig(key, value, self._expected())
        return value if self.is_whole else float(value)

    def nearest(self, key: str, value: Any) -> float:
        """The number in range that is nearest to `value`, which may be quoted."""
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if math.isnan(found):
            raise InvalidConfig(key, value, self._expected())
        clipped = min(max(found, self.low), self.high)
        if clipped != found:
            logger.warning(
                "%s=%s is out of range: %g is used; %s",
                key,
                shorten(value),
                clipped,
                self._expected(),
            )
        return int(clipped) if self.is_whole else float(clipped)

    def _expected(self) -> str:
        if self.is_whole:
            return f"a whole number from {self.low} to {self.high}"
        return f"a number from {self.low:g} to {self.high:g}"


def number(low: float, high: float) -> NumberRange:
    """A number, whole or not."""
    return NumberRange(low, high)


def whole(low: int, high: int) -> NumberRange:
    """A whole number."""
    return NumberRange(low, high, is_whole=True)


def choice(*values: str) -> Callable[[str, Any], str]:
    """One of these words."""

    def check(key: str, value: Any) -> str:
        if value not in values:
            raise InvalidConfig(key, value, f"a choice: {' or '.join(values)}")
        return str(value)

    return check


def share(key: str, value: Any) -> float:
    """A fraction: above 0, at most 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InvalidConfig(key, value, "a number above 0, up to 1")
    return float(value)


def pool_size(key: str, value: Any) -> int:
    """Bytes of the staging pool; 0 for none."""
    size = whole(0, 1 << 40)(key, value)
    if 0 < size < SMALLEST_POOL_BYTES:
        raise InvalidConfig(key, value, f"at least {SMALLEST_POOL_BYTES}, or 0")
    return int(size)


def yes_or_no(key: str, value: Any) -> bool:
    """True or false, or 0 or 1; may be quoted, in upper or lower case."""
    choice = _CHOICES.get(str(value).lower()) if isinstance(value, str) or value in (0, 1) else None
    if choice is None:
        raise InvalidConfig(key, value, "a choice: true or false")
    return choice


def name(key: str, value: Any) -> str:
    """A short text."""
    if not isinstance(value, str) or not 1 <= len(value) <= 256 or not value.isprintable():
        raise InvalidConfig(key, value, "a text of 1 to 256 printable characters")
    return value


def path(key: str, value: Any) -> str:
    """A path, which need not exist."""
    if not isinstance(value, str) or not 1 <= len(value) <= 4096 or not value.isprintable():
        raise InvalidConfig(key, value, "a path of printable characters")
    return value


def hosts(key: str, value: Any) -> tuple[str, ...]:
    """One or more host patterns."""
    expected = (
        'a list of hosts: names, "*." and a name, addresses, networks in CIDR notation, or "*" for any host (clients '
        "are trusted then)"
    )
    few = isinstance(value, (list, tuple)) and 1 <= len(value) <= MAX_ALLOWED_HOSTS
    if not few or not all(isinstance(x, str) for x in value):
        raise InvalidConfig(key, value, expected)
    try:
        AllowedHosts.of(value)
    except ValueError as bad:
        raise InvalidConfig(key, str(bad), expected) from None
    return tuple(value)


def addresses(key: str, value: Any) -> tuple[str, ...]:
    """Side channels, each `host:port`."""
    expected = (
        f"a list of at most {MAX_PREWARM_PEERS} side channels of producers,"
        ' e.g. ["10.1.2.3:5600", "[fd00::1]:5600"]'
    )
    few = isinstance(value, (list, tuple)) and len(value) <= MAX_PREWARM_PEERS
    if not few or not all(isinstance(x, str) for x in value):
        raise InvalidConfig(key, value, expected)
    try:
        for one in value:
            address_of(one)
    except ValueError as bad:
        raise InvalidConfig(key, str(bad), expected) from None
    return tuple(value)


def names(key: str, value: Any) -> tuple[str, ...]:
    """Names of NIXL plugins; an empty list means UCX alone, as in the stock connector."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) and x for x in value):
        raise InvalidConfig(key, value, 'a list of names of NIXL plugins, e.g. ["UCX"]')
    return tuple(value) or ("UCX",)
