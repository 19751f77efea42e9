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
from kvferry.protocol.errors import HandshakeFailed
from kvferry.protocol.hosts import read_address


def plain_address(host: str) -> str | None:
    """The address if `host` is one already and needs no look-up, in its usual spelling; else None."""
    address = read_address(host)
    if address is None:
        return None
    return str(address)


def look_up(host: str) -> str:
    """The address of a name, IPv4 before IPv6. Waits for the system's answer.

    Raises:
        OSError: there is none; the text is the system's reason.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as refused:
        # A name that does not exist and a name server that does not answer are mended by different people.
        raise OSError(refused.strerror or str(refused)) from None
    except UnicodeError as refused:
        raise OSError(f"it is no host name ({refused})") from None
    # Listeners and clients both look names up here, so that a listener binds what its clients find.
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    socket_address = entries[0][4]
    return str(socket_address[0])


def listening_address(host: str) -> str:
    """The address to listen on for a host: the one that its consumers will find. Waits for a look-up.

    Raises:
        OSError: the host has no address; the text says why.
    """
    # ZMQ would look a name up by itself, for IPv4 alone. So a name with nothing but an IPv6 address could not be bound,
    # or was bound to 127.0.0.1, where no consumer would look for it.
    try:
        return plain_address(host) or look_up(host)
    except OSError as refused:
        raise OSError(f"cannot be looked up: {refused}") from None


@dataclass(frozen=True, slots=True)
class _NotFound:
    """Why a name has no address."""

    why: str


# Not an exception in a future: where nobody waits for the result any more, asyncio would log it as a bug.
_Result = str | _NotFound


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
        self._results: dict[str, asyncio.Future[_Result]] = {}
        self._found: dict[str, None] = {}  # names that were found, the latest one last
        # Apart, so that names that clients make up do not hold up those of producers.
        self._of_found = _Lookups(limits.MAX_KNOWN_LOOKUPS)
        self._of_others = _Lookups(limits.MAX_LOOKUPS)

    async def address(self, host: str) -> str:
        """The address of a host. Calls for the same name during a look-up share its result.

        Raises:
            HandshakeFailed: it has none, or too many names are looked up.
        """
        address = plain_address(host)
        if address is not None:
            return address
        if host not in self._results:
            lookups = self._of_found if host in self._found else self._of_others
            if lookups.count >= lookups.most:
                raise _failed("too many other names wait for their look-up")
            result: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
            self._results[host] = result
            lookups.count += 1
            lookups.waiting.append(host)
            self._begin(lookups)
        else:
            result = self._results[host]
        # Shielded: a caller that gives up must not cancel the look-up for the others.
        found = await asyncio.shield(result)
        if isinstance(found, _NotFound):
            raise _failed(found.why)
        return found

    def _begin(self, lookups: _Lookups) -> None:
        """Begin those for which there is a thread."""
        while lookups.waiting and lookups.num_quick < limits.LOOKUPS_AT_ONCE:
            host = lookups.waiting.popleft()
            try:
                self._begin_one(lookups, host)
            except RuntimeError:
                self._end(lookups, host, _NotFound("the system gives no more threads"))

    def _begin_one(self, lookups: _Lookups, host: str) -> None:
        loop = asyncio.get_running_loop()
        is_quick = True

        def no_longer_quick() -> None:
            nonlocal is_quick
            if is_quick:
                is_quick = False
                lookups.num_quick -= 1
                self._begin(lookups)

        def end(found: _Result) -> None:
            slow_timer.cancel()
            self._end(lookups, host, found)
            no_longer_quick()

        def run() -> None:
            found: _Result
            try:
                found = look_up(host)
            except Exception as failed:  # noqa: BLE001 - a look-up must always end, or its name is never looked up again
                found = _NotFound(str(failed))
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, found)

        slow_timer = loop.call_later(limits.SLOW_LOOKUP_S, no_longer_quick)
        lookups.num_quick += 1
        try:
            threading.Thread(target=run, name="kvferry-host-name", daemon=True).start()
        except RuntimeError:
            slow_timer.cancel()
            lookups.num_quick -= 1
            raise

    def _end(self, lookups: _Lookups, host: str, found: _Result) -> None:
        lookups.count -= 1
        self._remember(host, is_found=not isinstance(found, _NotFound))
        result = self._results.pop(host)
        if not result.done():
            result.set_result(found)

    def _remember(self, host: str, *, is_found: bool) -> None:
        self._found.pop(host, None)
        if not is_found:
            return
        self._found[host] = None
        if len(self._found) > limits.MAX_REMEMBERED:
            oldest = next(iter(self._found))
            del self._found[oldest]


def _failed(why: str) -> HandshakeFailed:
    return HandshakeFailed(f"cannot be looked up: {why}")
