"""The two ends of `bench.transfer`: workers as an engine has them, without vLLM, and the producer's process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.transfer_memory import Memory
from bench.transfer_shapes import FACTS, Scenario, Side
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.ids import SlotState, epoch_to_text, new_boot_id, new_epoch, slot_word
from kvferry.protocol.orders import LeaseHold, LeaseOpen, StepOrders, encode_head, encode_orders
from kvferry.protocol.params_mac import new_mac_key
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.memory.caches import KvCaches
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker, MakeFabric

HOST = "127.0.0.1"
PRODUCED = 9
"""Value of every byte of the producer's caches."""
_READY_S = 30.0


def settings_of(scenario: Scenario) -> WorkerSettings:
    """Of both engines."""
    return WorkerSettings(staging_pool_bytes=None if scenario.staged else 0, handshake_timeout_s=30.0)


def make_worker(
    engine_id: str,
    scenario: Scenario,
    side: Side,
    rank: int,
    memory: Memory,
    make_fabric: MakeFabric = NixlFabric,
) -> FerryWorker:
    """One worker, on real NIXL by default."""
    return FerryWorker(
        engine_id=engine_id,
        place=Place(tp=rank),
        index=rank,
        topology=Topology(tp=side.tp),
        facts=FACTS,
        groups=(scenario.group(side),),
        caches=KvCaches(memory.storages, scenario.tensors(side, rank, memory.address), memory.device),
        settings=settings_of(scenario),
        make_fabric=make_fabric,
    )


@dataclass(frozen=True)
class ProducerAddress:
    """Facts about a producer that the benchmark has and the side channel does not carry."""

    pid: int
    port: int
    boot: str
    engine_id: str
    mac_key: bytes
    huge_bytes: int


@dataclass(frozen=True)
class Lease:
    """One lease that says READY."""

    slot: int
    epoch: str
    request_id: str


class Producer:
    """One engine that leases blocks that it never computed."""

    def __init__(self, scenario: Scenario, memories: Sequence[Memory]) -> None:
        side = scenario.producer
        self.boot, self.mac_key, self.engine_id = new_boot_id(), new_mac_key(), f"producer-{os.getpid()}"
        self.workers = [make_worker(self.engine_id, scenario, side, rank, memories[rank]) for rank in range(side.tp)]
        description = EngineDescription(
            engine_id=self.engine_id,
            boot=self.boot,
            mac_key=self.mac_key,
            facts=FACTS,
            topology=Topology(tp=side.tp),
            groups=(scenario.group(side),),
            workers=tuple(worker.description for worker in self.workers),
        )
        for worker in self.workers:
            worker.add_siblings(description.workers)
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        self.listener = SideChannelListener(HOST, self.port, Counters())
        self.listener.publish(description)
        self.huge_bytes = sum(memory.huge_bytes for memory in memories[: side.tp])
        self._next = 0

    def address(self) -> ProducerAddress:
        return ProducerAddress(os.getpid(), self.port, self.boot, self.engine_id, self.mac_key, self.huge_bytes)

    def lease(self, count: int) -> list[Lease]:
        """That many leases that may be read from at once; every slot is used once."""
        made = []
        for _ in range(count):
            made.append(Lease(self._next, epoch_to_text(new_epoch()), f"prefill-{self._next}"))
            self._next += 1
        orders = StepOrders(
            boot=self.boot,
            opens=tuple(LeaseOpen(slot=one.slot, epoch=one.epoch) for one in made),
            holds=tuple(LeaseHold(request_id=one.request_id, slot=one.slot, epoch=one.epoch) for one in made),
        )
        for worker in self.workers:
            worker.carry_out(encode_head(orders), encode_orders(orders))
        deadline_s = time.monotonic() + _READY_S
        while not all(_is_ready(worker, one) for worker in self.workers for one in made):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the leases do not become ready")
            time.sleep(0.001)
        return made

    def idle_cpu(self, seconds: float) -> float:
        """CPU time of this process, of a core, while its main thread sleeps."""
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - begun_cpu_s) / (time.monotonic() - begun_s)

    def close(self) -> None:
        self.listener.close()
        for worker in self.workers:
            worker.close()


def serve(channel: Connection, pool_bytes: int, ranks: int, device_name: str) -> None:
    """The producer's process: engines one after the other, until the other end is closed."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    memories: dict[bool, list[Memory]] = {}
    producer: Producer | None = None
    while True:
        try:
            what, argument = channel.recv()
        except EOFError:
            break
        answer: Any = None
        if what == "scenario":
            if producer is not None:
                producer.close()
            if argument.huge not in memories:
                memories = {argument.huge: _memories(ranks, pool_bytes, argument.huge, device)}
            producer = Producer(argument, memories[argument.huge])
            answer = producer.address()
        elif producer is not None:
            answer = producer.lease(argument) if what == "lease" else producer.idle_cpu(argument)
        channel.send(answer)
    if producer is not None:
        producer.close()


def _memories(ranks: int, pool_bytes: int, huge: bool, device: torch.device) -> list[Memory]:
    return [Memory(pool_bytes, huge=huge, device=device, value=PRODUCED) for _ in range(ranks)]


def _is_ready(worker: FerryWorker, lease: Lease) -> bool:
    return int(worker._table.words[lease.slot]) == slot_word(int(lease.epoch, 16), SlotState.READY)  # type: ignore[arg-type]
