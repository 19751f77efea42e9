"""The loopback transfer, in processes of its own: `python -m kvferry.cli.doctor.loopback_pair`.

The process forks before it has an agent: the child owns memory, the parent reads it. (NIXL loads torch if it is
installed, which takes seconds, so NIXL is loaded only once.) Each event is one JSON line on standard output. NIXL and
UCX can abort a process; in these processes that ends only the transfer, not the doctor.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from kvferry.cli.doctor.cuda_memory import CudaMemory, CudaUnavailable
from kvferry.protocol.errors import KvferryError
from kvferry.worker.fabric.agent import load_bindings
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, PeerAgent, Region, TransferState

ROW_BYTES = 1 << 20
ROWS = 64
TOTAL_BYTES = ROW_BYTES * ROWS
TIMES = 3
_POLL_S = 50e-6


def pattern() -> npt.NDArray[np.uint8]:
    """The content of the owner's memory; neighbouring rows differ."""
    row = np.arange(ROW_BYTES, dtype=np.uint32) * 7
    rows = row[None, :] + np.arange(ROWS, dtype=np.uint32)[:, None]
    return (rows % 251).astype(np.uint8).ravel()


@dataclass
class Memory:
    """One piece of memory that can be registered, in the host or on GPU 0."""

    kind: MemoryKind
    host: npt.NDArray[np.uint8]
    cuda: CudaMemory | None = None

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return int(self.host.ctypes.data) if self.cuda is None else self.cuda.address

    def rows(self, address: int) -> DescriptorRows:
        """`ROWS` descriptors, starting at an address."""
        return DescriptorRows.of(self.kind, [(address, ROW_BYTES, 0, ROW_BYTES, ROWS)])

    def content(self) -> npt.NDArray[np.uint8]:
        """Its bytes, fetched from the GPU if they are there."""
        if self.cuda is not None:
            self.cuda.fetch(self.host.ctypes.data)
        return self.host


def memories(content: npt.NDArray[np.uint8]) -> tuple[list[Memory], str]:
    """Host memory, and GPU memory if there is CUDA, both with this content; and why there is no GPU memory."""
    found = [Memory(MemoryKind.DRAM, content)]
    try:
        cuda = CudaMemory(TOTAL_BYTES)
        cuda.fill(content.ctypes.data)
    except CudaUnavailable as missing:
        return found, str(missing)
    return [*found, Memory(MemoryKind.VRAM, content.copy(), cuda)], ""


def own(said: TextIO, asked: TextIO) -> None:
    """The owner's part: send the addresses of its memory and wait until the reader closes the pipe."""
    fabric = NixlFabric(f"kvferry-doctor-owner-{os.getpid()}")
    registered, wrong = _register(fabric, memories(pattern())[0])
    addresses = {memory.kind.value: memory.address for memory in registered}
    tell(said, {"metadata": fabric.metadata().hex(), "addresses": addresses, "wrong": wrong})
    asked.read()
    fabric.close()


def read_all(said: TextIO, received: TextIO) -> None:
    """The reader's part: read each kind of memory that both have, and report the results."""
    fabric = NixlFabric(f"kvferry-doctor-reader-{os.getpid()}")
    mine, no_cuda = memories(np.zeros(TOTAL_BYTES, np.uint8))
    if no_cuda:
        tell(said, {"no_cuda": no_cuda})
    registered, wrong = _register(fabric, mine)
    owner = json.loads(received.readline() or '{"failed": "the process that owns the memory ended"}')
    if "failed" in owner:
        tell(said, owner)
        return
    before = _open_files()
    peer = fabric.add_peer(bytes.fromhex(owner["metadata"]))
    wrong = {**wrong, **owner["wrong"]}
    for memory in registered:
        kind = memory.kind.value
        if kind not in wrong and kind in owner["addresses"]:
            tell(said, {"reading": kind})
            try:
                tell(said, {"read": _read(fabric, memory, peer, owner["addresses"][kind])})
            except (KvferryError, CudaUnavailable) as failure:
                wrong[kind] = str(failure)
        if memory.kind is MemoryKind.DRAM:
            tell(said, {"files": _open_files() - before})
    for kind, text in wrong.items():
        tell(said, {"read": {"kind": kind, "wrong": text}})
    tell(said, {"end": True})
    fabric.close()


def _register(fabric: NixlFabric, wanted: list[Memory]) -> tuple[list[Memory], dict[str, str]]:
    """The memory that could be registered, and by kind why the others could not."""
    registered, wrong = [], {}
    for memory in wanted:
        try:
            fabric.register([Region(memory.address, TOTAL_BYTES, memory.kind)])
        except KvferryError as failure:
            wrong[memory.kind.value] = str(failure)
        else:
            registered.append(memory)
    return registered, wrong


def _read(fabric: NixlFabric, memory: Memory, peer: PeerAgent, address: int) -> dict[str, Any]:
    """Read one row for the first contact, then all rows `TIMES` times."""
    local = fabric.prepare_local(memory.rows(memory.address))
    remote = fabric.prepare_remote(peer, memory.rows(address))
    taken_s = []
    for rows in (1, *[ROWS] * TIMES):
        indices = np.arange(rows, dtype=np.int32)
        started = time.perf_counter()
        transfer = fabric.post_read(local, indices, remote, indices)
        while fabric.poll(transfer) is not TransferState.DONE:
            time.sleep(_POLL_S)
        taken_s.append(time.perf_counter() - started)
        fabric.release(transfer)
    equal = bool(np.array_equal(memory.content(), pattern()))
    first_s, *others_s = taken_s
    return {
        "kind": memory.kind.value,
        "bytes": TOTAL_BYTES,
        "best_s": min(others_s),
        "first_ms": first_s * 1e3,
        "equal": equal,
    }


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def tell(said: TextIO, what: dict[str, Any]) -> None:
    """Write one JSON line."""
    said.write(json.dumps(what) + "\n")
    said.flush()


def _play(part: Any, said: TextIO, received: TextIO) -> int:
    """Run a part; an exception is reported as JSON, not printed as a traceback."""
    try:
        part(said, received)
    except Exception as failure:  # noqa: BLE001 - the doctor reports it
        tell(said, {"failed": f"{type(failure).__name__}: {failure}"})
        return 1
    return 0


def main() -> int:
    """Run both ends; returns the exit status."""
    try:
        bindings = load_bindings()
    except KvferryError as missing:
        tell(sys.stdout, {"failed": str(missing)})
        return 1
    tell(sys.stdout, {"bindings": bindings.__name__.partition(".")[0]})
    from_owner, owner_says = os.pipe()
    owner_asked, to_owner = os.pipe()
    if os.fork() == 0:
        os.close(from_owner)
        os.close(to_owner)
        os._exit(_play(own, os.fdopen(owner_says, "w"), os.fdopen(owner_asked)))
    os.close(owner_says)
    os.close(owner_asked)
    code = _play(read_all, sys.stdout, os.fdopen(from_owner))
    os.close(to_owner)
    os.wait()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
