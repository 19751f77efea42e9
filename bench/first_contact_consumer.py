"""The consumer's end of a first contact, kvferry's way and the published way: seconds by part.

Each way has a process of its own, so that neither has UCX set up by the other: kvferry sets what `ucx_defaults` says,
and the published connector nothing. A line of input is one contact, with a new agent; the answer is a line of JSON.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import msgspec
import numpy as np
import torch
import zmq

from bench.first_contact_producer import ENGINE, HOST, LAYERS, ProducerProcess
from bench.llama import BLOCK_TOKENS, HEADS, TOKEN_BYTES, llama, worker_bytes
from bench.nixl_prep import reserve
from bench.published_descriptors import block_descriptors, split_for_rank
from kvferry.protocol.handshake import EngineDescription, Hello, decode_reply, encode
from kvferry.worker.fabric.agent import AgentConfig, load_bindings, make_agent
from kvferry.worker.fabric.metadata import open_metadata
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import DescriptorRows, Fabric, TransferState
from kvferry.worker.fabric.reads import Reader
from kvferry.worker.memory.caches import KvCaches
from kvferry.worker.memory.slot_reads import SlotReads
from kvferry.worker.peers.handshake_client import AskingThreads, exchange
from kvferry.worker.peers.peer import PeerKey, connect
from kvferry.worker.peers.plan_cache import PlanCache

OURS = ("hello", "decode", "plan", "hand over", "tables", "add_peer", "prepare", "first read")
PUBLISHED = ("hello", "add_remote_agent", "descriptors", "prep_xfer_dlist", "first read")
PROCESSOR, PLAN_AGAIN = "processor", "plan of the next"
"""Beside the parts: processor time of the whole process, and the plan of the next producer of this shape."""
_TIMEOUT_S = 30.0


class Parts:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start


class _Timed:
    """A fabric whose calls are timed."""

    def __init__(self, fabric: Fabric, parts: Parts) -> None:
        self._fabric = fabric
        self._parts = parts

    def add_peer(self, metadata: bytes) -> Any:
        with self._parts("add_peer"):
            return self._fabric.add_peer(metadata)

    def prepare_local(self, rows: DescriptorRows) -> Any:
        with self._parts("prepare"):
            return self._fabric.prepare_local(rows)

    def prepare_remote(self, peer: Any, rows: DescriptorRows) -> Any:
        with self._parts("prepare"):
            return self._fabric.prepare_remote(peer, rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)


def make_contact(producer: Any, consumer_tp: int, blocks: int) -> dict[str, float]:
    """The parts of `FerryWorker`'s first contact, one after the other."""
    memory, base = reserve(worker_bytes(consumer_tp, blocks, LAYERS))
    engine = llama("C", tp=consumer_tp, layout="HND", blocks=blocks, bases={0: base}, layers=LAYERS)
    storage = torch.frombuffer(memory, dtype=torch.uint8)
    caches = KvCaches((storage,), engine.workers[0].tensors, torch.device("cpu"))
    fabric, slot_reads = NixlFabric(f"C-{uuid.uuid4().hex[:8]}"), SlotReads(64)
    fabric.register([*caches.regions(), slot_reads.region()])
    slot_reads.prepare(fabric)
    threads, plans = AskingThreads(), PlanCache(engine, 0)
    threads.start()
    plans.plan(engine)
    parts = Parts()
    timed: Any = _Timed(fabric, parts)
    reader = Reader(timed)
    described_and_planned: queue.SimpleQueue[tuple[EngineDescription, Any]] = queue.SimpleQueue()

    def describe_and_plan() -> None:
        with parts("hello"):
            frame = exchange(HOST, producer.port, encode(Hello(engine_id=ENGINE, asker="C")), _TIMEOUT_S, (), threads)
        with parts("decode"):
            described = decode_reply(frame)
        assert isinstance(described, EngineDescription)
        with parts("plan"):
            plan = plans.plan(described)
        described_and_planned.put((described, plan))

    processor_s = time.process_time()
    try:
        with parts("hand over"):
            threading.Thread(target=describe_and_plan).start()
            description, plan = described_and_planned.get(timeout=_TIMEOUT_S)
        parts.seconds["hand over"] -= sum(parts.seconds[name] for name in ("hello", "decode", "plan"))
        key = PeerKey(HOST, producer.port, ENGINE, description.boot)
        with parts("tables"):
            peer = connect(reader, caches, None, key, description, plan)
        parts.seconds["tables"] -= parts.seconds["add_peer"] + parts.seconds["prepare"]
        with parts("first read"):
            reads = reader.reads()
            one = np.zeros(1, dtype=np.int32)
            posted = [
                reads.post(slot_reads.descriptors, np.array([entry], dtype=np.int32), route.slots, one)
                for entry, route in enumerate(peer.routes)
            ]
            _finish(lambda: [fabric.poll(read) is TransferState.IN_FLIGHT for read in posted])
        parts.seconds[PROCESSOR] = time.process_time() - processor_s
        with parts(PLAN_AGAIN):
            plans.plan(_elsewhere(description))
    finally:
        fabric.close()
        threads.close()
        del storage, caches
        memory.close()
    return dict(parts.seconds)


def _elsewhere(engine: EngineDescription) -> EngineDescription:
    """Another engine of the same shape."""
    workers = []
    for worker in engine.workers:
        tensors = tuple(msgspec.structs.replace(one, base=one.base + (1 << 20)) for one in worker.tensors)
        workers.append(msgspec.structs.replace(worker, tensors=tensors))
    return msgspec.structs.replace(engine, workers=tuple(workers))


def make_contact_published(producer: Any, producer_tp: int, consumer_tp: int, blocks: int) -> dict[str, float]:
    """The published connector's way (see `bench.published_descriptors`), and a first read as its first request does."""
    ranks = max(1, producer_tp // consumer_tp)
    sizes = [HEADS // tp * BLOCK_TOKENS * TOKEN_BYTES for tp in (consumer_tp, producer_tp)]
    memory, base = reserve(worker_bytes(consumer_tp, blocks, LAYERS))
    bindings: Any = load_bindings()
    # With a progress thread that does not spin: the published connector's own would take a core from the clock.
    agent = make_agent(bindings, f"C-{uuid.uuid4().hex[:8]}", AgentConfig())
    slot_reads = np.zeros(64, dtype=np.uint64)
    regions = [
        (base, worker_bytes(consumer_tp, blocks, LAYERS), 0),
        (int(slot_reads.ctypes.data), slot_reads.nbytes, 0),
    ]
    agent.registerMem(bindings.nixlRegDList(bindings.DRAM_SEG, np.array(regions, dtype=np.uint64)))
    parts, handles = Parts(), []
    processor_s = time.process_time()
    try:
        with parts("hello"):
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            socket = context.socket(zmq.REQ)
            socket.connect(f"tcp://{HOST}:{producer.published_port}")
            answers = []
            for rank in range(ranks):
                socket.send(str(rank).encode())
                answers.append(msgspec.msgpack.decode(socket.recv()))
            context.destroy(linger=0)
        whole: list[Any] = []
        if ranks > 1:
            with parts("descriptors"):
                layers = [base + layer * blocks * sizes[0] for layer in range(LAYERS)]
                whole = block_descriptors(layers, blocks, sizes[0], sizes[0]).tolist()
        for rank, (_, metadata, bases, _, _) in enumerate(answers):
            if ranks > 1:
                with parts("descriptors"):
                    mine = split_for_rank(whole, ranks, rank)
                with parts("prep_xfer_dlist"):
                    handles.append(_prepared(bindings, agent, bindings.NIXL_INIT_AGENT, mine))
                del mine
            with parts("add_remote_agent"):
                name = agent.loadRemoteMD(open_metadata(metadata)[1])
            with parts("descriptors"):
                theirs = block_descriptors(bases, blocks, sizes[1], min(sizes))
            with parts("prep_xfer_dlist"):
                handles.append(_prepared(bindings, agent, name, theirs))
            with parts("first read"):
                _first_read(bindings, agent, int(slot_reads.ctypes.data), name, producer.words)
        parts.seconds[PROCESSOR] = time.process_time() - processor_s
    finally:
        for handle in handles:
            agent.releasedDlistH(handle)
        del agent
        memory.close()
    return dict(parts.seconds)


def _prepared(bindings: Any, agent: Any, owner: object, triples: object) -> Any:
    return agent.prepXferDlist(owner, bindings.nixlXferDList(bindings.DRAM_SEG, triples))


def _first_read(bindings: Any, agent: Any, here: int, name: bytes, there: int) -> None:
    """64 bytes: what connects for certain."""
    sides = [
        _prepared(bindings, agent, owner, np.array([[at, 64, 0]], dtype=np.uint64))
        for owner, at in ((bindings.NIXL_INIT_AGENT, here), (name, there))
    ]
    one = np.zeros(1, dtype=np.int32)
    request = agent.makeXferReq(bindings.NIXL_READ, sides[0], one, sides[1], one)
    agent.postXferReq(request)
    _finish(lambda: [agent.getXferStatus(request) == bindings.NIXL_IN_PROG])
    agent.releaseXferReq(request)
    for side in sides:
        agent.releasedDlistH(side)


def _finish(in_flight: Any) -> None:
    end_s = time.perf_counter() + _TIMEOUT_S
    while any(in_flight()):
        if time.perf_counter() > end_s:
            raise TimeoutError("the first read")
        time.sleep(50e-6)


class ConsumerProcess:
    """One way of a first contact, in a process of its own.

    Args:
        way: `ours` or `published`.
        ucx: variables to set.
    """

    def __init__(
        self,
        way: str,
        producer: ProducerProcess,
        producer_tp: int,
        consumer_tp: int,
        blocks: int,
        ucx: Mapping[str, str] | None = None,
    ) -> None:
        where = {"port": producer.port, "published_port": producer.published_port, "words": producer.words}
        asked = [way, json.dumps(where), str(producer_tp), str(consumer_tp), str(blocks)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.first_contact_consumer", *asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(ucx or {})},
            cwd=Path(__file__).resolve().parent.parent,
            text=True,
        )

    def make_contact(self) -> dict[str, float]:
        """Meet the producer with a new agent; seconds by part."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a consumer has ended")
        parts: dict[str, float] = json.loads(line)
        return parts

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def main(reported: TextIO, way: str, where: str, producer_tp: int, consumer_tp: int, blocks: int) -> None:
    """Meet the producer once for each line of input."""
    producer = SimpleNamespace(**json.loads(where))
    for _ in sys.stdin:
        if way == "ours":
            parts = make_contact(producer, consumer_tp, blocks)
        else:
            parts = make_contact_published(producer, producer_tp, consumer_tp, blocks)
        print(json.dumps(parts), file=reported, flush=True)
    os._exit(0)


if __name__ == "__main__":
    # UCX writes its warnings to file descriptor 1.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        main(answers, sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
