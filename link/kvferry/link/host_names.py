"""Look-ups of host names, each on a thread of its own, for an asyncio loop.

ZMQ looks names up on its one I/O thread, and again at every attempt to connect. A name server that is slow for one name
(which a client can choose) would delay messages to all other peers, until their leases expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from kvferry.link import limits
from kvferry.protocol.hosts import read_address


def plain_address(host: str) -> str | None:
    """The address if `host` is one already and needs no look-up, in its usual spelling; else None."""
    address = read_address(host)
    if address is None:
        return None
    return str(address)


def look_up(host: str) -> str | None:
    """The address of a name, IPv4 before IPv6; None if there is none. Waits for the system's answer."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    if not entries:
        return None
    # Listeners and clients both look names up here, so that a listener binds what its clients find.
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    socket_address = entries[0][4]
    return str(socket_address[0])


def listening_address(host: str) -> str:
    """The address to listen on for a host: the one that its consumers will find. Waits for a look-up.

    Raises:
        OSError: there is no such host.
    """
    # ZMQ would look a name up by itself, for IPv4 alone. So a name with nothing but an IPv6 address could not be bound,
    # or was bound to 127.0.0.1, where no consumer would look for it.
    address = plain_address(host) or look_up(host)
    if address is None:
        raise OSError("no such host")
    return address


class HostNames:
    """Looks names up without blocking the loop. Used on one loop."""

    def __init__(self) -> None:
        self._lookups: dict[str, asyncio.Future[str | None]] = {}
        self._known: dict[str, None] = {}  # names that were found, the latest one last

    async def address(self, host: str) -> str | None:
        """The address of a host, None if there is none. Calls for the same name during a look-up share its result."""
        address = plain_address(host)
        if address is not None:
            return address
        if host not in self._lookups:
            if not self._has_room(host):
                return None
            try:
                self._start_lookup(host)
            except RuntimeError:  # the system gives no more threads
                return None
        # Shielded: a caller that gives up must not cancel the look-up for the others.
        return await asyncio.shield(self._lookups[host])

    def _has_room(self, host: str) -> bool:
        num_known = sum(name in self._known for name in self._lookups)
        if host in self._known:
            return num_known < limits.MAX_KNOWN_LOOKUPS
        return len(self._lookups) - num_known < limits.MAX_LOOKUPS

    def _start_lookup(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str | None] = loop.create_future()

        def run() -> None:
            try:
                address = look_up(host)
            except Exception:  # noqa: BLE001 - a look-up must always end, or its name is never looked up again
                address = None
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, address)

        def end(address: str | None) -> None:
            del self._lookups[host]
            self._remember(host, is_found=address is not None)
            if not result.done():
                result.set_result(address)

        threading.Thread(target=run, name="kvferry-host-name", daemon=True).start()
        self._lookups[host] = result

    def _remember(self, host: str, *, is_found: bool) -> None:
        self._known.pop(host, None)
        if not is_found:
            return
        self._known[host] = None
        if len(self._known) > limits.MAX_REMEMBERED:
            oldest = next(iter(self._known))
            del self._known[oldest]
