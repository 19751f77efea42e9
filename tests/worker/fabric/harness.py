"""Helpers of the conformance suite: makers of agents on the fake and on NIXL, peers that can be killed, memory."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt

from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    MemoryKind,
    Region,
    Transfer,
    TransferState,
)
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.children import Child
from tests.waiting import wait_until

Memory = npt.NDArray[np.uint8]
DEADLINE_S = 20.0


def finish(fabric: Fabric, transfer: Transfer, deadline_s: float = DEADLINE_S) -> None:
    """Poll until DONE; exceptions of `poll` are not caught."""
    wait_until(
        lambda: fabric.poll(transfer) is TransferState.DONE,
        "the read is done",
        deadline_s,
    )


def arrivals(fabric: Fabric, count: int) -> list[tuple[str, bytes]]:
    """The next `count` notifications or more."""
    arrived: list[tuple[str, bytes]] = []

    def enough() -> bool:
        arrived.extend(fabric.take_notifications())
        return len(arrived) >= count

    wait_until(enough, f"{count} notifications arrived")
    return arrived


def region(memory: Memory) -> Region:
    """The whole array."""
    return Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)


def row(
    memory: Memory, offset: int, length: int, stride: int, count: int
) -> tuple[int, int, int, int, int]:
    """One row of `DescriptorRows`, `offset` bytes into the array."""
    return (memory.ctypes.data + offset, length, 0, stride, count)


def rows(*described: tuple[int, int, int, int, int]) -> DescriptorRows:
    return DescriptorRows.from_tuples(MemoryKind.DRAM, described)


def indices(*values: int) -> Indices:
    return np.array(values, dtype=np.int32)


def random_bytes(seed: int, size: int) -> Memory:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Producer(Protocol):
    """A peer that holds random bytes and can die. Real ones are processes, fake ones a name on the network."""

    metadata: bytes
    address: int

    def kill(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def received(self) -> tuple[str, bytes]:
        """The next notification that it got; waits for it."""

    def notify(self, metadata: bytes, message: bytes) -> None:
        """Have it add the agent with this metadata, and notify that agent."""


class Harness(ABC):
    """Makes the agents of one test and closes them."""

    def __init__(self) -> None:
        self._fabrics: list[Fabric] = []

    def fabric(self, name: str) -> Fabric:
        """An agent in this process."""
        made = self._make(name)
        self._fabrics.append(made)
        return made

    @abstractmethod
    def producer(self, name: str, seed: int, size: int) -> Producer:
        """A peer that can be killed, with `random_bytes(seed, size)` registered."""

    @abstractmethod
    def _make(self, name: str) -> Fabric: ...

    def close(self) -> None:
        for made in self._fabrics:
            made.close()


class MemoryHarness(Harness):
    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork()

    def _make(self, name: str) -> Fabric:
        return MemoryFabric(name, self.network)

    def producer(self, name: str, seed: int, size: int) -> Producer:
        return MemoryProducer(
            MemoryFabric(name, self.network), random_bytes(seed, size)
        )


class MemoryProducer:
    def __init__(self, fabric: MemoryFabric, content: Memory) -> None:
        self._fabric, self._content = fabric, content
        fabric.register([region(content)])
        self.metadata, self.address = fabric.metadata(), content.ctypes.data

    def kill(self) -> None:
        self._fabric.network.kill(self._fabric.agent_name)

    def freeze(self) -> None:
        self._fabric.network.freeze(self._fabric.agent_name)

    def thaw(self) -> None:
        self._fabric.network.thaw(self._fabric.agent_name)

    def received(self) -> tuple[str, bytes]:
        (first,) = self._fabric.take_notifications()
        return first

    def notify(self, metadata: bytes, message: bytes) -> None:
        self._fabric.notify(self._fabric.add_peer(metadata), message)


class NixlHarness(Harness):
    """Over loopback TCP and CMA on one host, NIXL's default."""

    ucx: Mapping[str, str] = {}

    def __init__(self) -> None:
        super().__init__()
        self._producers: list[NixlProducer] = []

    def _make(self, name: str) -> Fabric:
        with mock.patch.dict(
            os.environ, self.ucx
        ):  # UCX reads it when the agent is made; put back afterwards
            return NixlFabric(name)

    def producer(self, name: str, seed: int, size: int) -> NixlProducer:
        made = NixlProducer(name, seed, size, self.ucx)
        self._producers.append(made)
        return made

    def close(self) -> None:
        super().close()
        for made in self._producers:
            made.kill()


class NixlTcpHarness(NixlHarness):
    """Over TCP alone: every read is asynchronous and needs the peer's progress, as between hosts without RDMA."""

    ucx: Mapping[str, str] = {"UCX_TLS": "tcp"}


class NixlProducer(Child):
    """A process that serves random bytes."""

    def __init__(
        self, name: str, seed: int, size: int, environ: Mapping[str, str]
    ) -> None:
        super().__init__(_serve, name, seed, size, environ)
        self.metadata, self.address = self.receive()

    def received(self) -> tuple[str, bytes]:
        notification: tuple[str, bytes] = self.receive()
        return notification

    def notify(self, metadata: bytes, message: bytes) -> None:
        self.send((metadata, message))


def _serve(
    channel: Connection, name: str, seed: int, size: int, environ: Mapping[str, str]
) -> None:
    """Send the agent's metadata and the address of its bytes, then every notification that it gets. What arrives is an
    agent's metadata and a message for it."""
    os.environ.update(environ)
    content = random_bytes(seed, size)
    fabric = NixlFabric(name)
    fabric.register([region(content)])
    channel.send((fabric.metadata(), content.ctypes.data))
    with contextlib.suppress(EOFError):
        while True:
            if channel.poll(0.001):
                metadata, message = channel.recv()
                fabric.notify(fabric.add_peer(metadata), message)
            for notification in fabric.take_notifications():
                channel.send(notification)
    fabric.close()
