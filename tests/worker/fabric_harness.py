"""Helpers of the conformance suite: makers of agents on the fake and on NIXL, peers that can be killed, memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import DescriptorRows, Fabric, Indices, MemoryKind, Region, Transfer, TransferState
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork

Memory = npt.NDArray[np.uint8]
DEADLINE_S = 20.0
_PRODUCER = Path(__file__).with_name("fabric_producer.py")


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll `condition`, every 0.2 ms, until it holds; fail the test if it does not within the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.0002)


def finish(fabric: Fabric, transfer: Transfer, deadline_s: float = DEADLINE_S) -> None:
    """Poll until DONE; exceptions of `poll` are not caught."""
    until(lambda: fabric.poll(transfer) is TransferState.DONE, "the read is done", deadline_s)


def arrivals(fabric: Fabric, count: int, sender: Fabric | None = None) -> list[tuple[str, bytes]]:
    """The next `count` notifications or more; `sender` is advanced meanwhile, for one without a progress thread."""
    arrived: list[tuple[str, bytes]] = []

    def enough() -> bool:
        if sender is not None:
            assert sender.take_notifications() == []
        arrived.extend(fabric.take_notifications())
        return len(arrived) >= count

    until(enough, f"{count} notifications arrived")
    return arrived


def region(memory: Memory) -> Region:
    """The whole array."""
    return Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)


def row(memory: Memory, offset: int, length: int, stride: int, count: int) -> tuple[int, int, int, int, int]:
    """One row of `DescriptorRows`, `offset` bytes into the array."""
    return (memory.ctypes.data + offset, length, 0, stride, count)


def rows(*described: tuple[int, int, int, int, int]) -> DescriptorRows:
    return DescriptorRows.of(MemoryKind.DRAM, described)


def indices(*values: int) -> Indices:
    return np.array(values, dtype=np.int32)


def random_bytes(seed: int, size: int) -> Memory:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Producer(ABC):
    """A peer that holds `content` and can die. Real ones are processes, fake ones a name on the network."""

    metadata: bytes
    address: int

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def freeze(self) -> None: ...

    @abstractmethod
    def thaw(self) -> None: ...

    @abstractmethod
    def received(self) -> tuple[str, bytes]:
        """The next notification that it got; waits for it."""

    @abstractmethod
    def send(self, metadata: bytes, message: bytes) -> None:
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
        return MemoryProducer(MemoryFabric(name, self.network), random_bytes(seed, size))


class MemoryProducer(Producer):
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

    def send(self, metadata: bytes, message: bytes) -> None:
        self._fabric.notify(self._fabric.add_peer(metadata), message)


class NixlHarness(Harness):
    """Over loopback TCP and CMA on one host, NIXL's default."""

    ucx: Mapping[str, str] = {}

    def __init__(self) -> None:
        super().__init__()
        self._producers: list[NixlProducer] = []

    def _make(self, name: str) -> Fabric:
        with mock.patch.dict(os.environ, self.ucx):  # UCX reads it when the agent is made; put back afterwards
            return NixlFabric(name)

    def producer(self, name: str, seed: int, size: int) -> NixlProducer:
        made = NixlProducer(name, seed, size, {**os.environ, **self.ucx})
        self._producers.append(made)
        return made

    def close(self) -> None:
        super().close()
        for made in self._producers:
            made.end()


class NixlTcpHarness(NixlHarness):
    """Over TCP alone: every read is asynchronous and needs the peer's progress, as between hosts without RDMA."""

    ucx: Mapping[str, str] = {"UCX_TLS": "tcp"}


class NixlProducer(Producer):
    """A process that runs `fabric_producer.py`: JSON lines out, commands in."""

    def __init__(self, name: str, seed: int, size: int, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PRODUCER), name, str(seed), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environ),
            text=True,
        )
        try:
            hello = self._line()
        except BaseException:
            self.end()
            raise
        self.metadata, self.address = bytes.fromhex(hello["metadata"]), int(hello["address"])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # the signal alone does not stop it at once

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def received(self) -> tuple[str, bytes]:
        line = self._line()
        return line["sender"], bytes.fromhex(line["message"])

    def send(self, metadata: bytes, message: bytes) -> None:
        assert self._process.stdin is not None
        print(metadata.hex(), message.hex(), file=self._process.stdin, flush=True)

    def end(self) -> None:
        """Kill it if it lives, and close the pipes."""
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def _line(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the producer ended with {self._process.poll()}"
        answer: dict[str, str] = json.loads(line)
        return answer
