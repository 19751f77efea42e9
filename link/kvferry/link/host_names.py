"""Look-ups of host names on a few threads, for an asyncio loop.

ZMQ looks names up on its one I/O thread, and again at every attempt to connect. A name server that is slow for one name
(which a client can choose) would delay messages to all other peers, until their leases expire.

Where name servers answer, look-ups have `LOOKUPS_AT_ONCE` threads. One that is slow lets the next begin, so a name that
is never answered keeps no other waiting: up to `MAX_LOOKUPS` threads then wait for the system's resolver. There is no
other way to wait for it, and none to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Lookups:
    """Look-ups of names that were found before, or of others.

    Attributes:
        most: waiting and under way.
        waiting: names in the order in which they are looked up.
        num_quick: under way, and not slow yet.
        count: waiting and under way.
    """

    most: int
    waiting: deque[str] = field(default_factory=deque)
    num_quick: int = 0
    count: int = 0


class HostNames:
    """Looks names up without blocking the loop. Used on one loop."""

    def __init__(self) -> None:
        self._results: dict[str, asyncio.Future[str | None]] = {}
        self._found: dict[str, None] = {}  # names that were found, the latest one last
        # Apart, so that names that clients make up do not hold up those of producers.
        self._of_found = _Lookups(limits.MAX_KNOWN_LOOKUPS)
        self._of_others = _Lookups(limits.MAX_LOOKUPS)

    async def address(self, host: str) -> str | None:
        """The address of a host, None if there is none. Calls for the same name during a look-up share its result."""
        address = plain_address(host)
        if address is not None:
            return address
        if host not in self._results:
            lookups = self._of_found if host in self._found else self._of_others
            if lookups.count >= lookups.most:
                return None
            result: asyncio.Future[str | None] = (
                asyncio.get_running_loop().create_future()
            )
            self._results[host] = result
            lookups.count += 1
            lookups.waiting.append(host)
            self._begin(lookups)
        else:
            result = self._results[host]
        # Shielded: a caller that gives up must not cancel the look-up for the others.
        return await asyncio.shield(result)

    def _begin(self, lookups: _Lookups) -> None:
        """Begin those for which there is a thread."""
        while lookups.waiting and lookups.num_quick < limits.LOOKUPS_AT_ONCE:
            host = lookups.waiting.popleft()
            try:
                self._begin_one(lookups, host)
            except RuntimeError:  # the system gives no more threads
                self._end(lookups, host, None)

    def _begin_one(self, lookups: _Lookups, host: str) -> None:
        loop = asyncio.get_running_loop()
        is_quick = True

        def no_longer_quick() -> None:
            nonlocal is_quick
            if is_quick:
                is_quick = False
                lookups.num_quick -= 1
                self._begin(lookups)

        def end(address: str | None) -> None:
            slow_timer.cancel()
            self._end(lookups, host, address)
            no_longer_quick()

        def run() -> None:
            try:
                address = look_up(host)
            except Exception:  # noqa: BLE001 - a look-up must always end, or its name is never looked up again
                address = None
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, address)

        slow_timer = loop.call_later(limits.SLOW_LOOKUP_S, no_longer_quick)
        lookups.num_quick += 1
        try:
            threading.Thread(target=run, name="kvferry-host-name", daemon=True).start()
        except RuntimeError:
            slow_timer.cancel()
            lookups.num_quick -= 1
            raise

    def _end(self, lookups: _Lookups, host: str, address: str | None) -> None:
        lookups.count -= 1
        self._remember(host, is_found=address is not None)
        result = self._results.pop(host)
        if not result.done():
            result.set_result(address)

    def _remember(self, host: str, *, is_found: bool) -> None:
        self._found.pop(host, None)
        if not is_found:
            return
        self._found[host] = None
        if len(self._found) > limits.MAX_REMEMBERED:
            oldest = next(iter(self._found))
            del self._found[oldest]
