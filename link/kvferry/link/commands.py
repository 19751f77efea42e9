"""What passes between the ledgers of an engine and its side channel, without a socket or a thread.

    consumer's ledger     RenewLease, ForgetLease, ReleaseLease ──► LeaseRenewer     (`renewer.py`)
    its open queries      StartQuery, StartSearch, StopQuery ─────► QueryClient      (`query_client.py`)
    producer's ledger     ◄── LeaseInbox, at the next step ──────── the listener     (`server.py`)

Each is carried out in the order in which it was added; none of them waits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvferry.link import limits
from kvferry.protocol.digests import GrowingChain
from kvferry.protocol.handshake import LeaseName, Release, Renew
from kvferry.protocol.hosts import ChannelAddress
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.queries import PromptProgress, PromptQuery

# Leases of other engines.


LeaseKey = tuple[str, int, str]
"""Boot, slot and epoch: a lease among all leases of all engines."""


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """A lease of another engine, and the address of its side channel."""

    host: str
    port: int
    boot: str
    name: LeaseName
    lease_s: float

    @classmethod
    def from_params(cls, source: RemotePrefill) -> RemoteLease:
        """The lease that params name."""
        ticket = source.kvferry
        return cls(
            host=source.remote_host,
            port=source.remote_port,
            boot=ticket.boot,
            name=LeaseName(slot=ticket.lease_slot, epoch=ticket.lease_epoch),
            lease_s=ticket.lease_s,
        )

    @property
    def key(self) -> LeaseKey:
        return (self.boot, self.name.slot, self.name.epoch)


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Renew this lease from now on.

    Attributes:
        at_once: renew it now, not after the first interval: until a turn is renewed, its producer knows of no reader
            and may evict it.
    """

    lease: RemoteLease
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class ForgetLease:
    """Stop renewing; the workers have notified the producer themselves."""

    lease: RemoteLease


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Stop renewing and release the lease: this engine does not read under it any more."""

    lease: RemoteLease


LeaseCommand = RenewLease | ForgetLease | ReleaseLease


# Queries of other engines.


Producer = ChannelAddress
"""A producer of which nothing is known but where it listens."""


@dataclass(frozen=True, slots=True)
class StartQuery:
    """Query this producer, again and again until `StopQuery`."""

    producer: Producer
    query: PromptQuery


@dataclass(frozen=True, slots=True)
class StartSearch:
    """Ask all of these engines what they have of a prompt, until `StopQuery`.

    Attributes:
        chain: grown on the thread that asks, up to `most_tokens`: a long prompt's digests take longer than a step may.
        min_tokens: a shorter prefix is of no use.
    """

    number: int
    producers: tuple[Producer, ...]
    chain: GrowingChain
    most_tokens: int
    min_tokens: int


@dataclass(frozen=True, slots=True)
class StopQuery:
    """The query, or the search, is settled."""

    number: int


QueryCommand = StartQuery | StartSearch | StopQuery


class QueryCommands:
    """Commands that the side channel has not taken yet, and the numbers of the queries in them.

    Queries about prompts and searches for prefixes have one together: an answer has a number, and nothing else that
    tells which it is of.

    Attributes:
        waiting: the commands, in order.
    """

    def __init__(self) -> None:
        self.waiting: list[QueryCommand] = []
        self._numbers = count()

    def next_number(self) -> int:
        """The number of a new query."""
        return next(self._numbers)

    def add(self, command: QueryCommand) -> None:
        """The side channel is to do this, after all that was added before."""
        self.waiting.append(command)

    def take(self) -> tuple[QueryCommand, ...]:
        """Commands since the last call, in order."""
        commands = tuple(self.waiting)
        self.waiting.clear()
        return commands


SETTLING = (PromptProgress.TICKET, PromptProgress.OVER)
"""Answers that settle a query."""


# Renewals and releases by other engines.


LeaseMessage = Renew | Release


class ReceivedLease(NamedTuple):
    """One lease of one message.

    Attributes:
        boot: the boot that the message was addressed to.
        received_s: time of arrival on the engine's `AwakeClock`; None without a clock.
    """

    kind: type[LeaseMessage]
    boot: str
    name: LeaseName
    received_s: float | None


class LeaseInbox:
    """Renewals and releases that wait for the next step. Filled by the listener's thread, emptied by the engine's.

    An idle engine takes no steps for minutes, while consumers renew with every heartbeat. So one entry is kept for each
    lease and kind: a renewal replaces the one before it. The time of its arrival is kept, since it counts from there.

    Attributes:
        received: what waits; a lease that was renewed and released is in it twice. Its truth may be read on any thread:
            at worst a message is seen a step later.
    """

    def __init__(self) -> None:
        self.received: dict[
            tuple[type[LeaseMessage], str, LeaseName], float | None
        ] = {}
        self._lock = threading.Lock()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        """Add all leases of a message. False if too many wait already; then none is added."""
        keys = [
            (type(message), message.boot, name)
            for name in dict.fromkeys(message.leases)
        ]
        # Without the lock: the engine's thread only ever takes all of it, and then there are fewer.
        received = self.received
        num_new = sum(key not in received for key in keys)
        if len(received) + num_new > limits.MAX_WAITING_LEASES:
            return False
        # A few at a time: a message may have 4,096, which take milliseconds, and the engine would wait as long.
        for start in range(0, len(keys), limits.LEASES_AT_ONCE):
            with self._lock:
                for key in keys[start : start + limits.LEASES_AT_ONCE]:
                    # Popped, so that the latest is last: a renewal and a release are applied in the order they came in.
                    self.received.pop(key, None)
                    self.received[key] = received_s
        return True

    def take(self) -> list[ReceivedLease]:
        """Remove and return all entries, in the order of their latest arrival."""
        if not self.received:
            return []
        with self._lock:
            received = self.received
            self.received = {}
        return [ReceivedLease(*key, received_s) for key, received_s in received.items()]
