"""Slots for connections to other engines, shared between the hosts that clients name.

Clients choose hosts and ports, and an address costs its time until a connection to it is made or has failed: nothing if
its port is closed, the timeout if it drops packets or stays silent. So

- an address takes no place of a connection before its own is made: whatever clients name, no idle connection is closed
  for an address that does not answer;
- addresses are connected to in turns, few at a time. Those that were connected before (*proven* ones, until an attempt
  fails) have turns of their own, and so have those that no client named;
- hosts take turns. Of the turns, of the places in use and of those that wait a host gets one more only while it has
  fewer than are free: one host gets half of them, two get a third each, and there is always one for the next.

    waits ── its turn ──► connects ──► in use ◄──► idle ── the place is needed, or nobody asks for long ──► (gone)
      └─ too many wait       └─ fails

A place that is not in use is taken for another connection: first that of the same host, then the one that is idle for
longest. One in use never is.
"""

from __future__ import annotations

import asyncio
import enum
import resource
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from kvferry.protocol.errors import HandshakeFailed, KvferryError
from kvferry.protocol.side_channel.connection import Connection
from kvferry.protocol.side_channel.hosts import one_spelling
from kvferry.scheduler.fair_share import has_share

Address = tuple[str, int]
"""Host and port of a side channel."""

MOST_WAITING = 4096
"""Most addresses that wait for their turn."""

_MOST_PROVEN = 4096

_FILES_A_PLACE = 16
"""With fewer files for each place there are fewer places. A connection takes four of them."""


class Kind(enum.Enum):
    """Who wants an address to be connected to; each kind has turns of its own."""

    PROVEN = enum.auto()
    """Anyone, and it was connected before."""
    NAMED = enum.auto()
    """A request that names it."""
    OFFERED = enum.auto()
    """Another engine's answer that names it."""


PLACES_A_TURN = {Kind.PROVEN: 4, Kind.NAMED: 4, Kind.OFFERED: 16}
"""With 256 places 64, 64 and 16 addresses are connected to at a time."""


class ProvenAddresses:
    """Addresses that were connected, until an attempt fails. The one connected to longest ago is forgotten first."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[Address, None] = OrderedDict()

    def __contains__(self, address: Address) -> bool:
        return address in self._addresses

    def add(self, address: Address) -> None:
        self._addresses[address] = None
        self._addresses.move_to_end(address)
        if len(self._addresses) > _MOST_PROVEN:
            self._addresses.popitem(last=False)

    def discard(self, address: Address) -> None:
        self._addresses.pop(address, None)


class _Turns:
    """The attempts to connect to addresses of one kind, and those that wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.connecting: Counter[str] = Counter()
        self._waiting: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()

    async def begin(self, host: str) -> None:
        """Wait for the turn of this host; `end` must follow, unless this raises."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(host)
            else:
                self._forget(host, turn)
            raise

    def end(self, host: str) -> None:
        self.connecting[host] -= 1
        if not self.connecting[host]:
            del self.connecting[host]

    def give(self, may_begin: Callable[[str], bool]) -> None:
        """Let as many begin as may. Hosts that may not are passed over; they are few, since each has its share."""
        passed_over = 0
        connecting = self.connecting.total()
        while connecting < self._most and passed_over < len(self._waiting):
            host = next(iter(self._waiting))
            self._waiting.move_to_end(host)
            if not may_begin(host) or not has_share(self.connecting[host], connecting, self._most):
                passed_over += 1
                continue
            turn = next(iter(self._waiting[host]))
            self._forget(host, turn)
            if turn.cancelled():
                continue
            self.connecting[host] += 1
            connecting += 1
            passed_over = 0
            turn.set_result(None)

    def _forget(self, host: str, turn: asyncio.Future[None]) -> None:
        of_host = self._waiting.get(host, OrderedDict())
        of_host.pop(turn, None)
        if not of_host:
            self._waiting.pop(host, None)


class ConnectionSlot:
    """A connection and its place, in use until `idle` is called."""

    def __init__(
        self,
        places: ConnectionSlots,
        host: str,
        connection: Connection,
        give_up: Callable[[], None],
    ) -> None:
        self._places = places
        self.host = host
        self.connection = connection
        self.give_up = give_up

    def idle(self) -> None:
        """It may be taken for another connection: then `give_up` is called, which must lead to `close`. Idempotent."""
        self._places.set_idle(self)

    def use(self) -> None:
        """It is in use again, if it was not given up. Idempotent."""
        self._places.set_in_use(self)

    def close(self, linger_ms: int) -> None:
        """Close the connection; what waits in it has `linger_ms` to be sent. Idempotent."""
        self._places.forget(self)
        self.connection.close(linger_ms=linger_ms)


class ConnectionSlots:
    """Used on one loop.

    Args:
        most: connections, besides those that are being made.
        proven: may be that of other places, so that an address that was asked for a prompt is known when its leases are
            renewed.
    """

    def __init__(self, most: int, proven: ProvenAddresses | None = None) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = (
            most if files == resource.RLIM_INFINITY else max(1, min(most, files // _FILES_A_PLACE))
        )
        self._turns = {
            kind: _Turns(max(1, self.most // places)) for kind, places in PLACES_A_TURN.items()
        }
        self.proven = proven if proven is not None else ProvenAddresses()
        self._waiting: Counter[str] = Counter()
        self._num_waiting = 0
        self._in_use: dict[ConnectionSlot, None] = {}
        self._in_use_by_host: Counter[str] = Counter()
        self._idle: OrderedDict[ConnectionSlot, None] = (
            OrderedDict()
        )  # the one that is idle for longest is first
        self._idle_by_host: dict[str, OrderedDict[ConnectionSlot, None]] = {}

    def __len__(self) -> int:
        """Connections."""
        return len(self._in_use) + len(self._idle)

    async def connect(
        self,
        address: Address,
        connect: Callable[[], Awaitable[Connection]],
        give_up: Callable[[], None],
        kind: Kind = Kind.NAMED,
    ) -> ConnectionSlot:
        """Wait for the turn of this address, and connect.

        Args:
            connect: makes the connection, and has a deadline.
            give_up: as `ConnectionSlot.idle`.

        Raises:
            HandshakeFailed: too many addresses wait.
            KvferryError: as `connect`.
        """
        host = one_spelling(address[0])
        turns = self._turns[Kind.PROVEN if address in self.proven else kind]
        if not has_share(self._waiting[host], self._num_waiting, MOST_WAITING):
            raise HandshakeFailed("too many other addresses of this host wait to be connected")
        self._waiting[host] += 1
        self._num_waiting += 1
        try:
            asyncio.get_running_loop().call_soon(self._give_turns)
            await turns.begin(host)
        except asyncio.CancelledError:
            self._give_turns()  # it may have had its turn
            raise
        finally:
            self._num_waiting -= 1
            self._waiting[host] -= 1
            if not self._waiting[host]:
                del self._waiting[host]
        try:
            connection = await connect()
        except KvferryError:
            self.proven.discard(address)
            raise
        else:
            self.proven.add(address)
            return self._add(ConnectionSlot(self, host, connection, give_up))
        finally:
            turns.end(host)
            self._give_turns()

    # For `ConnectionSlot`.

    def set_idle(self, place: ConnectionSlot) -> None:
        if place not in self._in_use:
            return
        self._end_use(place)
        self._idle[place] = None
        self._idle_by_host.setdefault(place.host, OrderedDict())[place] = None
        if len(self) > self.most:
            self._take_idle(place.host)
        self._give_turns()

    def set_in_use(self, place: ConnectionSlot) -> None:
        if place in self._idle:
            self._end_idle(place)
            self._begin_use(place)

    def forget(self, place: ConnectionSlot) -> None:
        if place in self._in_use:
            self._end_use(place)
            self._give_turns()
        elif place in self._idle:
            self._end_idle(place)

    def _add(self, place: ConnectionSlot) -> ConnectionSlot:
        if len(self) >= self.most:
            self._take_idle(place.host)
        self._begin_use(place)
        return place

    def _take_idle(self, host: str) -> None:
        """Give up an idle connection for one to this host, if there is one."""
        own = self._idle_by_host.get(host)
        taken = next(iter(own or self._idle), None)
        if taken is not None:
            self._end_idle(taken)
            taken.give_up()

    def _give_turns(self) -> None:
        if len(self._in_use) < self.most:
            for turns in self._turns.values():
                turns.give(self._may_connect)

    def _may_connect(self, host: str) -> bool:
        about_to = sum(turns.connecting[host] for turns in self._turns.values())
        return has_share(self._in_use_by_host[host] + about_to, len(self._in_use), self.most)

    def _begin_use(self, place: ConnectionSlot) -> None:
        self._in_use[place] = None
        self._in_use_by_host[place.host] += 1

    def _end_use(self, place: ConnectionSlot) -> None:
        del self._in_use[place]
        self._in_use_by_host[place.host] -= 1
        if not self._in_use_by_host[place.host]:
            del self._in_use_by_host[place.host]

    def _end_idle(self, place: ConnectionSlot) -> None:
        del self._idle[place]
        of_host = self._idle_by_host[place.host]
        del of_host[place]
        if not of_host:
            del self._idle_by_host[place.host]
