"""Both ends of `bench.transfer` and `bench.handover`: workers as an engine has them, without vLLM, in two processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.transfer_shapes import FACTS, Scenario, Side
from kvferry.link.counters import Counters
from kvferry.link.server import SideChannelListener
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.orders import (
    LeaseHold,
    LeaseOpen,
    StepOrders,
    encode_head,
    encode_orders,
)
from kvferry.protocol.params import new_mac_key
from kvferry.protocol.slots import SlotState, epoch_to_text, new_epoch, slot_word
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import Device
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.peer_memory.shared_file import SharedFile
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from kvferry.worker.worker import FerryWorker

HOST = "127.0.0.1"
PRODUCED = 9
"""Value of every byte of the producer's caches."""
_READY_S = 30.0


def use_huge_pages() -> None:
    """Have torch ask for huge pages for large tensors, here and in child processes: before the first tensor."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the mapping that holds the address, by /proc."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2:
            inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_of(num_bytes: int, device: torch.device, value: int = 0) -> torch.Tensor:
    """Memory for caches, touched: uint8 `[num_bytes]` of one value."""
    return torch.full((num_bytes,), value, dtype=torch.uint8, device=device)


def make_worker(
    engine_id: str,
    scenario: Scenario,
    side: Side,
    rank: int,
    memory: torch.Tensor,
    shared: tuple[SharedFile, ...] = (),
) -> FerryWorker:
    """One worker on NIXL, with its caches at the beginning of `memory`, which lies in the shared files."""
    mapped_reads = MappedReadsOption.AUTO
    if scenario.mapped and memory.is_cuda:
        mapped_reads = MappedReadsOption.CUDA_IPC
    return FerryWorker(
        engine_id=engine_id,
        place=Place(tp=rank),
        index=rank,
        topology=Topology(tp=side.tp),
        facts=FACTS,
        groups=(scenario.group(side),),
        caches=KvCaches(
            (memory,),
            scenario.tensors(side, rank, memory.data_ptr()),
            Device(memory.device),
            shared,
        ),
        settings=WorkerSettings(
            staging_pool_bytes=None if scenario.staged else 0,
            handshake_timeout_s=30.0,
            mapped_reads=mapped_reads,
        ),
        make_fabric=NixlFabric,
    )


@dataclass(frozen=True)
class ProducerAddress:
    """Facts about a producer that the benchmark has and the side channel does not carry."""

    port: int
    boot: str
    engine_id: str
    mac_key: bytes


@dataclass(frozen=True)
class Lease:
    """One lease that says READY."""

    slot: int
    epoch: str
    request_id: str


class Producer:
    """One engine that leases blocks that it never computed."""

    def __init__(
        self,
        scenario: Scenario,
        memories: Sequence[torch.Tensor],
        files: Sequence[tuple[SharedFile, ...]],
    ) -> None:
        side = scenario.producer
        self.boot, mac_key, engine_id = (
            new_boot_id(),
            new_mac_key(),
            f"producer-{os.getpid()}",
        )
        self.workers = [
            make_worker(engine_id, scenario, side, rank, memories[rank], files[rank])
            for rank in range(side.tp)
        ]
        description = EngineDescription(
            engine_id=engine_id,
            boot=self.boot,
            mac_key=mac_key,
            facts=FACTS,
            topology=Topology(tp=side.tp),
            groups=(scenario.group(side),),
            workers=tuple(worker.description for worker in self.workers),
        )
        for worker in self.workers:
            worker.add_siblings(description.workers)
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        self.listener = SideChannelListener(HOST, port, Counters())
        self.listener.publish(description)
        self.address = ProducerAddress(port, self.boot, engine_id, mac_key)
        self._next = 0

    def lease(self, count: int) -> list[Lease]:
        """That many leases that may be read from at once; every slot is used once."""
        numbers = range(self._next, self._next + count)
        self._next += count
        made = [
            Lease(number, epoch_to_text(new_epoch()), f"prefill-{number}")
            for number in numbers
        ]
        orders = StepOrders(
            boot=self.boot,
            opens=tuple(LeaseOpen(slot=one.slot, epoch=one.epoch) for one in made),
            holds=tuple(
                LeaseHold(request_id=one.request_id, slot=one.slot, epoch=one.epoch)
                for one in made
            ),
        )
        for worker in self.workers:
            worker.carry_out(encode_head(orders), encode_orders(orders))
        deadline_s = time.monotonic() + _READY_S
        while not all(
            _is_ready(worker, one) for worker in self.workers for one in made
        ):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the leases do not become ready")
            time.sleep(0.001)
        return made

    def close(self) -> None:
        self.listener.close()
        for worker in self.workers:
            worker.close()


def _is_ready(worker: FerryWorker, lease: Lease) -> bool:
    return int(worker._memory.table.words[lease.slot]) == slot_word(
        int(lease.epoch, 16),  # type: ignore[arg-type]
        SlotState.READY,
    )


def _producer_of(
    scenario: Scenario, private: Sequence[torch.Tensor], files: Sequence[SharedFile]
) -> Producer:
    if not scenario.mapped or private[0].is_cuda:
        return Producer(scenario, private, [()] * len(private))
    shared = [file.tensor[: len(own)] for file, own in zip(files, private, strict=True)]
    return Producer(scenario, shared, [(file,) for file in files])


def _serve(channel: Connection, pool_bytes: int, ranks: int, device_name: str) -> None:
    """The producer's process: one engine for each scenario, until the other end is closed."""
    torch.set_num_threads(1)
    private = [
        memory_of(pool_bytes, torch.device(device_name), PRODUCED) for _ in range(ranks)
    ]
    files: list[SharedFile] = []
    producer: Producer | None = None
    while True:
        try:
            argument = channel.recv()
        except EOFError:
            break
        if isinstance(argument, Scenario):
            if producer is not None:
                producer.close()
            if argument.mapped and not files and device_name == "cpu":
                files = [SharedFile(pool_bytes) for _ in range(ranks)]
                for file in files:
                    file.tensor[:pool_bytes] = PRODUCED
            producer = _producer_of(argument, private, files)
            channel.send(producer.address)
        elif producer is not None:
            channel.send(producer.lease(argument))
    if producer is not None:
        producer.close()


@dataclass(frozen=True)
class Bench:
    """The consumer's process: its end of the producer's channel, and its memory.

    Attributes:
        source: memory for a copy within the process.
    """

    channel: Connection
    target: torch.Tensor
    source: torch.Tensor

    def produce(self, scenario: Scenario) -> ProducerAddress:
        """Have the other process run another producer; the former one ends."""
        self.channel.send(scenario)
        address: ProducerAddress = self.channel.recv()
        return address

    def leases(self, count: int) -> list[Lease]:
        self.channel.send(count)
        found: list[Lease] = self.channel.recv()
        return found


@contextmanager
def two_processes(pool_bytes: int, ranks: int, device_name: str) -> Iterator[Bench]:
    """This process and one for producers of up to `ranks` workers with `pool_bytes` of caches each."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(
        target=_serve, args=(theirs, pool_bytes, ranks, device_name), name="producer"
    )
    producer.start()
    theirs.close()
    try:
        target, source = (
            memory_of(pool_bytes, torch.device(device_name)) for _ in range(2)
        )
        yield Bench(ours, target, source)
    finally:
        ours.close()
        producer.join(30.0)
        if producer.is_alive():
            producer.kill()
