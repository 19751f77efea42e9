"""A producer to contact: one process with its listener, the agents of all its ranks, and caches that are never touched.

It answers on two ports: kvferry's side channel, and the published connector's way, one question for every rank. Its
first line says where; the end of its input ends it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import zmq

from bench.llama import llama, worker_bytes
from bench.nixl_prep import reserve
from kvferry.protocol.handshake import EngineDescription, LeaseTable
from kvferry.protocol.ids import SLOT_BYTES
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import MemoryKind, Region

HOST = "127.0.0.1"
LAYERS = 30
ENGINE = "P"
_SLOTS = 1024


class Producer:
    """All ranks of an engine."""

    def __init__(self, tp: int, blocks: int) -> None:
        self.words = np.zeros(_SLOTS, dtype=np.uint64)
        num_bytes = worker_bytes(tp, blocks, LAYERS)
        self._caches = [reserve(num_bytes) for _ in range(tp)]
        self.bases = [address for _, address in self._caches]
        self.fabrics = [NixlFabric(f"{ENGINE}{rank}-{uuid.uuid4().hex[:8]}") for rank in range(tp)]
        table = Region(int(self.words.ctypes.data), self.words.nbytes, MemoryKind.DRAM)
        for fabric, base in zip(self.fabrics, self.bases, strict=True):
            fabric.register([Region(base, num_bytes, MemoryKind.DRAM), table])
        self.description = self._describe(tp, blocks)

    def _describe(self, tp: int, blocks: int) -> EngineDescription:
        engine = llama(ENGINE, tp=tp, layout="HND", blocks=blocks, bases=dict(enumerate(self.bases)), layers=LAYERS)
        table = LeaseTable(address=int(self.words.ctypes.data), slots=self.words.nbytes // SLOT_BYTES)
        workers = tuple(
            msgspec.structs.replace(
                worker, agent=fabric.agent_name, agent_metadata=fabric.metadata(), lease_table=table
            )
            for worker, fabric in zip(engine.workers, self.fabrics, strict=True)
        )
        return msgspec.structs.replace(engine, workers=workers)

    def published_answers(self, blocks: int) -> list[bytes]:
        """The published connector's answer for each rank: the agent, the regions' addresses, the blocks."""
        region = worker_bytes(len(self.fabrics), blocks, 1)
        return [
            msgspec.msgpack.encode(
                (ENGINE, fabric.metadata(), [base + layer * region for layer in range(LAYERS)], blocks, [region])
            )
            for fabric, base in zip(self.fabrics, self.bases, strict=True)
        ]


def _serve_published(answers: list[bytes], router: zmq.Socket[bytes]) -> None:
    while True:
        asker, _, rank = router.recv_multipart()
        router.send_multipart([asker, b"", answers[int(rank)]])


def main(tp: int, blocks: int, reported: TextIO) -> None:
    producer = Producer(tp, blocks)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    listener = SideChannelListener(HOST, port, Counters())
    listener.publish(producer.description)
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    other = router.bind_to_random_port(f"tcp://{HOST}")
    threading.Thread(target=_serve_published, args=(producer.published_answers(blocks), router), daemon=True).start()
    address = int(producer.words.ctypes.data)
    print(json.dumps({"port": port, "published_port": other, "words": address}), file=reported, flush=True)
    sys.stdin.read()
    os._exit(0)


class ProducerProcess:
    """The producer, running."""

    def __init__(self, tp: int, blocks: int, ucx: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.first_contact_producer", str(tp), str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(ucx or {})},
            cwd=Path(__file__).resolve().parent.parent,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a producer of TP {tp} with {blocks} blocks did not start")
        reported: dict[str, Any] = json.loads(line)
        self.pid = self._process.pid
        self.port: int = reported["port"]
        self.published_port: int = reported["published_port"]
        self.words: int = reported["words"]

    def close(self) -> None:
        """End it."""
        self._process.communicate()


if __name__ == "__main__":
    # UCX writes its warnings to file descriptor 1.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        main(int(sys.argv[1]), int(sys.argv[2]), answers)
