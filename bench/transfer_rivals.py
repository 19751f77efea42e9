"""Comparisons of `bench.transfer`: a bare NIXL loop, `process_vm_readv`, and a copy within one process."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.transfer_memory import IoVectors, Memory
from bench.transfer_shapes import Scenario
from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.descriptors import DescriptorTable, descriptor_pairs, route_tables
from kvferry.protocol.ids import SLOT_BYTES
from kvferry.protocol.orders import LoadOrder
from kvferry.worker.fabric.agent import AgentConfig, apply_ucx_defaults, load_bindings, make_agent
from kvferry.worker.fabric.metadata import open_metadata
from kvferry.worker.peers.peer import Peer

_DONE = bytes(120)
"""About as long as a `done`; the producer takes it for nothing of its own."""
_FIRST_SLOT = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True)
class Pieces:
    """A request's reads by one table of one producer worker: descriptor numbers, int32 `[n]`, and their addresses.

    `number` counts the tables of a worker.
    """

    table: DescriptorTable
    worker: int
    number: int
    local: np.ndarray
    remote: np.ndarray

    @property
    def local_addresses(self) -> np.ndarray:
        """int64 `[n]`."""
        return _addresses(self.table.local_rows, self.local)

    @property
    def remote_addresses(self) -> np.ndarray:
        """int64 `[n]`."""
        return _addresses(self.table.remote_rows, self.remote)


def pieces_of(scenario: Scenario, peer: Peer, order: LoadOrder, device: int) -> list[Pieces]:
    """The same descriptors that a load reads in place, or would if nothing were staged."""
    blocks = RequestBlocks(
        local=order.local_blocks,
        remote=order.source.remote_block_ids,
        first_token=order.first_token,
        stop_token=order.stop_token,
        num_tokens=order.source.remote_num_tokens,
    )
    units = pair_request(peer.plan, (scenario.group(scenario.consumer),), (scenario.group(scenario.producer),), blocks)
    found = []
    for route in peer.routes:
        for number, table in enumerate(route_tables(route.route, device, device)):
            pairs = descriptor_pairs(table, units)
            if len(pairs.local):
                found.append(Pieces(table, route.route.worker, number, pairs.local, pairs.remote))
    return found


class BareNixl:
    """One agent and nothing else: make, post, poll, release, with index arrays that are there already."""

    def __init__(self, scenario: Scenario, memory: Memory, peer: Peer) -> None:
        apply_ucx_defaults(os.environ)
        self._nixl: Any = load_bindings()
        self._agent: Any = make_agent(self._nixl, f"bare-{uuid.uuid4().hex[:12]}", AgentConfig(progress_thread=False))
        self._segment = self._nixl.VRAM_SEG if memory.device.type == "cuda" else self._nixl.DRAM_SEG
        self._device = (memory.device.index or 0) if memory.device.type == "cuda" else 0
        region = np.array([(memory.address, len(memory.tensor), self._device)], dtype=np.uint64)
        self._registered = self._nixl.nixlRegDList(self._segment, region)
        self._agent.registerMem(self._registered)
        self._names: dict[int, str] = {}
        self._words = np.zeros(len(peer.routes), dtype=np.uint64)
        self._slot_reads = self._register_words()
        self._slots: list[tuple[Any, np.ndarray]] = []
        for number, route in enumerate(peer.routes):
            worker = peer.description.workers[route.route.worker]
            _, body = open_metadata(worker.agent_metadata)
            name = self._names[route.route.worker] = self._agent.loadRemoteMD(body)
            table = np.array([(worker.lease_table.address, SLOT_BYTES, 0, SLOT_BYTES, 1)], dtype=np.int64)
            prepared = self._agent.prepXferDlist(name, self._nixl.DRAM_SEG, table)
            self._slots.append((prepared, np.array([number], dtype=np.int32)))
        self._prepared: dict[tuple[int, int], tuple[int, int]] = {}

    def reads(self, pieces: list[Pieces]) -> list[tuple[int, np.ndarray, int, np.ndarray]]:
        """Prepare what `read` takes."""
        return [(*self._prepare(one), one.local, one.remote) for one in pieces]  # type: ignore[misc]

    def read(self, reads: list[tuple[Any, ...]]) -> None:
        """All of them, to their end."""
        agent, nixl = self._agent, self._nixl
        handles = []
        for local, remote, local_indices, remote_indices in reads:
            handle = agent.makeXferReq(nixl.NIXL_READ, local, local_indices, remote, remote_indices)
            agent.postXferReq(handle)
            handles.append(handle)
        for handle in handles:
            while agent.getXferStatus(handle) != nixl.NIXL_SUCCESS:
                pass
            agent.releaseXferReq(handle)

    def read_fenced(self, reads: list[tuple[Any, ...]]) -> None:
        """The same with what a load owes: a word of every producer worker before and after, and a message to each."""
        fence = [(self._slot_reads, slots, entry, _FIRST_SLOT) for slots, entry in self._slots]
        self.read(fence)
        self.read(reads)
        self.read(fence)
        for name in self._names.values():
            self._agent.genNotif(name, _DONE)

    def close(self) -> None:
        self._agent.releasedDlistH(self._slot_reads)
        for slots, _ in self._slots:
            self._agent.releasedDlistH(slots)
        for local, remote in self._prepared.values():
            self._agent.releasedDlistH(local)
            self._agent.releasedDlistH(remote)
        for name in self._names.values():
            self._agent.invalidateRemoteMD(name)
        self._agent.deregisterMem(self._registered)
        self._agent.deregisterMem(self._registered_words)
        del self._agent

    def _register_words(self) -> Any:
        address = int(self._words.ctypes.data)
        region = np.array([(address, self._words.nbytes, 0)], dtype=np.uint64)
        self._registered_words = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, region)
        self._agent.registerMem(self._registered_words)
        rows = np.array([(address, SLOT_BYTES, 0, SLOT_BYTES, len(self._words))], dtype=np.int64)
        return self._agent.prepXferDlist(self._nixl.NIXL_INIT_AGENT, self._nixl.DRAM_SEG, rows)

    def _prepare(self, pieces: Pieces) -> tuple[int, int]:
        key = (pieces.worker, pieces.number)
        if key not in self._prepared:
            own = self._agent.prepXferDlist(self._nixl.NIXL_INIT_AGENT, self._segment, pieces.table.local_rows)
            theirs = self._agent.prepXferDlist(self._names[pieces.worker], self._segment, pieces.table.remote_rows)
            self._prepared[key] = (own, theirs)
        return self._prepared[key]


def kernel_reads(pid: int, pieces: list[Pieces], run_bytes: int) -> Callable[[], None]:
    """`process_vm_readv` of the same pieces."""
    vectors = [IoVectors(pid, one.local_addresses, one.remote_addresses, run_bytes) for one in pieces]

    def read() -> None:
        for one in vectors:
            one.read()

    return read


def memory_copies(scenario: Scenario, source: Memory, target: Memory, pieces: list[Pieces]) -> Callable[[], None]:
    """As many pieces, each copied from where it is on the producer, in a memory of this process, to the next place."""
    run = scenario.run_bytes
    remote = np.concatenate([one.remote_addresses for one in pieces])
    runs = np.random.default_rng(3).permutation(len(source.tensor) // run)[: len(remote)].astype(np.intp)
    if target.device.type == "cuda":
        here = torch.from_numpy(runs).to(target.device)
        wide, out = source.tensor.view(-1, run), target.tensor[: len(runs) * run].view(-1, run)

        def copy_on_device() -> None:
            torch.index_select(wide, 0, here, out=out)
            torch.cuda.synchronize(target.device)

        return copy_on_device
    pieces_from, pieces_to = source.array(run), target.array(run)[: len(runs)]

    def copy() -> None:
        np.take(pieces_from, runs, axis=0, out=pieces_to, mode="clip")

    return copy


def _addresses(rows: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Where descriptors of strided rows begin."""
    stops = np.cumsum(rows[:, 4])
    row = np.searchsorted(stops, indices, side="right")
    inside = indices - (stops[row] - rows[row, 4])
    return np.asarray(rows[row, 0] + inside * rows[row, 3])
