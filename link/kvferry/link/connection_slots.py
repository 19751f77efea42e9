"""Slots for connections to other engines, shared between the hosts that clients name.

    waits ── its turn ──► connects ──► in use ◄──► idle ── the slot is needed, or it was idle for long ──► (gone)
      └─ too many wait       └─ fails

Clients choose hosts and ports, and an address costs its time until a connection to it is made or has failed: nothing if
its port is closed, the timeout if it drops packets or stays silent. So

- an address takes no slot before its connection is made: whatever clients name, no idle connection is closed for an
  address that does not answer;
- addresses are connected to in turns, few at a time. Those that were connected before (*proven* ones, until an attempt
  fails) have turns of their own, and so have those that no client named;
- renewals and releases have turns of their own, too, and wait for no slot in use: queries cannot keep them waiting, nor
  have them refused because too many wait;
- hosts share. Of the turns, of the slots in use and of the waiting addresses a host gets one more only while it has
  fewer than are free: one host gets half of them, two get a third each, and there is always one for the next.
"""

from __future__ import annotations

import asyncio
import enum
import resource
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from kvferry.link import limits
from kvferry.link.connection import Connection
from kvferry.link.limits import has_share
from kvferry.protocol.errors import HandshakeFailed, KvferryError
from kvferry.protocol.hosts import ChannelAddress, one_spelling


class TurnKind(enum.Enum):
    """Who wants an address to be connected to; each kind has turns of its own."""

    MESSAGE = enum.auto()
    """A renewal or release. Its connection is idle as soon as that has left, so it waits for no slot in use."""
    PROVEN_MESSAGE = enum.auto()
    """The same, and the address was connected before."""
    NAMED = enum.auto()
    """A query whose request names it."""
    PROVEN = enum.auto()
    """Any query, and the address was connected before."""
    SIBLING = enum.auto()
    """A query, because another engine's answer names it as its sibling."""


_PROVEN = {
    TurnKind.MESSAGE: TurnKind.PROVEN_MESSAGE,
    TurnKind.NAMED: TurnKind.PROVEN,
    TurnKind.SIBLING: TurnKind.PROVEN,
}
_MESSAGES = (TurnKind.MESSAGE, TurnKind.PROVEN_MESSAGE)

# With 256 slots 64 addresses of each kind are connected to at a time, and 16 siblings.
SLOTS_PER_TURN = dict.fromkeys(TurnKind, 4) | {TurnKind.SIBLING: 16}


class _ProvenAddresses:
    """Addresses that were connected, until an attempt fails."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[ChannelAddress, None] = OrderedDict()

    def __contains__(self, address: ChannelAddress) -> bool:
        return address in self._addresses

    def add(self, address: ChannelAddress) -> None:
        self._addresses[address] = None
        self._addresses.move_to_end(address)
        if len(self._addresses) > limits.MAX_REMEMBERED:
            # The one connected to longest ago.
            self._addresses.popitem(last=False)

    def discard(self, address: ChannelAddress) -> None:
        self._addresses.pop(address, None)


class _Turns:
    """The attempts to connect to addresses of one kind, and those that wait.

    Attributes:
        connecting: attempts under way, by host.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.connecting: Counter[str] = Counter()
        self._waiting: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = (
            OrderedDict()
        )
        self._num_waiting = 0

    async def begin(self, host: str) -> None:
        """Wait for the turn of this host; `end` must follow, unless this raises.

        Raises:
            HandshakeFailed: too many addresses wait.
        """
        num_of_host = len(self._waiting.get(host, ()))
        if not has_share(num_of_host, self._num_waiting, limits.MAX_WAITING):
            raise HandshakeFailed(
                "too many other addresses of this host wait to be connected"
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, OrderedDict())[turn] = None
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            # The turn may have been given while the cancellation was under way.
            was_given = turn.done() and not turn.cancelled()
            if was_given:
                self.end(host)
            else:
                self._forget(host, turn)
            raise

    def end(self, host: str) -> None:
        self.connecting[host] -= 1
        if not self.connecting[host]:
            del self.connecting[host]

    def give(self, may_begin: Callable[[str], bool]) -> None:
        """Let as many attempts begin as may."""
        # Hosts that may not are passed over. They are few, since each has its share.
        num_passed_over = 0
        num_connecting = self.connecting.total()
        while num_connecting < self._capacity and num_passed_over < len(self._waiting):
            host = next(iter(self._waiting))
            self._waiting.move_to_end(host)
            has_turn = has_share(self.connecting[host], num_connecting, self._capacity)
            if not has_turn or not may_begin(host):
                num_passed_over += 1
                continue
            turn = next(iter(self._waiting[host]))
            self._forget(host, turn)
            if turn.cancelled():
                continue
            self.connecting[host] += 1
            num_connecting += 1
            num_passed_over = 0
            turn.set_result(None)

    def num_waiting(self) -> dict[str, int]:
        """How many wait, by host."""
        return {host: len(turns) for host, turns in self._waiting.items()}

    def _forget(self, host: str, turn: asyncio.Future[None]) -> None:
        turns_of_host = self._waiting.get(host)
        if turns_of_host is None:
            return
        if turn not in turns_of_host:
            return
        del turns_of_host[turn]
        self._num_waiting -= 1
        if not turns_of_host:
            del self._waiting[host]


class ConnectionSlot:
    """A connection and its slot, which is in use from the start if a query waited for it, until `idle` is called."""

    def __init__(
        self,
        slots: ConnectionSlots,
        host: str,
        connection: Connection,
        give_up: Callable[[], None],
    ) -> None:
        self._slots = slots
        self.host = host
        self.connection = connection
        self.give_up = give_up

    def idle(self) -> None:
        """It may be taken for another connection: then `give_up` is called, which must lead to `close`.

        Called again, it is the one that was used last.
        """
        self._slots.set_idle(self)

    def use(self) -> None:
        """It is in use again, if it was not given up, and its host has a share left. Idempotent."""
        self._slots.set_in_use(self)

    def close(self, linger_ms: int) -> None:
        """Close the connection; its unsent messages have `linger_ms` to be sent. Idempotent."""
        self._slots.forget(self)
        self.connection.close(linger_ms=linger_ms)


@dataclass(frozen=True, slots=True)
class ConnectionSlotsSnapshot:
    """The slots at one moment.

    Attributes:
        in_use, idle: the connections by host.
        connecting, waiting: addresses that are connected to, and that wait for their turn, by host.
    """

    in_use: Mapping[str, int]
    idle: Mapping[str, int]
    connecting: Mapping[str, int]
    waiting: Mapping[str, int]


class ConnectionSlots:
    """Used on one loop.

    Args:
        capacity: slots in use, besides those of connections that are being made; as many more are idle at most.
    """

    def __init__(self, capacity: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            capacity = max(1, min(capacity, files // limits.FILES_PER_SLOT))
        self.capacity = capacity
        self._turns = {
            kind: _Turns(max(1, capacity // slots))
            for kind, slots in SLOTS_PER_TURN.items()
        }
        self._proven = _ProvenAddresses()
        self._in_use: dict[ConnectionSlot, None] = {}
        self._in_use_by_host: Counter[str] = Counter()
        # The one that is idle for longest is first.
        self._idle: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._idle_by_host: dict[str, OrderedDict[ConnectionSlot, None]] = {}

    def __len__(self) -> int:
        """The number of connections."""
        return len(self._in_use) + len(self._idle)

    def prove(self, address: ChannelAddress) -> None:
        """This address is connected otherwise: it does not wait for new ones."""
        self._proven.add(address)

    def snapshot(self) -> ConnectionSlotsSnapshot:
        """Who has how many places and turns now."""
        connecting: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for turns in self._turns.values():
            connecting.update(turns.connecting)
            waiting.update(turns.num_waiting())
        return ConnectionSlotsSnapshot(
            in_use=dict(self._in_use_by_host),
            idle={host: len(slots) for host, slots in self._idle_by_host.items()},
            connecting=dict(connecting),
            waiting=dict(waiting),
        )

    async def connect(
        self,
        address: ChannelAddress,
        connect: Callable[[], Awaitable[Connection]],
        give_up: Callable[[], None],
        kind: TurnKind = TurnKind.NAMED,
    ) -> ConnectionSlot:
        """Wait for the turn of this address, and connect.

        Args:
            connect: makes the connection, and has a deadline.
            give_up: as `ConnectionSlot.idle`.

        Raises:
            HandshakeFailed: too many addresses wait.
            KvferryError: as `connect`.
        """
        # By one spelling: a name of seven letters can be written in 128 ways, and each had a share of its own.
        host = one_spelling(address[0])
        if address in self._proven:
            kind = _PROVEN[kind]
        turns = self._turns[kind]
        await self._wait_for_turn(turns, host)
        try:
            connection = await connect()
        except KvferryError:
            self._proven.discard(address)
            raise
        else:
            self._proven.add(address)
            slot = ConnectionSlot(self, host, connection, give_up)
            self._add(slot, kind)
            return slot
        finally:
            turns.end(host)
            self._give_turns()

    async def _wait_for_turn(self, turns: _Turns, host: str) -> None:
        asyncio.get_running_loop().call_soon(self._give_turns)
        try:
            await turns.begin(host)
        except asyncio.CancelledError:
            self._give_turns()  # it may have had its turn
            raise

    # For `ConnectionSlot`.

    def set_idle(self, slot: ConnectionSlot) -> None:
        if slot in self._idle:
            self._idle.move_to_end(slot)
            self._idle_by_host[slot.host].move_to_end(slot)
            return
        if slot not in self._in_use:
            return
        self._end_use(slot)
        self._begin_idle(slot)
        if len(self) > 2 * self.capacity:
            self._take_idle(slot.host)
        self._give_turns()

    def set_in_use(self, slot: ConnectionSlot) -> None:
        # Otherwise whoever has made connections for messages would have more slots for queries than all others leave.
        has_slot = has_share(
            self._in_use_by_host[slot.host], len(self._in_use), self.capacity
        )
        if slot in self._idle and has_slot:
            self._end_idle(slot)
            self._begin_use(slot)

    def forget(self, slot: ConnectionSlot) -> None:
        if slot in self._in_use:
            self._end_use(slot)
            self._give_turns()
        elif slot in self._idle:
            self._end_idle(slot)

    def _add(self, slot: ConnectionSlot, kind: TurnKind) -> None:
        if len(self) >= 2 * self.capacity:
            self._take_idle(slot.host)
        if kind in _MESSAGES:
            self._begin_idle(slot)
        else:
            self._begin_use(slot)

    def _take_idle(self, host: str) -> None:
        """Give up an idle connection for one to this host, if there is one. Connections in use are never taken."""
        # First one of the same host, so that a host displaces itself; then the one that is idle for longest.
        idle_of_host = self._idle_by_host.get(host)
        taken = next(iter(idle_of_host or self._idle), None)
        if taken is not None:
            self._end_idle(taken)
            taken.give_up()

    def _give_turns(self) -> None:
        for kind, turns in self._turns.items():
            if kind in _MESSAGES:
                turns.give(lambda _: True)
            elif len(self._in_use) < self.capacity:
                turns.give(self._may_connect)

    def _may_connect(self, host: str) -> bool:
        # Attempts count as slots in use, or all turns together could bring a host more than its share.
        num_connecting = 0
        for kind, turns in self._turns.items():
            if kind not in _MESSAGES:
                num_connecting += turns.connecting[host]
        num_of_host = self._in_use_by_host[host] + num_connecting
        return has_share(num_of_host, len(self._in_use), self.capacity)

    def _begin_use(self, slot: ConnectionSlot) -> None:
        self._in_use[slot] = None
        self._in_use_by_host[slot.host] += 1

    def _end_use(self, slot: ConnectionSlot) -> None:
        del self._in_use[slot]
        self._in_use_by_host[slot.host] -= 1
        if not self._in_use_by_host[slot.host]:
            del self._in_use_by_host[slot.host]

    def _begin_idle(self, slot: ConnectionSlot) -> None:
        self._idle[slot] = None
        self._idle_by_host.setdefault(slot.host, OrderedDict())[slot] = None

    def _end_idle(self, slot: ConnectionSlot) -> None:
        del self._idle[slot]
        idle_of_host = self._idle_by_host[slot.host]
        del idle_of_host[slot]
        if not idle_of_host:
            del self._idle_by_host[slot.host]
