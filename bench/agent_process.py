"""A process with NIXL agents that is driven by JSON lines on its input and answers with JSON lines.

    make count bytes          → agents [{metadata, address}]
    connect agent peer        → nothing: the agent adds the peer and reads its first bytes
    listen                    → port: a side channel that describes an engine whose worker is the first agent
    contact agents port       → seconds []: each asks a side channel, plans, and reads 8 bytes, all at once, each on a
                                thread of its own
    send agent                → one empty answer; it sends messages to its peer until it is killed
    receive agent             → messages: how many have come since it was last asked
    usage                     → rss_mb, files, threads, cpu_s
    close agent               → nothing: the agent ends without notifying its peers

`AgentProcess` is the other end.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from bench.llama import llama
from bench.provenance import REPOSITORY
from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_transfer
from kvferry.protocol.handshake import EngineDescription, LeaseTable
from kvferry.protocol.ids import SLOT_BYTES
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters
from kvferry.worker.fabric.agent import AgentConfig
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, PeerAgent, Region, TransferState

HOST, ENGINE = "127.0.0.1", "P"
_TIMEOUT_S = 60.0
_ONE = np.zeros(1, dtype=np.int32)


def _engine(engine_id: str) -> EngineDescription:
    """Either end of a contact."""
    return llama(engine_id, tp=1, layout="HND", blocks=1000, layers=30)


class Agent:
    """One agent, its memory, and the one peer that it reads from."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self.num_bytes = num_bytes
        self.address = int(np.frombuffer(self._memory, dtype=np.uint8).ctypes.data)
        self.fabric = NixlFabric(uuid.uuid4().hex[:12], AgentConfig())
        self.fabric.register([Region(self.address, num_bytes, MemoryKind.DRAM)])
        self.peer: PeerAgent | None = None

    def connect(self, metadata: bytes, address: int) -> None:
        """Add a peer and read 8 bytes of its memory.

        Raises:
            TimeoutError: the read does not end.
        """
        peer = self.peer = self.fabric.add_peer(metadata)
        here, there = (
            DescriptorRows.of(MemoryKind.DRAM, [(at, SLOT_BYTES, 0, SLOT_BYTES, 1)]) for at in (self.address, address)
        )
        local, remote = self.fabric.prepare_local(here), self.fabric.prepare_remote(peer, there)
        transfer = self.fabric.post_read(local, _ONE, remote, _ONE)
        end_s = time.perf_counter() + _TIMEOUT_S
        while self.fabric.poll(transfer) is TransferState.IN_FLIGHT:
            if time.perf_counter() > end_s:
                raise TimeoutError(f"the first read does not end within {_TIMEOUT_S:g} s")
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
        self.connect(worker.agent_metadata, worker.lease_table.address)
        return time.perf_counter() - start

    def listen(self) -> tuple[SideChannelListener, int]:
        """A side channel that describes an engine with this agent, and its port."""
        engine = _engine(ENGINE)
        table = LeaseTable(address=self.address, slots=self.num_bytes // SLOT_BYTES)
        worker = msgspec.structs.replace(
            engine.workers[0],
            agent=self.fabric.agent_name,
            agent_metadata=self.fabric.metadata(),
            lease_table=table,
        )
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        listener = SideChannelListener(HOST, port, Counters())
        listener.publish(msgspec.structs.replace(engine, workers=(worker,)))
        return listener, port

    def send(self) -> None:
        """Send messages to the peer, one behind the other, until the process is killed."""
        assert self.peer is not None, "it is not connected"
        while True:
            self.fabric.notify(self.peer, bytes(64))


def usage(process: int | str = "self") -> dict[str, float]:
    """Memory, files, threads and processor time of a process."""
    folder = Path("/proc") / str(process)
    of_process = (folder / "stat").read_text().rpartition(")")[2].split()
    return {
        "rss_mb": int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "files": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
        "cpu_s": (int(of_process[11]) + int(of_process[12])) / os.sysconf("SC_CLK_TCK"),
    }


class _Process:
    """What the orders act on."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._agents: list[Agent | None] = []
        self._listeners: list[SideChannelListener] = []

    def answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def obey(self, do: str, **order: Any) -> dict[str, Any]:
        if do == "usage":
            return dict(usage())
        if do == "make":
            made = [Agent(order["bytes"]) for _ in range(order["count"])]
            self._agents += made
            return {"agents": [{"metadata": x.fabric.metadata().hex(), "address": x.address} for x in made]}
        if do == "listen":
            listener, port = self._agent(0).listen()
            self._listeners.append(listener)
            return {"port": port}
        if do == "contact":
            asking = [self._agent(index) for index in order["agents"]]
            with ThreadPoolExecutor(len(asking)) as pool:
                return {"seconds": list(pool.map(lambda one: one.make_contact(order["port"]), asking))}
        agent = self._agent(order["agent"])
        if do == "connect":
            agent.connect(bytes.fromhex(order["peer"]["metadata"]), order["peer"]["address"])
        elif do == "send":
            self.answer({})
            agent.send()
        elif do == "receive":
            return {"messages": len(agent.fabric.take_notifications())}
        elif do == "close":
            self._agents[order["agent"]] = None
            agent.fabric.close()
            del agent
            gc.collect()
        return {}

    def _agent(self, index: int) -> Agent:
        agent = self._agents[index]
        if agent is None:
            raise ValueError(f"agent {index} was closed")
        return agent


class AgentProcess:
    """The process, started with these UCX settings and no others."""

    def __init__(self, ucx: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.agent_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited, **ucx},
            cwd=REPOSITORY,
            text=True,
        )

    def send(self, do: str, **order: Any) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **order}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest unanswered order."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("an agents' process has ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, do: str, **order: Any) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        self.send(do, **order)
        return self.answer()

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _main() -> None:
    # UCX writes its warnings to file descriptor 1.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        process = _Process(answers)
        for line in sys.stdin:
            process.answer(process.obey(**json.loads(line)))
        os._exit(0)  # an agent's end may wait for threads that never end


if __name__ == "__main__":
    _main()
