"""What loads are compared with: a bare NIXL loop with their descriptors, a copy within a process, two wake-ups."""

from __future__ import annotations

import os
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.transfer_shapes import Scenario
from kvferry.plan.blocks import RequestBlocks, descriptor_pairs, pair_request
from kvferry.plan.descriptors import DescriptorTable, route_table
from kvferry.protocol.orders import LoadOrder
from kvferry.protocol.slots import (
    SLOT_BYTES,
)
from kvferry.worker.fabric.metadata_envelope import open_metadata
from kvferry.worker.fabric.nixl import AgentConfig, load_bindings, make_agent
from kvferry.worker.fabric.ucx_settings import apply_ucx_defaults
from kvferry.worker.peers.peer import Peer

_DONE = bytes(120)
"""About as long as a `done`; the producer takes it for nothing of its own."""
_FIRST_SLOT = np.zeros(1, dtype=np.int32)
_LONG_S = 600.0

Read = tuple[Any, np.ndarray, Any, np.ndarray]
"""Prepared local and remote descriptors, each with the indices that are read."""


@dataclass(frozen=True)
class Pieces:
    """A request's reads from one producer worker: descriptor numbers, int32 `[n]`."""

    table: DescriptorTable
    worker: int
    local: np.ndarray
    remote: np.ndarray


def pieces_of(
    scenario: Scenario, peer: Peer, order: LoadOrder, device: int
) -> list[Pieces]:
    """The same descriptors that a load reads in place, or would if nothing were staged."""
    blocks = RequestBlocks(
        local=order.local_blocks,
        remote=order.source.remote_block_ids,
        first_token=order.first_token,
        stop_token=order.stop_token,
        num_tokens=order.source.remote_num_tokens,
    )
    units = pair_request(
        peer.plan,
        (scenario.group(scenario.consumer),),
        (scenario.group(scenario.producer),),
        blocks,
    )
    found = []
    for route in peer.routes:
        table = route_table(route.route, device, device)
        if table is None:
            continue
        pairs = descriptor_pairs(table, units)
        if len(pairs.local):
            found.append(Pieces(table, route.route.worker, pairs.local, pairs.remote))
    return found


class BareNixl:
    """One agent and nothing else: make, post, poll, release, with index arrays that are there already."""

    def __init__(self, memory: torch.Tensor, peer: Peer) -> None:
        apply_ucx_defaults(os.environ)
        self._nixl: Any = load_bindings()
        self._agent: Any = make_agent(
            self._nixl,
            f"bare-{uuid.uuid4().hex[:12]}",
            AgentConfig(progress_thread=False),
        )
        self._segment = (
            self._nixl.VRAM_SEG if memory.device.type == "cuda" else self._nixl.DRAM_SEG
        )
        self._words = np.zeros((len(peer.routes), 2), dtype=np.uint64)
        words = int(self._words.ctypes.data)
        self._registered = [
            self._register(
                self._segment, memory.data_ptr(), len(memory), memory.device.index or 0
            ),
            self._register(self._nixl.DRAM_SEG, words, self._words.nbytes, 0),
        ]
        self._handles: list[Any] = []
        self._names: dict[int, Any] = {}
        self._tables: dict[int, tuple[Any, Any]] = {}
        own_words = self._prepare(
            self._nixl.NIXL_INIT_AGENT,
            self._nixl.DRAM_SEG,
            _slots(words, len(self._words)),
        )
        self._fence: list[Read] = []
        for number, route in enumerate(peer.routes):
            worker = peer.description.workers[route.route.worker]
            name = self._names[route.route.worker] = self._agent.loadRemoteMD(
                open_metadata(worker.agent_metadata)[1]
            )
            word = self._prepare(
                name, self._nixl.DRAM_SEG, _slots(worker.lease_table.address, 1)
            )
            self._fence.append(
                (own_words, np.array([number], dtype=np.int32), word, _FIRST_SLOT)
            )

    def reads(self, pieces: Sequence[Pieces]) -> list[Read]:
        """Prepare what `read` takes."""
        found: list[Read] = []
        for one in pieces:
            if one.worker not in self._tables:
                local = self._prepare(
                    self._nixl.NIXL_INIT_AGENT, self._segment, one.table.local_rows
                )
                remote = self._prepare(
                    self._names[one.worker], self._segment, one.table.remote_rows
                )
                self._tables[one.worker] = (local, remote)
            local, remote = self._tables[one.worker]
            found.append((local, one.local, remote, one.remote))
        return found

    def read(self, reads: Sequence[Read]) -> None:
        """All of them, to their end."""
        agent, nixl = self._agent, self._nixl
        handles = []
        for local, local_indices, remote, remote_indices in reads:
            handle = agent.makeXferReq(
                nixl.NIXL_READ, local, local_indices, remote, remote_indices
            )
            agent.postXferReq(handle)
            handles.append(handle)
        for handle in handles:
            while agent.getXferStatus(handle) != nixl.NIXL_SUCCESS:
                pass
            agent.releaseXferReq(handle)

    def read_fenced(self, reads: Sequence[Read]) -> None:
        """The same with what a load owes: a word of every producer worker before and after, and a message to each."""
        self.read(self._fence)
        self.read(reads)
        self.read(self._fence)
        for name in self._names.values():
            self._agent.genNotif(name, _DONE)

    def close(self) -> None:
        for handle in self._handles:
            self._agent.releasedDlistH(handle)
        for name in self._names.values():
            self._agent.invalidateRemoteMD(name)
        for registered in self._registered:
            self._agent.deregisterMem(registered)
        del self._agent

    def _register(self, segment: Any, address: int, num_bytes: int, device: int) -> Any:
        region = np.array([(address, num_bytes, device)], dtype=np.uint64)
        registered = self._nixl.nixlRegDList(segment, region)
        self._agent.registerMem(registered)
        return registered

    def _prepare(self, owner: Any, segment: Any, rows: np.ndarray) -> Any:
        self._handles.append(self._agent.prepXferDlist(owner, segment, rows))
        return self._handles[-1]


class WakeUps:
    """A thread that answers, with the queue and the lock that a load has: what waking two threads in turn takes.

    No load is faster: its order wakes the transfer thread, and its result the thread that waits.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answered = threading.Lock()
        self._answered.acquire()
        self._thread = threading.Thread(target=self._run, name="answering", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # With a time limit, as the transfer thread waits for orders.
        while self._inbox.get(timeout=_LONG_S):
            self._answered.release()

    def there_and_back(self) -> None:
        """Wake the thread, and be woken by it.

        Raises:
            TimeoutError: it has ended.
        """
        self._inbox.put(True)
        if not self._answered.acquire(timeout=_LONG_S):
            raise TimeoutError("the other thread does not answer")

    def close(self) -> None:
        self._inbox.put(False)
        self._thread.join()


def _slots(address: int, count: int) -> np.ndarray:
    return np.array([(address, SLOT_BYTES, 0, SLOT_BYTES, count)], dtype=np.int64)


def memory_copies(
    source: torch.Tensor, target: torch.Tensor, run_bytes: int, count: int
) -> Callable[[], None]:
    """`count` runs, each from anywhere in a memory of this process to the next place in another."""
    runs = np.random.default_rng(3).permutation(len(source) // run_bytes)[:count]
    here = torch.from_numpy(runs.astype(np.int64)).to(source.device)
    wide = source[: len(source) // run_bytes * run_bytes].view(-1, run_bytes)
    out = target[: len(runs) * run_bytes].view(-1, run_bytes)

    def copy() -> None:
        torch.index_select(wide, 0, here, out=out)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)

    return copy
