"""The network between `MemoryFabric`s, and everything that can go wrong with it.

Nothing here has a thread or a clock: bytes move when a fabric is called (`post_read`, `poll`) or when the test says
so, and then completely, so a test that passes once passes always.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region


class AgentBody(msgspec.Struct, frozen=True):
    """Metadata of a fake agent for its peers: its incarnation, and its regions (address, length, kind, device)."""

    incarnation: int
    regions: tuple[tuple[int, int, MemoryKind, int], ...]


@dataclass(slots=True, eq=False)
class Agent:
    """One incarnation of an agent, as the network knows it."""

    name: str
    incarnation: int
    alive: bool = True
    frozen: bool = False
    inbox: deque[tuple[str, bytes]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Copy:
    """A posted read on its way: `pieces` are (local address, remote address, bytes); those before `landed` have."""

    owner: Agent
    pieces: Sequence[tuple[int, int, int]]
    polls_left: int
    fails: bool = False
    landed: int = 0

    @property
    def complete(self) -> bool:
        return self.landed == len(self.pieces)

    def advance(self) -> None:
        """Land one poll's share: with n polls left an nth of the remaining pieces, rounded up."""
        share = -(-(len(self.pieces) - self.landed) // max(1, self.polls_left))
        self.polls_left -= 1
        for local, remote, length in self.pieces[self.landed : self.landed + share]:
            ctypes.memmove(local, remote, length)
        self.landed += share


class MemoryNetwork:
    """Agents of one process that reach each other, and the faults a test injects.

    Attributes:
        polls_to_complete: reads posted from now on land piece by piece over this many polls; 0 completes at once.
        released: reads that were released in flight.
        stutter: names to which notifications are delivered twice, with how many more.
    """

    def __init__(self) -> None:
        self.polls_to_complete = 0
        self.released: list[Copy] = []
        self.stutter: Counter[str] = Counter()
        self._failing: Counter[str] = Counter()
        self._incarnations: dict[int, Agent] = {}
        self.agents: dict[str, Agent] = {}

    def join(self, name: str) -> Agent:
        """A new agent. Its name must be free, or its last bearer dead."""
        assert name not in self.agents or not self.agents[name].alive, (
            f"{name} is on the network already"
        )
        agent = Agent(name, incarnation=len(self._incarnations))
        self._incarnations[agent.incarnation] = agent
        self.agents[name] = agent
        return agent

    def agent_of(self, body: AgentBody) -> Agent | None:
        """The incarnation that `body` describes, dead or alive."""
        return self._incarnations.get(body.incarnation)

    def kill(self, name: str) -> None:
        """The agent dies: reads from it raise `PeerLost` from now on, messages to it vanish until that is noticed."""
        self.agents[name].alive = False

    def freeze(self, name: str) -> None:
        """The agent stands still: reads from it stay in flight, whatever else is set."""
        self.agents[name].frozen = True

    def thaw(self, name: str) -> None:
        """The agent goes on; its reads land at their next poll."""
        self.agents[name].frozen = False

    def thaw_all(self) -> None:
        """Every agent goes on."""
        for agent in self._incarnations.values():
            agent.frozen = False

    def fail_reads(self, name: str, count: int = 1) -> None:
        """The next `count` reads from the agent end in `TransferFailed`, when half of their pieces have landed."""
        self._failing[name] += count

    def start(self, owner: Agent, pieces: Sequence[tuple[int, int, int]]) -> Copy:
        """Begin a read from `owner`; lands at once if nothing delays it."""
        fails = self._failing[owner.name] > 0
        self._failing[owner.name] -= fails
        copy = Copy(
            owner,
            pieces,
            max(2, self.polls_to_complete) if fails else self.polls_to_complete,
            fails,
        )
        if copy.polls_left == 0 and not owner.frozen:
            copy.advance()
        return copy

    def deliver(self, sender: str, receiver: Agent, message: bytes) -> None:
        """Put a message into the receiver's inbox; not at all for dead ones, twice for `stutter`."""
        if not receiver.alive:
            return
        copies = 1
        if self.stutter[receiver.name] > 0:
            self.stutter[receiver.name] -= 1
            copies = 2
        receiver.inbox.extend([(sender, message)] * copies)


def lies_within(rows: DescriptorRows, regions: Sequence[Region]) -> bool:
    """Whether every row, gaps between its descriptors included, lies in one region of its kind and device."""
    return all(
        any(
            region.kind is rows.kind
            and region.device == device
            and region.address <= address
            and address + (count - 1) * stride + length
            <= region.address + region.length
            for region in regions
        )
        for address, length, device, stride, count in rows.rows.tolist()
    )


def expand(rows: DescriptorRows) -> npt.NDArray[np.int64]:
    """[D, 2] int64: address and length of every descriptor, in order."""
    parts: list[npt.NDArray[np.int64]] = [
        np.stack([address + stride * np.arange(count), np.full(count, length)], axis=1)
        for address, length, _, stride, count in rows.rows.tolist()
    ]
    return np.concatenate(parts)
