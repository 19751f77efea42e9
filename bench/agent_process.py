"""NIXL agents in a process of their own, with UCX settings of its own, which may be stopped or killed.

    with closing(AgentProcess({"UCX_TLS": "tcp"})) as process:
        (peer,) = process.tell("make", count=1, num_bytes=4096)

The orders are the methods of `Agents`.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.llama import llama
from kvferry.link.client import SideChannelClient
from kvferry.link.counters import Counters
from kvferry.link.server import SideChannelListener
from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_transfer
from kvferry.protocol.handshake import EngineDescription, LeaseTableAddress
from kvferry.protocol.slots import (
    SLOT_BYTES,
)
from kvferry.worker.fabric.nixl import AgentConfig, NixlFabric
from kvferry.worker.fabric.port import (
    DescriptorRows,
    MemoryKind,
    PeerAgent,
    Region,
    TransferState,
)

HOST, ENGINE = "127.0.0.1", "P"
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - listeners of benchmarks, at all addresses of 127.0.0.0/8
_TIMEOUT_S = 60.0
_ONE = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True)
class Peer:
    """All that another agent needs to read from one."""

    metadata: bytes
    address: int


class Agent:
    """One agent, its memory, and the one peer that it reads from."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self.num_bytes = num_bytes
        self.address = int(np.frombuffer(self._memory, dtype=np.uint8).ctypes.data)
        self.fabric = NixlFabric(uuid.uuid4().hex[:12], AgentConfig())
        self.fabric.register([Region(self.address, num_bytes, MemoryKind.DRAM)])
        self.peer: PeerAgent | None = None

    def connect(self, peer: Peer) -> None:
        """Add a peer and read 8 bytes of its memory.

        Raises:
            TimeoutError: the read does not end.
        """
        self.peer = self.fabric.add_peer(peer.metadata)
        here, there = (
            DescriptorRows.from_tuples(
                MemoryKind.DRAM, [(at, SLOT_BYTES, 0, SLOT_BYTES, 1)]
            )
            for at in (self.address, peer.address)
        )
        local, remote = (
            self.fabric.prepare_local(here),
            self.fabric.prepare_remote(self.peer, there),
        )
        transfer = self.fabric.post_read(local, _ONE, remote, _ONE)
        end_s = time.perf_counter() + _TIMEOUT_S
        while self.fabric.poll(transfer) is TransferState.IN_FLIGHT:
            if time.perf_counter() > end_s:
                raise TimeoutError(
                    f"the first read does not end within {_TIMEOUT_S:g} s"
                )
            time.sleep(20e-6)
        self.fabric.release(transfer)

    def make_contact(self, port: int) -> float:
        """Do a worker's first contact, without the tables of its layers; returns seconds."""
        engine = _engine("C")
        start = time.perf_counter()
        with SideChannelClient() as client:
            description = client.fetch_description(HOST, port, ENGINE, "C", _TIMEOUT_S)
        plan_transfer(engine, 0, description, Costs())
        worker = description.workers[0]
        self.connect(Peer(worker.agent_metadata, worker.lease_table.address))
        return time.perf_counter() - start


class Agents:
    """The agents of the process, numbered from 0."""

    def __init__(self) -> None:
        self._agents: dict[int, Agent] = {}
        self._listener: SideChannelListener | None = None

    def make(self, count: int, num_bytes: int) -> list[Peer]:
        """Agents with so much memory each."""
        made = [Agent(num_bytes) for _ in range(count)]
        self._agents |= enumerate(made, len(self._agents))
        return [Peer(one.fabric.metadata(), one.address) for one in made]

    def connect(self, agent: int, peer: Peer) -> None:
        """See `Agent.connect`."""
        self._agents[agent].connect(peer)

    def listen(self) -> int:
        """A side channel that describes an engine whose worker is the first agent; returns its port."""
        agent, engine = self._agents[0], _engine(ENGINE)
        worker = msgspec.structs.replace(
            engine.workers[0],
            agent=agent.fabric.agent_name,
            agent_metadata=agent.fabric.metadata(),
            lease_table=LeaseTableAddress(
                address=agent.address, slots=agent.num_bytes // SLOT_BYTES
            ),
        )
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        self._listener = SideChannelListener(ANY_ADDRESS, port, Counters())
        self._listener.publish(msgspec.structs.replace(engine, workers=(worker,)))
        return port

    def contact(self, agents: Sequence[int], port: int) -> list[float]:
        """Seconds of a first contact of each agent, all at once, each on a thread of its own."""
        with ThreadPoolExecutor(len(agents)) as pool:
            return list(
                pool.map(lambda one: self._agents[one].make_contact(port), agents)
            )

    def send(self, agent: int) -> None:
        """Send messages to the peer, one behind the other, until the process is killed."""
        sender = self._agents[agent]
        assert sender.peer is not None, "it is not connected"
        while True:
            sender.fabric.notify(sender.peer, bytes(64))

    def receive(self, agent: int) -> int:
        """How many messages have come since it was last asked."""
        return len(self._agents[agent].fabric.take_notifications())

    def usage(self) -> dict[str, float]:
        """Of this process."""
        return usage()

    def close(self, agent: int) -> None:
        """End an agent without notifying its peers."""
        self._agents.pop(agent).fabric.close()
        gc.collect()


def _engine(engine_id: str) -> EngineDescription:
    """Either end of a contact."""
    return llama(engine_id, tp=1, layout="HND", blocks=1000, layers=30)


def usage() -> dict[str, float]:
    """Memory, files and processor time of this process."""
    folder = Path("/proc/self")
    return {
        "rss_mb": int((folder / "statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 1e6,
        "files": len(os.listdir(folder / "fd")),
        "cpu_s": time.process_time(),
    }


def _serve(channel: Connection, ucx: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        del os.environ[name]
    os.environ.update(ucx)  # NIXL, which reads them, is loaded with the first agent
    agents = Agents()
    while True:
        try:
            do, order = channel.recv()
        except EOFError:
            os._exit(0)  # an agent's end may wait for threads that never end
        channel.send(getattr(agents, do)(**order))


class AgentProcess:
    """The process, started with these UCX settings and no others."""

    def __init__(self, ucx: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, dict(ucx)), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, do: str, **order: Any) -> None:
        """Send an order."""
        self._channel.send((do, order))

    def answer(self) -> Any:
        """Wait for the answer to the oldest unanswered order.

        Raises:
            RuntimeError: the process has ended.
        """
        try:
            return self._channel.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(
                "an agents' process has ended without an answer"
            ) from error

    def tell(self, do: str, **order: Any) -> Any:
        """Send an order and wait for its answer."""
        self.send(do, **order)
        return self.answer()

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self._channel.close()
