"""A process with NIXL agents that is driven by JSON lines on its input and answers with JSON lines.

    make count bytes                    → agents [{metadata, address}], seconds []
    connect agent peer bytes            → seconds: known, prepared, and a first read of 64 bytes
    read agent bytes repeats timeout_s → seconds [], error; with `announced` an empty answer first: it begins now
    contact agents port                    → seconds []: each asks a producer's side channel, plans, and reads 8 bytes,
                                          all at once, each on a thread of its own
    send agent                          → one empty answer; it sends messages to its peer until it is killed
    receive agent                       → messages: how many have come since it was last asked
    usage                               → rss_mb, files, threads, cpu_s
    close agent                         → nothing: the agent ends without notifying its peers

`AgentProcess` is the other end.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench.llama import llama
from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_transfer
from kvferry.protocol.ids import SLOT_BYTES
from kvferry.worker.fabric.agent import AgentConfig
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import (
    DescriptorRows,
    FabricError,
    LocalDescriptors,
    MemoryKind,
    Region,
    RemoteDescriptors,
    TransferState,
)
from kvferry.worker.peers.handshake_client import fetch_description

FIRST_BYTES = 64
_ONE = np.zeros(1, dtype=np.int32)


class Agent:
    """One agent, its memory, and the one peer that it reads from."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.fabric = NixlFabric(uuid.uuid4().hex[:12], AgentConfig())
        self.address = int(self.bytes.ctypes.data)
        self.fabric.register([Region(self.address, num_bytes, MemoryKind.DRAM)])
        self._sides: tuple[LocalDescriptors, RemoteDescriptors] | None = None
        self._peer: dict[str, Any] = {}

    def connect(self, peer: dict[str, Any], num_bytes: int) -> float:
        """Meet the peer and read its first bytes; returns seconds."""
        start = time.perf_counter()
        self._peer = {**peer, "name": self.fabric.add_peer(bytes.fromhex(peer["metadata"]))}
        self._prepare(FIRST_BYTES)
        self._read(30.0)
        seconds = time.perf_counter() - start
        self._prepare(num_bytes)
        return seconds

    def make_contact(self, port: int) -> float:
        """Do a worker's first contact, without the tables of its layers; returns seconds."""
        blocks = 1000
        engine = llama("C", tp=1, layout="HND", blocks=blocks, bases={0: 1 << 44}, layers=30)
        start = time.perf_counter()
        description = fetch_description("127.0.0.1", port, "P", "C", 60.0)
        plan_transfer(engine, 0, description, Costs())
        worker = description.workers[0]
        self._peer = {
            "name": self.fabric.add_peer(worker.agent_metadata),
            "address": worker.lease_table.address,
        }
        self._prepare(SLOT_BYTES)
        self._read(60.0)
        return time.perf_counter() - start

    def read(self, num_bytes: int, repeats: int, timeout_s: float) -> dict[str, Any]:
        """Seconds of every read of the whole length, up to one that raises."""
        self._prepare(num_bytes)
        seconds: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            try:
                self._read(timeout_s)
            except (FabricError, TimeoutError) as error:
                took_s = time.perf_counter() - start
                return {"seconds": seconds, "error": f"{type(error).__name__}: {error}", "error_s": took_s}
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "error": None}

    def send(self) -> None:
        """Send messages to the peer, one behind the other, until the process is killed."""
        while True:
            self.fabric.notify(self._peer["name"], bytes(FIRST_BYTES))

    def _prepare(self, num_bytes: int) -> None:
        for side in self._sides or ():
            self.fabric.release(side)
        rows = [
            DescriptorRows.of(MemoryKind.DRAM, [(at, num_bytes, 0, num_bytes, 1)])
            for at in (self.address, self._peer["address"])
        ]
        local = self.fabric.prepare_local(rows[0])
        self._sides = (local, self.fabric.prepare_remote(self._peer["name"], rows[1]))

    def _read(self, timeout_s: float) -> None:
        assert self._sides is not None
        transfer = self.fabric.post_read(self._sides[0], _ONE, self._sides[1], _ONE)
        end_s = time.perf_counter() + timeout_s
        try:
            while self.fabric.poll(transfer) is TransferState.IN_FLIGHT:
                if time.perf_counter() > end_s:
                    raise TimeoutError(f"not within {timeout_s:g} s")
                time.sleep(20e-6)
        finally:
            self.fabric.release(transfer)


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


def _obey(agents: list[Agent | None], order: dict[str, Any], answers: TextIO) -> dict[str, Any]:
    if order["do"] == "usage":
        return dict(usage())
    if order["do"] == "make":
        seconds = []
        for _ in range(order["count"]):
            start = time.perf_counter()
            agents.append(Agent(order["bytes"]))
            seconds.append(time.perf_counter() - start)
        made = [one for one in agents[-order["count"] :] if one is not None]
        reported = [{"metadata": one.fabric.metadata().hex(), "address": one.address} for one in made]
        return {"agents": reported, "seconds": seconds}
    if order["do"] == "contact":
        asking = [one for one in (agents[index] for index in order["agents"]) if one is not None]
        with ThreadPoolExecutor(len(asking)) as pool:
            return {"seconds": list(pool.map(lambda one: one.make_contact(order["port"]), asking))}
    agent = agents[order["agent"]]
    if agent is None:
        raise ValueError(f"agent {order['agent']} was closed")
    if order["do"] == "connect":
        return {"seconds": agent.connect(order["peer"], order["bytes"])}
    if order["do"] == "send":
        print("{}", file=answers, flush=True)
        agent.send()
    if order["do"] == "receive":
        return {"messages": len(agent.fabric.take_notifications())}
    if order["do"] == "read":
        if order.get("announced"):
            print("{}", file=answers, flush=True)
        read: dict[str, Any] = agent.read(order["bytes"], order["repeats"], order["timeout_s"])
        return read
    agents[order["agent"]] = None
    agent.fabric.close()
    del agent
    gc.collect()
    return {}


def main(answers: TextIO) -> None:
    agents: list[Agent | None] = []
    for line in sys.stdin:
        print(json.dumps(_obey(agents, json.loads(line), answers)), file=answers, flush=True)
    os._exit(0)  # an agent's end may wait for threads that never end


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
            cwd=Path(__file__).resolve().parent.parent,
            text=True,
        )

    def send(self, do: str, **order: Any) -> None:
        """Tell it to do something."""
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
        """Both."""
        self.send(do, **order)
        return self.answer()

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    # UCX writes its warnings to file descriptor 1.
    with os.fdopen(os.dup(1), "w") as reported:
        os.dup2(2, 1)
        main(reported)
