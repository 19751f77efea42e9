"""Look-ups of host names, each on a thread of its own.

ZMQ looks names up on its one I/O thread, and again at every attempt to connect. A name server that is slow for one name
(which a client can choose) would delay messages to all other peers, until their leases expire.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

MAX_LOOKUPS = 32
"""Most names looked up at once; further look-ups fail at once."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a look-up; `address` is None when there is no such host."""

    host: str
    address: str | None


def address_of(host: str) -> str | None:
    """The address if `host` is one already and needs no look-up, else None."""
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        return None


def look_up(host: str) -> str | None:
    """Ask the system; IPv4 before IPv6, since a listener on a name binds IPv4."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0]) if found else None


class HostNames:
    """Looks names up without blocking the caller.

    Args:
        tell: called with the result, on the thread that found it.
    """

    def __init__(self, tell: Callable[[Found], None], ask: Callable[[str], str | None] = look_up) -> None:
        self._tell = tell
        self._ask = ask
        self._lock = threading.Lock()
        self._asking: set[str] = set()

    def find(self, host: str) -> None:
        """Look a name up; calls for the same name during a look-up share its result."""
        with self._lock:
            if host in self._asking:
                return
            full = len(self._asking) >= MAX_LOOKUPS
            if not full:
                self._asking.add(host)
        if full:
            self._tell(Found(host, None))
            return
        try:
            threading.Thread(target=self._find, args=(host,), name="kvferry-host-name", daemon=True).start()
        except RuntimeError:  # the system gives no more threads
            with self._lock:
                self._asking.discard(host)
            self._tell(Found(host, None))

    def _find(self, host: str) -> None:
        try:
            address = self._ask(host)
        finally:
            with self._lock:
                self._asking.discard(host)
        self._tell(Found(host, address))
