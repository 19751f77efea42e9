"""Checks of the values of `kv_connector_extra_config`: each takes a key and a raw value, and returns the value to use.

Raises:
    InvalidConfig: from every check; the text names the key, the value and what is valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.hosts import address_of
from kvferry.protocol.prefix_sources import MAX_SOURCES

SMALLEST_POOL_BYTES = 1 << 20
"""Below this size a wave would hold next to nothing."""
MAX_ALLOWED_HOSTS = 1024
MAX_PREWARM_PEERS = 256

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
"""By their text in lower case: the upstream guide writes `"True"`, in quotes."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The check of a number from `low` to `high`, both included."""

    low: float
    high: float
    is_whole: bool = False

    def __call__(self, key: str, value: Any) -> float:
        accepted_types = (int,) if self.is_whole else (int, float)
        # In Python True is a number, and `"num_threads": true` is a mistake.
        if isinstance(value, bool) or not isinstance(value, accepted_types):
            raise InvalidConfig(key, value, self._expected())
        if not self.low <= value <= self.high:
            raise InvalidConfig(key, value, self._expected())
        if self.is_whole:
            return value
        return float(value)

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
            raise InvalidConfig(key, value, " or ".join(values))
        return str(value)

    return check


def fraction(key: str, value: Any) -> float:
    """A fraction: above 0, at most 1."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= 1
    ):
        raise InvalidConfig(key, value, "a number above 0 and at most 1")
    return float(value)


def pool_size(key: str, value: Any) -> int:
    """Bytes of the staging pool; 0 for none."""
    size = whole(0, 1 << 40)(key, value)
    if 0 < size < SMALLEST_POOL_BYTES:
        raise InvalidConfig(key, value, f"at least {SMALLEST_POOL_BYTES}, or 0")
    return int(size)


def yes_or_no(key: str, value: Any) -> bool:
    """True or false, or 0 or 1; may be quoted, in upper or lower case."""
    boolean = None
    if isinstance(value, str) or value in (0, 1):
        boolean = _BOOLEANS.get(str(value).lower())
    if boolean is None:
        raise InvalidConfig(key, value, "true or false")
    return boolean


def name(key: str, value: Any) -> str:
    """A short text."""
    if not _is_printable_text(value, 256):
        raise InvalidConfig(key, value, "a text of 1 to 256 printable characters")
    return str(value)


def path(key: str, value: Any) -> str:
    """A path, which need not exist."""
    if not _is_printable_text(value, 4096):
        raise InvalidConfig(key, value, "a path of printable characters")
    return str(value)


def _is_printable_text(value: Any, max_length: int) -> bool:
    if not isinstance(value, str):
        return False
    return 1 <= len(value) <= max_length and value.isprintable()


def _is_list_of_texts(value: Any, *, max_length: int) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) > max_length:
        return False
    return all(isinstance(entry, str) for entry in value)


def hosts(key: str, value: Any) -> tuple[str, ...]:
    """One or more host patterns."""
    expected = (
        'a list of hosts: names, "*." and a name, addresses, networks in CIDR notation, or "*" for any host (clients '
        "must be trusted then)"
    )
    # An empty list would allow no host at all.
    if not _is_list_of_texts(value, max_length=MAX_ALLOWED_HOSTS) or not value:
        raise InvalidConfig(key, value, expected)
    try:
        AllowedHosts.from_entries(value)
    except ValueError as bad:
        raise InvalidConfig(key, str(bad), expected) from None
    return tuple(value)


def addresses(key: str, value: Any) -> tuple[str, ...]:
    """Side channels, each `host:port`."""
    expected = (
        f"a list of at most {MAX_PREWARM_PEERS} addresses of side channels,"
        ' e.g. ["10.1.2.3:5600", "[fd00::1]:5600"]'
    )
    if not _is_list_of_texts(value, max_length=MAX_PREWARM_PEERS):
        raise InvalidConfig(key, value, expected)
    try:
        for peer in value:
            address_of(peer)
    except ValueError as bad:
        raise InvalidConfig(key, str(bad), expected) from None
    return tuple(value)


def sources(key: str, value: Any) -> tuple[str, ...]:
    """Side channels that are asked for prefixes, each `host:port`, each once."""
    listed = addresses(key, value)
    # A request asks all of them.
    if len(listed) > MAX_SOURCES or len(set(listed)) < len(listed):
        expected = f"at most {MAX_SOURCES} side channels, each once"
        raise InvalidConfig(key, list(listed), expected)
    return listed


def plugins(key: str, value: Any) -> tuple[str, ...]:
    """Names of NIXL plugins; an empty list means UCX alone, as in the stock connector."""
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(plugin, str) and plugin for plugin in value):
        raise InvalidConfig(key, value, 'a list of names of NIXL plugins, e.g. ["UCX"]')
    return tuple(value) or ("UCX",)
