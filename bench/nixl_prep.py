"""Two NIXL agents and registered memory that is never touched: the cost of preparing descriptors, without the bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.worker.fabric.agent import AgentConfig, apply_ucx_defaults, load_bindings, make_agent

STAGING_BYTES = 256 << 20
_NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python names only from 3.13 on: address space without a promise of memory."""


class Registered:
    """A consumer's agent with its cache and staging pool, and producers' agents with theirs, known to it."""

    def __init__(self, local_bytes: int, remote_bytes: int, remotes: int) -> None:
        apply_ucx_defaults(os.environ)
        self._bindings: Any = load_bindings()
        self._maps: list[mmap.mmap] = []
        self._handles: list[Any] = []
        self.local = self._map(local_bytes)
        self.staging = self._map(STAGING_BYTES)
        self.remote = [self._map(remote_bytes) for _ in range(remotes)]
        self._consumer = self._agent([(self.local, local_bytes, 0), (self.staging, STAGING_BYTES, 0)])
        self._producers = [self._agent([(base, remote_bytes, 0)]) for base in self.remote]
        self._names = [self._consumer.loadRemoteMD(producer.getLocalMD()) for producer in self._producers]

    def prepare(self, producer: int | None, rows: NDArray[np.int64]) -> None:
        """Strided rows of a producer, or of the consumer."""
        self._handles.append(self._consumer.prepXferDlist(self._owner(producer), self._bindings.DRAM_SEG, rows))

    def close(self) -> None:
        """Give back everything that was prepared, the agents and the address space."""
        for handle in self._handles:
            self._consumer.releasedDlistH(handle)
        self._handles.clear()
        del self._consumer, self._producers
        for one in self._maps:
            one.close()

    def _owner(self, producer: int | None) -> Any:
        return self._bindings.NIXL_INIT_AGENT if producer is None else self._names[producer]

    def _map(self, num_bytes: int) -> int:
        """Address space without a promise of memory; returns where it begins."""
        one = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._maps.append(one)
        view = ctypes.c_char.from_buffer(one)
        address = ctypes.addressof(view)
        del view  # or the map could not be closed
        return address

    def _agent(self, regions: list[tuple[int, int, int]]) -> Any:
        agent = make_agent(self._bindings, f"bench-{uuid.uuid4().hex[:12]}", AgentConfig(progress_thread=False))
        rows = np.array(regions, dtype=np.uint64)
        agent.registerMem(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, rows))
        return agent
