"""Look-ups of host names, each on a thread of its own, for an asyncio loop.

ZMQ looks names up on its one I/O thread, and again at every attempt to connect. A name server that is slow for one name
(which a client can choose) would delay messages to all other peers, until their leases expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from kvferry.protocol.side_channel.hosts import read_address

MAX_LOOKUPS = 128
"""Most unknown names looked up at once; further look-ups of such names fail at once: clients can make names up. More
than a worker's handshakes with unverified hosts, which end before a slow look-up does."""

MAX_KNOWN_LOOKUPS = 32
"""The same for names that were found before, which unknown ones do not hold up."""

_MOST_REMEMBERED = 4096


def address_of(host: str) -> str | None:
    """The address if `host` is one already and needs no look-up, in its usual spelling; else None."""
    address = read_address(host)
    return None if address is None else str(address)


def look_up(host: str) -> str | None:
    """Ask the system, and wait; IPv4 before IPv6. A listener binds what its consumers find: both ask here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0]) if found else None


def listening_address(host: str) -> str:
    """The address to listen on for a host: the one that its consumers will find. Waits for a look-up.

    ZMQ would look a name up by itself, for IPv4 alone; so a name with nothing but an IPv6 address could not be bound,
    or was bound to 127.0.0.1, where no consumer would look for it.

    Raises:
        OSError: there is no such host.
    """
    address = address_of(host) or look_up(host)
    if address is None:
        raise OSError("no such host")
    return address


class HostNames:
    """Looks names up without blocking the loop. Used on one loop."""

    def __init__(self) -> None:
        self._asking: dict[str, asyncio.Future[str | None]] = {}
        self._known: dict[str, None] = {}  # names that were found, the latest one last

    async def address(self, host: str) -> str | None:
        """The address of a host, None if there is none. Calls for the same name during a look-up share its result."""
        known = address_of(host)
        if known is not None:
            return known
        if host not in self._asking:
            is_known = host in self._known
            alike = sum((name in self._known) == is_known for name in self._asking)
            if alike >= (MAX_KNOWN_LOOKUPS if is_known else MAX_LOOKUPS):
                return None
            try:
                self._ask(host)
            except RuntimeError:  # the system gives no more threads
                return None
        return await asyncio.shield(self._asking[host])

    def _ask(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[str | None] = loop.create_future()

        def ask() -> None:
            try:
                address = look_up(host)
            except Exception:  # noqa: BLE001 - a look-up must always end, or its name is never asked for again
                address = None
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, address)

        def end(address: str | None) -> None:
            del self._asking[host]
            self._remember(host, is_found=address is not None)
            if not answered.done():
                answered.set_result(address)

        threading.Thread(target=ask, name="kvferry-host-name", daemon=True).start()
        self._asking[host] = answered

    def _remember(self, host: str, *, is_found: bool) -> None:
        self._known.pop(host, None)
        if is_found:
            self._known[host] = None
            if len(self._known) > _MOST_REMEMBERED:
                del self._known[next(iter(self._known))]
